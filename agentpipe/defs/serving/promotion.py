"""A candidate's fate, carried out: compared with the champion of now, promoted by compare-and-set, held, or refused."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentpipe.defs.drifting import drift_from
from agentpipe.defs.gates import demand
from agentpipe.defs.partitions import split_candidate
from agentpipe.defs.players import champion, policy_player
from agentpipe.defs.references import Reference
from agentpipe.defs.scene import scene
from agentpipe.defs.steps import Step
from agentpipe.errors import CorruptError, GateError

if TYPE_CHECKING:
    from agentpipe.defs.resources import Workspace
    from agentpipe.evaluation.challenge_fate import Fate, Standing
    from agentpipe.evaluation.challenge_result import Challenge
    from agentpipe.learning.succession.champion import Champion

TRIES = 3
"""Comparisons with champions that change under one candidate's hands, before it is left to be compared again."""


@dataclass(frozen=True)
class Candidate:
    """What a promotion needs of a candidate."""

    partition: str
    digest: str
    package: str
    """relative to the home"""
    parent: str | None
    bundle: Reference
    success: float
    unchecked: tuple[str, ...] = ()
    """why its bundle was not checked in a server, where that is needed"""

    @classmethod
    def of(cls, workspace: Workspace, partition: str) -> Candidate:
        """From the references of its checkpoint, evaluation, bundle and server check.

        Raises:
            GateError: the bundle failed its server check, or the check is of another bundle.
        """
        references = workspace.references
        checkpoint = references.load("policy_checkpoint", partition)
        evaluation = references.load("holdout_evaluation", partition)
        parent = checkpoint.figure("parent")
        bundle = references.load("triton_bundle", partition)
        return cls(
            partition,
            checkpoint.data_version,
            checkpoint.path,
            None if parent == "none" else parent,
            bundle,
            evaluation.figure("success"),
            _unchecked(workspace, partition, bundle),
        )


def _unchecked(workspace: Workspace, partition: str, bundle: Reference) -> tuple[str, ...]:
    check = workspace.references.load("bundle_server_check", partition)
    if check.consumed.get("triton_bundle") != bundle.data_version:
        remedy = f"materialise bundle_server_check[{partition}]"
        raise GateError(f"{partition}: the server check is of another bundle", remedy=remedy)
    demand(check.figure("gates"), f"{partition} is out")
    skipped = check.figure("status") == "SKIPPED" and not workspace.settings.serving.skipped_check_allowed
    return (f"its server check was skipped: {check.figure('reason')}",) if skipped else ()


@dataclass(frozen=True)
class Settled:
    """What became of a candidate."""

    fate: Fate
    champion: Champion | None
    """the champion now"""
    promoted: bool
    challenge: Challenge | None = None
    drift: str = "not measured"


def settle(work: Step, candidate: Candidate) -> Settled:
    """Decides and carries out; where another is promoted meanwhile, compares again.

    Raises:
        CheckpointError, BundleError, ParityError, VersionError: package or bundle are no longer what they were when
            they were made: they are neither compared, nor held, nor promoted.
        CorruptError: the champion's pointer was lost, or a record is damaged.
    """
    from agentpipe.evaluation.challenge_fate import decide
    from agentpipe.learning.succession.champion import ChampionConflictError
    from agentpipe.learning.succession.promotion import champion_stores

    workspace, challenge = work.workspace, None
    champions, holds = champion_stores(workspace.root)
    champion(workspace)  # one that was lost is not replaced by the next best
    for _ in range(TRIES):
        history = champions.history()
        current = history[-1] if history else None
        standing = _standing(workspace, candidate, history)
        fate = decide(standing)
        if current is not None and (current.digest, current.who) == (candidate.digest, _who(candidate)):
            return Settled(
                dataclasses.replace(fate, action="promote"), current, promoted=True
            )  # a run was killed since
        if fate.action == "compare_again" and current is not None:
            _check(workspace, candidate)  # a look is counted for exactly this one
            challenge = _compare(work, candidate, current)
            standing = dataclasses.replace(
                standing,
                compared_with=current.digest,
                verdict=challenge.verdict,
                reasons=challenge.reasons,
                drift_against=current.digest,
                drift=_drift(workspace, candidate, current),
            )
            fate = decide(standing)
        figures = _figures(candidate, challenge, standing.drift)
        drift = standing.drift or "not measured"
        if fate.action in ("promote", "hold"):
            _check(workspace, candidate)
        if fate.action == "hold":
            holds.hold(
                candidate.digest,
                package=candidate.package,
                bundle=candidate.bundle.path,
                compared_with=None if current is None else current.digest,
                reasons=[fate.reason],
                figures=figures,
                who=_who(candidate),
            )
        if fate.action != "promote":
            return Settled(fate, current, promoted=False, challenge=challenge, drift=drift)
        try:
            promoted = champions.promote(
                candidate.digest,
                candidate.package,
                expected=None if current is None else current.digest,
                reason=fate.reason,
                who=_who(candidate),
                figures=figures,
            )
        except ChampionConflictError:
            continue
        return Settled(fate, promoted, promoted=True, challenge=challenge, drift=drift)
    return Settled(fate, champions.current(), promoted=False, challenge=challenge, drift=drift)


def _who(candidate: Candidate) -> str:
    return f"publish[{candidate.partition}]"


