"""Which shard is meant: by its folder, by its name or the end of its path, or by the beginning of its digest."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from agentpipe.errors import InputError
from agentpipe.experience.care.claims import find_claims, relative
from agentpipe.experience.care.holdings import find_shards, look_at, looks_like_shard
from agentpipe.experience.care.shrink import regenerate_shard
from agentpipe.experience.origin import home_pools
from agentpipe.experience.store.remedies import buffer_command, run_command
from agentpipe.experience.store.shard import open_shard

if TYPE_CHECKING:
    from agentpipe.experience.care.holdings import Holding
    from agentpipe.experience.store.shard import Shard

PREFIX_MIN: Final = 6
"""characters of a digest"""
_LISTED: Final = 5


def choose(home: Path, text: str) -> Path:
    """The folder of the shard that ``text`` names.

    Whatever is printed does: its folder, absolute, below the home or below the working directory; the end of that
    path, such as ``updates-000011`` or ``sensor-3/c03f28faacd65fed-0``, or group and name as a table has them, where
    that is one shard's alone; or six or more first characters of its digest.

    Raises:
        InputError: no such shard, or several.
    """
    for path in (Path(text), home / text):
        if path.is_dir() and looks_like_shard(path):
            return path
    found = [holding for holding in find_shards(home) if _is_named(holding, text)]
    if len(found) == 1:
        return found[0].path
    if not found:
        remedy = f"this lists them: {buffer_command('stats', home=home)}"
        raise InputError(f"no such shard: {text!r}", field="shard", remedy=remedy)
    names = ", ".join(relative(holding.path, home) for holding in found[:_LISTED])
    more = "" if len(found) <= _LISTED else f" and {len(found) - _LISTED} more"
    raise InputError(f"{len(found)} shards are {text!r}", field="shard", remedy=f"name one of {names}{more}")


def choose_folder(home: Path, text: str) -> Path:
    """A folder that holds shards, as it is or below the home, or the shard that ``text`` names.

    Raises:
        InputError: nothing of the kind.
    """
    for path in (Path(text), home / text):
        if path.is_dir():
            return path
    if Path(text).is_absolute():
        remedy = "give the folder of a shard, or one that holds shards"
        raise InputError("no such folder", file=text, remedy=remedy)
    return choose(home, text)


def _is_named(holding: Holding, text: str) -> bool:
    if len(text) >= PREFIX_MIN and (holding.digest or "").startswith(text):
        return True
    wanted = Path(text).parts
    path = holding.path.resolve()
    return bool(wanted) and wanted in (path.parts[-len(wanted) :], (holding.group, path.name))


def open_chosen(home: Path, shard: str | None, cell: str | None) -> list[Shard]:
    """The shard that is named, or the current trajectories of a cell or of all cells; shrunk ones are played again.

    Raises:
        InputError: nothing of the kind; or a shard and a cell at once.
        CorruptError, VersionError: it cannot be opened, or not be played again.
    """
    if shard is not None and cell is not None:
        raise InputError("a shard and a cell at once", field="cell", remedy="give one of them")
    if shard is not None:
        return [_open(home, choose(home, shard))]
    claims = find_claims(home)
    wanted = {path: name for path, name in claims.current.items() if cell is None or name == f"trajectories[{cell}]"}
    if not wanted:
        what = (
            "no trajectories are materialised" if cell is None else f"the trajectories of {cell} are not materialised"
        )
        remedy = f"name a shard, or record them: {run_command(home)}"
        raise InputError(what, field="cell", remedy=remedy)
    return [_open(home, path) for path in sorted(wanted)]


def _open(home: Path, path: Path) -> Shard:
    if look_at(path).state == "shrunk":
        return regenerate_shard(path, home_pools(home))
    return open_shard(path)
