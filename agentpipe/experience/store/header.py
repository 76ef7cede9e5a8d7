"""The header of an open shard: what its manifest will say, and under which boot of the machine it was written."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from agentpipe.errors import CorruptError, RecordError, VersionError
from agentpipe.experience.store import records as rec
from agentpipe.experience.store.checksum import xxh64
from agentpipe.experience.store.counter import COUNTER, newest
from agentpipe.experience.store.index import OPEN_INDEX, SEALED_INDEX
from agentpipe.experience.store.manifest import MANIFEST, MEASUREMENTS, NAMES
from agentpipe.experience.store.remedies import mend, read_part
from agentpipe.experience.store.shard import HEADER
from agentpipe.storage import canonical_json, typed_os_errors, write_json

if TYPE_CHECKING:
    from collections.abc import Mapping

_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_PARTS: Final = frozenset({"format", "header", "policies", "boot"})
_NEEDED: Final = ("observation_size", "action_count", "policies")


class Header:
    """What ``header.json`` says.

    Attributes:
        content: Everything but the policies.
        policies: ``player``, ``version``, ``ordinal`` of each.
        boot: Identity of the machine's boot under which it was written.
    """

    def __init__(self, path: Path, content: Mapping[str, Any], policies: list[dict[str, Any]], boot: str) -> None:
        self.path = path
        self.content = dict(content)
        self.policies = policies
        self.boot = boot

    @property
    def rebooted(self) -> bool:
        """True where the machine may have lost power since: what was not forced to disk may be torn."""
        return not self.boot or self.boot != current_boot()

    def manifest(self) -> dict[str, Any]:
        """What the manifest takes over."""
        return {**self.content, "policies": list(self.policies)}

    def policy(self, player: str, version: str, ordinal: int) -> int:
        """The index of a policy, which is added, on disk, where it is new."""
        wanted = {"player": player, "version": version, "ordinal": int(ordinal)}
        if wanted not in self.policies:
            Header(self.path, self.content, [*self.policies, wanted], self.boot).save()
            self.policies.append(wanted)
        return self.policies.index(wanted)

    def save(self) -> None:
        """Writes it, whole or not at all.

        Raises:
            DiskFullError, HomeError: it cannot be written.
        """
        facts = {"format": rec.FORMAT, "header": self.content, "policies": self.policies, "boot": self.boot}
        write_json(self.path, {**facts, "checksum": header_checksum(facts)})


def current_boot() -> str:
    """What the system calls its current boot; empty where it does not say."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""


def header_checksum(facts: Mapping[str, Any]) -> str:
    """XXH64 of all that a header says but for this."""
    return f"{xxh64(canonical_json({key: value for key, value in facts.items() if key != 'checksum'})):016x}"


def read_header(directory: Path) -> Header:
    """Reads ``header.json``.

    Raises:
        CorruptError: missing, not a header, or altered.
        VersionError: of another format.
    """
    path = directory / HEADER
    facts = read_part(path)
    if not isinstance(facts, dict) or not isinstance(facts.get("header"), dict):
        raise CorruptError("not the header of an open shard", file=path, remedy=mend(path))
    if facts.get("format") != rec.FORMAT:
        text = f"open shard of format {facts.get('format')!r}, this program writes {rec.FORMAT}"
        raise VersionError(text, file=path, remedy="let the agentpipe that began it seal it, or remove it")
    try:
        # Without one it is of the time before headers had a checksum.
        fits = facts.get("checksum") == header_checksum(facts) if "checksum" in facts else set(facts) <= _PARTS
    except ValueError:  # a number that is none
        fits = False
    if not fits:
        raise CorruptError("content differs from its checksum", file=path, field="content", remedy=mend(path))
    policies, content = facts.get("policies"), facts["header"]
    sizes = [content.get(name) for name in _NEEDED[:2]]
    if not isinstance(policies, list) or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise CorruptError("not the header of an open shard", file=path, remedy=mend(path))
    return Header(path, content, policies, str(facts.get("boot", "")))


def take_up(directory: Path, wanted: Mapping[str, Any]) -> Header:
    """The header of the open shard in ``directory``; one that is made anew there is not saved yet.

    A sealing that was cut short is undone: the shard goes on as an open one. Files that a writer left before it had
    saved its header hold nothing, and are removed.

    Raises:
        RecordError: the shard is sealed, or is another recording than ``wanted``.
        CorruptError: the header is missing or damaged.
        VersionError: of another format.
    """
    path = directory / HEADER
    missing = [name for name in _NEEDED if name not in wanted]
    if missing:
        raise RecordError("the header of a shard must hold it", field=missing[0], remedy="report this recorder")
    content = {key: value for key, value in wanted.items() if key != "policies"}
    if not path.exists():
        _only_leftovers(directory)
        return Header(path, content, [dict(policy) for policy in wanted["policies"]], current_boot())
    header = read_header(directory)
    for key in sorted({*content, *header.content}):
        if canonical_json(content.get(key)) != canonical_json(header.content.get(key)):
            text = f"the open shard there is another recording: {header.content.get(key)!r}, not {content.get(key)!r}"
            raise RecordError(text, file=path, field=key, remedy="seal or remove it, or record elsewhere")
    with typed_os_errors(directory):
        for name in (MANIFEST, SEALED_INDEX, NAMES, MEASUREMENTS):
            (directory / name).unlink(missing_ok=True)
    for policy in wanted["policies"]:
        header.policy(**policy)
    return header


def _only_leftovers(directory: Path) -> None:
    if (directory / MANIFEST).exists():
        raise RecordError("the shard is sealed already", file=directory, remedy="record elsewhere, or remove it")
    counter = directory / COUNTER
    if not counter.exists():
        return
    data = counter.read_bytes()
    counts = newest(data)
    if counts.episodes if counts is not None else any(data):  # nothing but zeros: not written to yet
        raise CorruptError("file is missing", file=directory / HEADER, remedy=mend(directory))
    with typed_os_errors(directory):
        for name in (rec.RECORDS, rec.EPISODES, rec.FINALS, rec.GRAPH, COUNTER):
            (directory / name).unlink(missing_ok=True)
        shutil.rmtree(directory / OPEN_INDEX, ignore_errors=True)
