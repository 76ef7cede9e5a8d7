"""Manifests written anew for a shard that stays what it is: the time of its sealing stays with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agentpipe.experience.manifest import _outside_checksum, complete

if TYPE_CHECKING:
    from collections.abc import Mapping


def complete_at(
    manifest: Mapping[str, Any], files: Mapping[str, Any], *, shrunk: bool = False, made_at: str | None = None
) -> dict[str, Any]:
    """As :func:`~agentpipe.experience.manifest.complete`, but with the time of sealing that ``manifest`` says.

    Args:
        manifest: The shard's present one.
        files: Facts of its files.
        shrunk: It holds only seeds and actions.
        made_at: Another time, where the present manifest's cannot be relied on.
    """
    whole = complete(manifest, files, shrunk=shrunk)
    whole["sealed"]["made_at"] = manifest["sealed"]["made_at"] if made_at is None else made_at
    whole["sealed"]["checksum"] = _outside_checksum(whole)
    return whole
