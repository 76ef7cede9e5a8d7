"""The manifest of a sealed shard: what is in it and where it came from, with a digest over all of that.

Equal content has an equal digest. What depends on when and in what order the content came stands under ``sealed``
(time, sizes and checksums of files that hold time stamps), which has a checksum of its own.
"""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Any, Final

from agentpipe.errors import CorruptError, VersionError
from agentpipe.experience.store import records as rec
from agentpipe.experience.store.checksum import xxh64
from agentpipe.experience.store.remedies import mend, read_part
from agentpipe.storage import canonical_json, digest_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

MANIFEST: Final = "manifest.json"
MEASUREMENTS: Final = "measurements.json"
NAMES: Final = "names.json"
_OUTSIDE: Final = frozenset({"digest", "sealed", "shrunk"})
_COUNTS: Final = ("steps", "episodes", "finals", "graph_words", "observation_size", "action_count")


def manifest_digest(manifest: Mapping[str, Any]) -> str:
    """Digest of what the manifest says of the content: all but ``digest``, ``sealed`` and ``shrunk``."""
    return digest_bytes(canonical_json({key: value for key, value in manifest.items() if key not in _OUTSIDE}))


def _outside_checksum(manifest: Mapping[str, Any]) -> str:
    sealed = {key: value for key, value in manifest["sealed"].items() if key != "checksum"}
    return f"{xxh64(canonical_json([sealed, manifest.get('shrunk', False)])):016x}"


def file_facts(directory: Path, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Size and XXH64 of each of the files ``names`` in ``directory``."""
    facts = {}
    for name in names:
        data = (directory / name).read_bytes()
        facts[name] = {"bytes": len(data), "xxh64": f"{xxh64(data):016x}"}
    return facts


def complete(
    content: Mapping[str, Any], files: Mapping[str, Any], *, shrunk: bool = False, made_at: str | None = None
) -> dict[str, Any]:
    """The whole manifest of ``content``: with its digest, and ``files`` (:func:`file_facts`) outside the digest.

    Args:
        content: What it says of the content; keys that stand outside the digest are made anew.
        files: Facts of the files that hold time stamps.
        shrunk: The shard holds only seeds and actions.
        made_at: When it was sealed, in ISO format; None = now.
    """
    inside = {key: value for key, value in content.items() if key not in _OUTSIDE}
    manifest: dict[str, Any] = {**inside, "digest": manifest_digest(inside)}
    manifest["sealed"] = {"made_at": made_at or dt.datetime.now(dt.UTC).isoformat(), "files": dict(files)}
    if shrunk:
        manifest["shrunk"] = True
    manifest["sealed"]["checksum"] = _outside_checksum(manifest)
    return manifest


def read_manifest(path: Path) -> dict[str, Any]:
    """Reads and verifies ``manifest.json``.

    Raises:
        CorruptError: missing, not a manifest, or altered.
        VersionError: of another format.
    """
    manifest = read_part(path)
    if not isinstance(manifest, dict) or "format" not in manifest:
        raise CorruptError("not a shard manifest", file=path, remedy=mend(path))
    if manifest["format"] not in rec.READABLE:
        newer = isinstance(manifest["format"], int) and manifest["format"] > max(rec.READABLE)
        remedy = "use the agentpipe that wrote it" if newer else "record it again: this program cannot read it"
        text = f"shard format {manifest['format']!r}, this program reads {' and '.join(map(str, rec.READABLE))}"
        raise VersionError(text, file=path, remedy=remedy)
    try:
        digest, sealed = manifest_digest(manifest), manifest.get("sealed")
        checksum = _outside_checksum(manifest) if isinstance(sealed, dict) else None
    except ValueError as error:
        raise CorruptError(
            f"holds what is never written: {error}", file=path, field="digest", remedy=mend(path)
        ) from error
    if manifest.get("digest") != digest:
        raise CorruptError("content differs from its digest", file=path, field="digest", remedy=mend(path))
    if not isinstance(sealed, dict) or sealed.get("checksum") != checksum:
        raise CorruptError("content differs from its checksum", file=path, field="sealed", remedy=mend(path))
    wrong = [name for name in _COUNTS if not isinstance(manifest.get(name), int) or manifest[name] < 0]
    if wrong:
        raise CorruptError("not a count", file=path, field=wrong[0], remedy=mend(path))
    if rec.describe(rec.step_dtype(manifest["observation_size"], manifest["action_count"])) != manifest.get("fields"):
        raise CorruptError("the fields are not those of this format", file=path, field="fields", remedy=mend(path))
    return manifest
