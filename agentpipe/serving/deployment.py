"""From bundles and the champion of a home to what its serving repository serves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agentpipe.errors import AgentpipeError, BundleError, InputError, ServingError
from agentpipe.learning.succession.promotion import champion_stores, signed
from agentpipe.serving.check_records import check_once
from agentpipe.serving.repository import SERVED, ServingRepository
from agentpipe.serving.server_check import FAILED, SKIPPED
from agentpipe.serving.verify import check_bundle, verify_bundle

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from agentpipe.learning.succession.champion import Champion
    from agentpipe.progress import Progress
    from agentpipe.serving.repository import Published
    from agentpipe.serving.server_check import ServerCheck
    from agentpipe.settings import Settings


def serving_repository(settings: Settings) -> ServingRepository:
    """The repository of a home: ``HOME/serving``, or the folder of the setting."""
    chosen = settings.serving
    return ServingRepository(chosen.repository or settings.home / "serving", keep=chosen.keep_versions)


def serve_champion(settings: Settings, *, replace: bool = False) -> Published | None:
    """Makes the repository serve the champion's bundle, whatever it served before; None without a champion.

    Called whenever the champion has moved. Interrupted, or called twice, the next call does the rest: it compares what
    is served with what should be, its files as well. A bundle that was served before comes back by a rollback, another
    one is published.

    Raises:
        BundleError, ParityError: the champion's bundle is missing, damaged or another one; or the model there has
            another configuration: ``agentpipe bundle publish --replace``.
        DiskFullError, HomeError: it cannot be written.
    """
    repository = serving_repository(settings)
    if champion_stores(settings.home)[0].current() is None:
        return None
    with repository.changing():
        current = champion_stores(settings.home)[0].current()  # read again: the last one to come here sees the last
        assert current is not None
        bundle, digest = champion_bundle(settings.home, current)
        served = repository.served()
        if served is not None and served.bundle == digest and not repository.damage(served):
            return served
        again = repository.find_again(digest)
        if again is not None:
            return repository.rollback(to=again.version)
        check_bundle(bundle, digest)
        reason = f"champion {current.sequence}: {current.reason}"
        return repository.publish(
            bundle, who=current.who, reason=reason, protect=protected(settings.home), replace=replace
        )


def follow_champion(settings: Settings) -> Published | None:
    """:func:`serve_champion` for who has just moved the champion: what goes wrong now is no reason to doubt that.

    Raises:
        ServingError: the champion has moved, but production does not serve it yet.
    """
    try:
        return serve_champion(settings)
    except AgentpipeError as error:
        text = f"the champion has moved, but production does not serve it: {error.message}"
        remedy = f"{error.remedy or 'mend that'}; then agentpipe bundle publish does the rest"
        raise ServingError(text, **error.where, remedy=remedy) from error


def champion_bundle(home: Path, current: Champion) -> tuple[Path, str]:
    """Where the champion's bundle lies, and its digest.

    Raises:
        BundleError: none is recorded.
    """
    bundle, digest = current.figures.get("bundle"), current.figures.get("bundle_digest")
    if not isinstance(bundle, str) or not isinstance(digest, str):
        remedy = "promote a policy whose bundle was recorded"
        raise BundleError(f"no bundle is recorded for champion {current.sequence}", field="bundle", remedy=remedy)
    return home / bundle, digest


def protected(home: Path) -> Collection[str]:
    """Bundles whose versions are never removed: the champion's."""
    current = champion_stores(home)[0].current()
    digest = None if current is None else current.figures.get("bundle_digest")
    return frozenset((digest,)) if isinstance(digest, str) else frozenset()


def publish_bundle(
    settings: Settings,
    bundle: Path,
    *,
    who: str,
    reason: str,
    force: bool = False,
    replace: bool = False,
    progress: Progress,
) -> tuple[Published, ServerCheck]:
    """Publishes a bundle by hand, after its server check.

    Args:
        settings: Settings with the home.
        bundle: The bundle.
        who: Who publishes it.
        reason: And why.
        force: Also one that is not promotable, or whose check was skipped; never one whose check failed.
        replace: See :meth:`~agentpipe.serving.repository.ServingRepository.publish`.
        progress: Told of the check.

    Raises:
        BundleError: it failed its check, or is not promotable, or its check was skipped.
        InputError: no ``who`` or ``reason``.
    """
    signed(who, reason)
    report = verify_bundle(bundle)
    if not report.promotable and not force:
        remedy = "publish one that is promotable, or this one with --force"
        raise BundleError(f"not promotable: {'; '.join(report.reasons)}", bundle=bundle, remedy=remedy)
    check, _ = check_once(settings.home, bundle, report.digest, settings, progress=progress)
    if check.status == FAILED:
        raise BundleError(f"the server check failed: {check.reason}", bundle=bundle, remedy="build the bundle again")
    if check.status == SKIPPED and not (force or settings.serving.skipped_check_allowed):
        remedy = "have it checked, or publish it with --force"
        raise BundleError(f"the server check was skipped: {check.reason}", bundle=bundle, remedy=remedy)
    repository = serving_repository(settings)
    with repository.changing():
        found = repository.publish(bundle, who=who, reason=reason, protect=protected(settings.home), replace=replace)
    return found, check


def roll_back_served(settings: Settings, version: int | None) -> Published:
    """Serves an earlier version again, or one that was withdrawn; the champion stays.

    Raises:
        InputError, BundleError: see :meth:`~agentpipe.serving.repository.ServingRepository.rollback`.
    """
    repository = serving_repository(settings)
    if not repository.history():
        raise InputError("nothing was published yet", remedy="agentpipe bundle publish BUNDLE")
    with repository.changing():
        return repository.rollback(to=version)


def list_published(settings: Settings) -> dict[str, Any]:
    """Every version with its state and what is damaged of it, and whether the champion's is the one that is served."""
    repository, ours = serving_repository(settings), protected(settings.home)
    versions = [
        {
            **entry.to_json(),
            "state": repository.state(entry),
            "damage": repository.damage(entry),
            "champion": entry.bundle in ours,
        }
        for entry in repository.history()
    ]
    served = [entry for entry in versions if entry["state"] == SERVED]
    current = None
    if ours:
        current = bool(served) and all(bool(entry["champion"]) for entry in served)
    return {"repository": str(repository.models), "versions": versions, "champion_served": current}
