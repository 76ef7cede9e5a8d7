"""What production serves: a model repository that a Triton polls, and of each version which bundle it came from.

::

    <root>/models/<model>/config.pbtxt          a Triton is pointed at <root>/models, in poll mode
    <root>/models/<model>/<version>/model.onnx
    <root>/published.json                       every version there ever was
    <root>/withdrawn/<model>-<version>/         taken out of service, may come back
    <root>/drafts/                              what is being copied
    <root>/lock                                 one publisher at a time; another one waits

A version appears, goes and comes back by one rename. Numbers only grow: a number means one policy for ever. What lies
there is held against the record: a graph or a configuration that is not what was published is damaged.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from agentpipe.errors import BundleError, CorruptError, InputError
from agentpipe.learning.succession.champion import exclusive
from agentpipe.serving import layout
from agentpipe.serving.publish import publish_version, published_versions, withdraw_version
from agentpipe.serving.triton_config import MODEL_FILE, is_model_name, read_config
from agentpipe.serving.verify import verify_bundle
from agentpipe.storage import (
    digest_bytes,
    digest_file,
    exchange,
    read_json,
    typed_os_errors,
    write_bytes,
    write_json,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path

    from agentpipe.serving.verify import VerifyReport

_FORMAT: Final = 1
SERVED_AT_ONCE: Final = 2  # the version policy of a bundle's configuration
SERVED, PREVIOUS, KEPT, WITHDRAWN, REMOVED = "served", "previous", "kept", "withdrawn", "removed"
DAMAGED: Final = "damaged"


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
    config: str = ""
    """SHA-256 of the configuration; empty in records of before that was noted"""

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
        self._read: tuple[tuple[int, ...], tuple[Published, ...]] = ((), ())

    # ------------------------------------------------------------------------------------------ reading

    def history(self) -> tuple[Published, ...]:
        """Every version that was ever published, oldest first.

        Raises:
            CorruptError: the record is damaged.
        """
        if not self._record.exists():
            return ()
        found = self._record.stat()
        mark = (found.st_ino, found.st_mtime_ns, found.st_size)
        if mark != self._read[0]:
            self._read = (mark, self._read_history())
        return self._read[1]

    def _read_history(self) -> tuple[Published, ...]:
        content: Any = read_json(self._record)
        remedy = "restore it from a backup"
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            raise CorruptError("not a record of publications", file=self._record, remedy=remedy)
        try:
            found = tuple(Published(**each) for each in content["versions"])
        except (KeyError, TypeError) as error:
            raise CorruptError(f"not a publication: {error!r}", file=self._record, remedy=remedy) from error
        if not all(_well_formed(each) for each in found):
            raise CorruptError("not a publication: a field of another type", file=self._record, remedy=remedy)
        return found

    def state(self, entry: Published) -> str:
        """What a version is.

        ``served`` (to who asks for no version), ``previous`` (also loaded), ``kept``, ``withdrawn``, ``removed``; or
        ``damaged``, see :meth:`damage`.
        """
        return DAMAGED if self.damage(entry) else self._place(entry)

    def damage(self, entry: Published) -> str:
        """What of the files of a version is not what was published; empty where they are, or where it was removed."""
        place = self._place(entry)
        if place == REMOVED:
            return ""
        if place == WITHDRAWN:
            return _differs(self._aside(entry.model, entry.version) / MODEL_FILE, entry.graph)
        model = self.models / entry.model
        graph = _differs(model / str(entry.version) / MODEL_FILE, entry.graph)
        return graph or _config_differs(model / layout.CONFIG, entry)

    def _place(self, entry: Published) -> str:
        """Where a version lies, whatever its files hold."""
        present = self._present(entry.model)
        if entry.version in present:
            place = present[::-1].index(entry.version)
            return (SERVED, *[PREVIOUS] * (SERVED_AT_ONCE - 1))[place] if place < SERVED_AT_ONCE else KEPT
        return WITHDRAWN if self._aside(entry.model, entry.version).is_dir() else REMOVED

    def served(self, model: str = "policy") -> Published | None:
        """The version that answers who asks for none, damaged or not; None before the first.

        Raises:
            BundleError: the version there is not on record.
        """
        present = self._present(model)
        return self._entry(model, present[-1]) if present else None

    # ------------------------------------------------------------------------------------------ changing

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Holds the repository for one publisher and removes what a killed one left; another one waits here."""
        with exclusive(self.root / "lock"), typed_os_errors(self.root):
            self._remove_leftovers()
            shutil.rmtree(self._drafts, ignore_errors=True)
            self._drafts.mkdir()
            yield
            shutil.rmtree(self._drafts, ignore_errors=True)

    def publish(
        self, bundle: Path, *, who: str, reason: str, protect: Collection[str] = (), replace: bool = False
    ) -> Published:
        """Serves ``bundle`` as the next version; where it is served already, and undamaged, nothing is changed.

        Versions that are damaged are taken away once there is the new one, since a server that cannot load one of two
        versions serves neither; a configuration that is damaged is put right. To be called while :meth:`changing`.

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
        name, history = report.model_name, self.history()
        present = self._present(name)
        newest = next((each for each in history if present and (each.model, each.version) == (name, present[-1])), None)
        if newest is not None and newest.bundle == report.digest and not self.damage(newest):
            return newest
        number = max([0, *present, *(each.version for each in history if each.model == name)]) + 1
        config = (bundle / name / layout.CONFIG).read_bytes()
        same, mend = self._compare_config(name, config, newest)
        self._check_room(name, number, same=same or mend, replace=replace)
        entry = self._describe(bundle, report, number, who, reason)
        self._write((*history, entry))  # a number that is noted is never used again, whatever happens now
        if same or mend:
            if mend:
                write_bytes(self._drafts / layout.CONFIG, config)
                (self._drafts / layout.CONFIG).rename(self.models / name / layout.CONFIG)
            publish_version(bundle, self.models, version=number, drafts=self._drafts)
            self._remove_damaged(name, present)
        else:
            self._replace(bundle, report, number)
        self._retain(name, protect)
        return entry

    def rollback(self, model: str = "policy", to: int | None = None) -> Published:
        """Serves another version again: the one before the newest, or ``to``, which may have been withdrawn.

        Newer versions are withdrawn, the newest one last, so that a server never sees one in between as the newest.
        To be called while :meth:`changing`.

        Raises:
            InputError: there is no such version, or it is served already.
            BundleError: its graph or its configuration is not what was published.
        """
        present = self._present(model)
        if to is None and len(present) < SERVED_AT_ONCE:
            raise InputError(f"there is no version before {present or 'the first'}", remedy="name one of bundle list")
        number = present[-2] if to is None else to
        entry = self._entry(model, number)
        state, damage = self._place(entry), self.damage(entry)
        if damage:
            remedy = "publish its bundle again"
            raise BundleError(f"version {number} is not what was published: {damage}", file=self.models, remedy=remedy)
        if state == SERVED:
            raise InputError(f"version {number} is served already", remedy="name another one of bundle list")
        if state == REMOVED:
            raise InputError(f"version {number} was removed", remedy="publish its bundle again")
        if state == WITHDRAWN:
            self._aside(model, number).rename(self.models / model / str(number))
        whole = published_versions(self.models / model)
        for newer in (version for version in present if version > number):
            if newer in whole:
                withdraw_version(self.models, model, newer, aside=self._aside(model, newer))
            else:  # its graph is gone
                (self.models / model / str(newer)).rename(self._drafts / f"damaged-{newer}")
        return entry

    def find_again(self, bundle: str, model: str = "policy") -> Published | None:
        """A version of that bundle which a rollback can serve, the newest one; None where there is none."""
        usable = (PREVIOUS, KEPT, WITHDRAWN)
        found = [each for each in self.history() if (each.model, each.bundle) == (model, bundle)]
        return next((each for each in reversed(found) if self.state(each) in usable), None)

    # ------------------------------------------------------------------------------------------ inside

    def _present(self, model: str) -> list[int]:
        """Versions that lie where a server looks, ascending: whole ones, and what is left of those on record."""
        folder = self.models / model
        names = {path.name for path in folder.iterdir() if path.is_dir()} if folder.is_dir() else set()
        left = [each.version for each in self.history() if each.model == model and str(each.version) in names]
        return sorted({*published_versions(folder), *left})

    def _remove_leftovers(self) -> None:
        """What publishers that were killed left beside the record: files and folders that were being written."""
        for path in self.root.glob(".staging-*"):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def _compare_config(self, model: str, config: bytes, newest: Published | None) -> tuple[bool, bool]:
        """Whether the configuration there is ``config`` (or none is needed yet), and whether it should be but is not.

        That is so where no version uses it, where the newest version was published with ``config``, and where that is
        not on record and what is there is none.
        """
        file = self.models / model / layout.CONFIG
        if not file.parent.exists() or (file.is_file() and file.read_bytes() == config):
            return True, False
        if newest is None:
            return False, not self._present(model)
        recorded = newest.config == digest_bytes(config)
        return False, recorded or (not newest.config and bool(_config_differs(file, newest)))

    def _check_room(self, model: str, number: int, *, same: bool, replace: bool) -> None:
        """Whether a version can be put there, before its number is noted.

        Raises:
            BundleError: the model there has another configuration, or something lies where the version goes.
        """
        if not same and not replace:
            file, remedy = self.models / model / layout.CONFIG, "agentpipe bundle publish --replace"
            raise BundleError("the model there has another configuration", file=file, remedy=remedy)
        folder, file, version = (self.models / model / name for name in ("", layout.CONFIG, str(number)))
        for place, what in ((folder, f"model {model}"), (file, f"the configuration of {model}")):
            if place.exists() and place.is_dir() == (place == file):
                raise BundleError(f"something else lies where {what} goes", file=place, remedy="move it away")
        if same and (version.exists() or version.is_symlink()):
            text = f"something else lies where version {number} of {model} goes"
            raise BundleError(text, file=version, remedy="move it away")

    def _remove_damaged(self, model: str, versions: list[int]) -> None:
        for entry in self.history():
            if entry.model == model and entry.version in versions and self.damage(entry):
                (self.models / model / str(entry.version)).rename(self._drafts / f"damaged-{entry.version}")

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
        config = digest_file(bundle / report.model_name / layout.CONFIG)
        at = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
        return Published(report.model_name, number, report.digest, str(bundle), graph, at, who, reason, config)

    def _write(self, entries: tuple[Published, ...]) -> None:
        write_json(self._record, {"format": _FORMAT, "versions": [entry.to_json() for entry in entries]})

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


def _well_formed(entry: Published) -> bool:
    """Whether the fields read have the types, and the model the name, of what is written."""
    version: object = entry.version
    texts: list[object] = [getattr(entry, each.name) for each in dataclasses.fields(entry) if each.name != "version"]
    if type(version) is not int or version < 1 or not all(isinstance(text, str) for text in texts):
        return False
    return is_model_name(entry.model)


def _differs(file: Path, digest: str) -> str:
    """Why ``file`` is not the one of that digest; empty where it is."""
    if not file.is_file():
        return f"{file.name} is missing"
    try:
        return "" if digest_file(file) == digest else f"{file.name} holds something else"
    except OSError as error:
        return f"{file.name} cannot be read: {error.strerror}"


def _config_differs(file: Path, entry: Published) -> str:
    """The same of a configuration; where the record has no digest of it, only whether it is one of this model."""
    if entry.config or not file.is_file():
        return _differs(file, entry.config)
    try:
        return "" if read_config(file).name == entry.model else f"{file.name} is another model's"
    except (BundleError, OSError) as error:
        return f"{file.name} cannot be used: {error}"
