"""What production serves: a model repository that a Triton polls, and of each version which bundle it came from.

::

    <root>/models/<model>/config.pbtxt          a Triton is pointed at <root>/models, in poll mode
    <root>/models/<model>/<version>/model.onnx
    <root>/published.json                       every version there ever was
    <root>/withdrawn/<model>-<version>/         taken out of service, may come back
    <root>/drafts/                              what is being copied
    <root>/lock                                 one publisher at a time; another one waits

A version appears, goes and comes back by one rename. Numbers only grow: a number means one policy for ever.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from agentpipe.errors import BundleError, CorruptError, InputError
from agentpipe.learning.champion import exclusive
from agentpipe.serving import layout
from agentpipe.serving.publish import publish_version, published_versions, withdraw_version
from agentpipe.serving.triton_config import MODEL_FILE
from agentpipe.serving.verify import verify_bundle
from agentpipe.storage import digest_file, exchange, read_json, typed_os_errors, write_json

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path

    from agentpipe.serving.verify import VerifyReport

_FORMAT: Final = 1
SERVED_AT_ONCE: Final = 2  # the version policy of a bundle's configuration
SERVED, PREVIOUS, KEPT, WITHDRAWN, REMOVED = "served", "previous", "kept", "withdrawn", "removed"


@dataclass(frozen=True)
class Published:
    """One version of one model, and where it came from."""

    model: str
    version: int
    bundle: str
    """content digest of its bundle"""
    source: str
    """where that bundle lay"""
    graph: str
    """SHA-256 of the graph"""
    at: str
    """UTC, ISO 8601"""
    who: str
    reason: str

    def to_json(self) -> dict[str, Any]:
        """The version as a JSON object."""
        return dataclasses.asdict(self)


class ServingRepository:
    """The repository below ``root``.

    Args:
        root: directory; made at the first publication.
        keep: versions that are kept beside the newest one, and as many of those that were withdrawn.
    """

    def __init__(self, root: Path, *, keep: int = 5) -> None:
        self.root, self.keep = root, keep
        self.models = root / "models"
        self._record, self._withdrawn, self._drafts = root / "published.json", root / "withdrawn", root / "drafts"

    # ------------------------------------------------------------------------------------------ reading

    def history(self) -> tuple[Published, ...]:
        """Every version that was ever published, oldest first.

        Raises:
            CorruptError: the record is damaged.
        """
        if not self._record.exists():
            return ()
        content: Any = read_json(self._record)
        remedy = "restore it from a backup"
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            raise CorruptError("not a record of publications", file=self._record, remedy=remedy)
        try:
            found = tuple(Published(**each) for each in content["versions"])
        except (KeyError, TypeError) as error:
            raise CorruptError(f"not a publication: {error!r}", file=self._record, remedy=remedy) from error
        fields: list[object] = [each.version for each in found]
        if not all(type(version) is int for version in fields):
            raise CorruptError("not a publication: a field of another type", file=self._record, remedy=remedy)
        return found

    def state(self, entry: Published) -> str:
        """``served`` (to who asks for no version), ``previous`` (also loaded), ``kept``, ``withdrawn``, ``removed``."""
        present = published_versions(self.models / entry.model)
        if entry.version in present:
            place = present[::-1].index(entry.version)
            return (SERVED, *[PREVIOUS] * (SERVED_AT_ONCE - 1))[place] if place < SERVED_AT_ONCE else KEPT
        return WITHDRAWN if self._aside(entry.model, entry.version).is_dir() else REMOVED

    def served(self, model: str = "policy") -> Published | None:
        """The version that answers who asks for none; None before the first.

        Raises:
            BundleError: the version there is not on record.
        """
        present = published_versions(self.models / model)
        return self._entry(model, present[-1]) if present else None

    # ------------------------------------------------------------------------------------------ changing

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Holds the repository for one publisher and removes what a killed one left; another one waits here."""
        with exclusive(self.root / "lock"), typed_os_errors(self.root):
            shutil.rmtree(self._drafts, ignore_errors=True)
            self._drafts.mkdir()
            yield
            shutil.rmtree(self._drafts, ignore_errors=True)

    def publish(
        self, bundle: Path, *, who: str, reason: str, protect: Collection[str] = (), replace: bool = False
    ) -> Published:
        """Serves ``bundle`` as the next version; where it is served already nothing is changed.

        To be called while :meth:`changing`.

        Args:
            bundle: A bundle; it is verified first.
            who: Who publishes it.
            reason: And why.
            protect: Digests of bundles whose versions retention keeps, such as the champion's.
            replace: Where the model there has another configuration (another signature), put the new one in its place,
                without its earlier versions.

        Raises:
            BundleError, ParityError: the bundle is damaged, or the model there has another configuration.
            DiskFullError, HomeError: it cannot be written; what was served is served still.
        """
        report = verify_bundle(bundle)
        present = published_versions(self.models / report.model_name)
        if present and self._digest(report.model_name, present[-1]) == report.digest:
            return self._entry(report.model_name, present[-1])
        history = self.history()
        number = max([0, *present, *(each.version for each in history if each.model == report.model_name)]) + 1
        entry = self._describe(bundle, report, number, who, reason)
        self._write((*history, entry))  # a number that is noted is never used again, whatever happens now
        if replace and present and not self._same_configuration(bundle, report):
            self._replace(bundle, report, number)
        else:
            publish_version(bundle, self.models, version=number, drafts=self._drafts)
        self._retain(report.model_name, protect)
        return entry

    def rollback(self, model: str = "policy", to: int | None = None) -> Published:
        """Serves another version again: the one before the newest, or ``to``, which may have been withdrawn.

        Newer versions are withdrawn, the newest one last, so that a server never sees one in between as the newest.
        To be called while :meth:`changing`.

        Raises:
            InputError: there is no such version, or it is served already.
            BundleError: its graph is not what was published.
        """
        present = published_versions(self.models / model)
        if to is None and len(present) < SERVED_AT_ONCE:
            raise InputError(f"there is no version before {present or 'the first'}", remedy="name one of bundle list")
        number = present[-2] if to is None else to
        entry, state = self._entry(model, number), self.state(self._entry(model, number))
        if state == SERVED:
            raise InputError(f"version {number} is served already", remedy="name another one of bundle list")
        if state == REMOVED:
            raise InputError(f"version {number} was removed", remedy="publish its bundle again")
        self._check_graph(
            entry, self._aside(model, number) if state == WITHDRAWN else self.models / model / str(number)
        )
        if state == WITHDRAWN:
            self._aside(model, number).rename(self.models / model / str(number))
        for newer in (version for version in present if version > number):
            withdraw_version(self.models, model, newer, aside=self._aside(model, newer))
        return entry

    def find_again(self, bundle: str, model: str = "policy") -> Published | None:
        """A version of that bundle which a rollback can serve, the newest one; None where there is none."""
        usable = (PREVIOUS, KEPT, WITHDRAWN)
        found = [each for each in self.history() if (each.model, each.bundle) == (model, bundle)]
        return next((each for each in reversed(found) if self.state(each) in usable), None)

    # ------------------------------------------------------------------------------------------ inside

    def _aside(self, model: str, version: int) -> Path:
        return self._withdrawn / f"{model}-{version}"

    def _entry(self, model: str, version: int) -> Published:
        for entry in self.history():
            if (entry.model, entry.version) == (model, version):
                return entry
        place = self.models / model / str(version)
        remedy = "agentpipe bundle list shows what there is" if not place.exists() else "move it away"
        raise (BundleError if place.exists() else InputError)(
            f"version {version} of {model} is not on record", file=self._record, remedy=remedy
        )

    def _digest(self, model: str, version: int) -> str | None:
        with contextlib.suppress(BundleError):
            return self._entry(model, version).bundle
        return None

    def _describe(self, bundle: Path, report: VerifyReport, number: int, who: str, reason: str) -> Published:
        graph = digest_file(bundle / report.model_name / str(report.version) / MODEL_FILE)
        at = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
        return Published(report.model_name, number, report.digest, str(bundle), graph, at, who, reason)

    def _write(self, entries: tuple[Published, ...]) -> None:
        write_json(self._record, {"format": _FORMAT, "versions": [entry.to_json() for entry in entries]})

    def _check_graph(self, entry: Published, folder: Path) -> None:
        graph = folder / MODEL_FILE
        if not graph.is_file() or digest_file(graph) != entry.graph:
            remedy = "publish its bundle again"
            raise BundleError(f"version {entry.version} is not what was published", file=graph, remedy=remedy)

    def _same_configuration(self, bundle: Path, report: VerifyReport) -> bool:
        mine, theirs = (root / report.model_name / layout.CONFIG for root in (bundle, self.models))
        return mine.read_bytes() == theirs.read_bytes()

    def _replace(self, bundle: Path, report: VerifyReport, number: int) -> None:
        """Puts a model of another configuration into the place of the one that is there."""
        fresh, target = self._drafts / "models", self.models / report.model_name
        publish_version(bundle, fresh, version=number, drafts=self._drafts)
        if not exchange(fresh / report.model_name, target):
            target.rename(self._drafts / "old")
            (fresh / report.model_name).rename(target)
        shutil.rmtree(self._withdrawn, ignore_errors=True)

    def _retain(self, model: str, protect: Collection[str]) -> None:
        """Removes the oldest versions beyond ``keep``: none that is loaded, none of a protected bundle."""
        present = published_versions(self.models / model)
        removable = [each for each in present[:-SERVED_AT_ONCE] if self._digest(model, each) not in protect]
        excess = len(present) - 1 - self.keep
        for version in removable[: max(0, excess)]:
            (self.models / model / str(version)).rename(self._drafts / f"removed-{version}")
        aside = sorted(
            (each for each in self.history() if each.model == model and self.state(each) == WITHDRAWN),
            key=lambda each: each.version,
        )
        for entry in aside[: -self.keep] if len(aside) > self.keep else ():
            if entry.bundle not in protect:
                shutil.rmtree(self._aside(model, entry.version), ignore_errors=True)