def _check(workspace: Workspace, candidate: Candidate) -> None:
    """Whether package and bundle still are what they were when they were made."""
    from agentpipe.learning.succession.promotion import check_candidate
    from agentpipe.serving.verify import check_bundle

    bundle = {"bundle": candidate.bundle.path, "bundle_digest": candidate.bundle.data_version}
    check_candidate(workspace.root, candidate.digest, candidate.package, bundle, check_bundle)


def _standing(workspace: Workspace, candidate: Candidate, history: tuple[Champion, ...]) -> Standing:
    from agentpipe.evaluation.challenge_fate import Standing
    from agentpipe.learning.policy.lineage import trained_labels
    from agentpipe.learning.succession.promotion import REJECTED, champion_stores

    current = history[-1] if history else None
    theirs: frozenset[str] = frozenset()
    own: frozenset[str] = frozenset()
    if current is not None and current.digest != candidate.digest:
        theirs = trained_labels(workspace.root / current.package)
        own = trained_labels(workspace.root / candidate.package)
    held = [held for held in champion_stores(workspace.root)[1].all() if held.candidate == candidate.digest]
    rejected = [one.decision.who for one in held if one.decision is not None and one.decision.kind == REJECTED]
    return Standing(
        candidate=candidate.digest,
        champion=None if current is None else current.digest,
        parent=candidate.parent,
        past_champions=frozenset(entry.digest for entry in history),
        why_not_promotable=(*candidate.bundle.figure("reasons"), *candidate.unchecked),
        rejected_by=rejected[0] if rejected else None,
        older_than_champion=_older(workspace, candidate, current, learned_more=not own <= theirs),
        missing_labels=len(theirs - own),
    )


def _older(workspace: Workspace, candidate: Candidate, current: Champion | None, *, learned_more: bool) -> bool:
    """An old partition run again: of an earlier day, or of the same day, whose night comes after its feedback.

    Amended feedback that begins from the champion of now is none. Nor is a candidate of the same day that learned what
    the champion has not (``learned_more``): it lost a race, and is compared. By hand there is no order within a day.
    """
    partition = current.figures.get("partition") if current else None
    if current is None or partition is None:
        return False
    day, trigger = split_candidate(candidate.partition)
    try:
        promoted, promoted_by = split_candidate(partition)
    except ValueError as error:
        file, remedy = workspace.root / "champion" / "champion.json", "restore champion.json from a backup"
        text = f"not a champion: its partition {partition!r} begins with no day"
        raise CorruptError(text, file=file, field="partition", remedy=remedy) from error
    if trigger == "feedback" and candidate.parent == current.digest:
        return False
    return day < promoted or ((day, trigger, promoted_by) == (promoted, "feedback", "nightly") and not learned_more)


def _compare(work: Step, candidate: Candidate, current: Champion) -> Challenge:
    """Both on the same fresh episodes of the held-out environments; the look is counted."""
    from agentpipe.evaluation.challenge import challenge
    from agentpipe.evaluation.challenge_looks import LookStore, question
    from agentpipe.evaluation.challenge_statistics import Limits

    workspace = work.workspace
    setting, chosen = scene(workspace), workspace.settings.promotion
    environments, episodes = setting.catalog.environments("holdout"), chosen.episodes_per_env
    asked = question(environments, setting.table, setting.profile, seed=setting.seed, episodes=episodes)
    look = LookStore(workspace.root / "champion").take(candidate.digest, current.digest, asked, episodes)
    found = challenge(
        policy_player(workspace.root / candidate.package),
        policy_player(workspace.root / current.package),
        environments,
        setting.table,
        setting.profile,
        seed=setting.seed,
        look=look,
        trained_on=setting.catalog.environments("train"),
        limits=Limits(chosen.margin, chosen.cell_margin, chosen.alpha),
        threads=setting.threads,
        progress=work.progress,
    )
    found.save(comparison_folder(work, current))
    return found


def comparison_folder(work: Step, current: Champion) -> Path:
    """Where the comparison with one champion lies."""
    return work.folder / f"against-{current.digest[:16]}"


def _drift(workspace: Workspace, candidate: Candidate, current: Champion) -> str:
    """Status against the champion of now: as measured before, where that was the same champion."""
    measured = workspace.references.find("policy_drift", candidate.partition)
    if measured is not None and measured.figures.get("champion") == current.digest:
        return str(measured.figure("status"))
    return drift_from(workspace, workspace.root / candidate.package, current).status


def _figures(candidate: Candidate, challenge: Challenge | None, drift: str | None) -> dict[str, Any]:
    """What the decision rested on."""
    bundle = candidate.bundle
    compared = {} if challenge is None else _compared(challenge)
    return {
        "partition": candidate.partition,
        "bundle": bundle.path,
        "bundle_digest": bundle.data_version,
        "package_bytes": bundle.figure("package_bytes"),
        "success": candidate.success,
        "drift": drift or "not measured",
        **compared,
    }


def _compared(challenge: Challenge) -> dict[str, Any]:
    names = ("verdict", "difference", "low", "high")
    found = {name: challenge.figures[name] for name in names}
    look = challenge.figures["look"]
    return {**found, "look": look["number"], "look_of_champion": look["of_champion"]}


def serve_champion(workspace: Workspace) -> str:
    """Makes production serve the champion's bundle; which version that is."""
    from agentpipe.serving import deployment

    found = deployment.follow_champion(workspace.settings)
    return "nothing" if found is None else f"{found.model}/{found.version}"
