"""What to type where something is wrong with a shard: whole commands, which name the home or folder they are for."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any, Final

from agentpipe.errors import CorruptError
from agentpipe.storage import read_json

if TYPE_CHECKING:
    from pathlib import Path

MARK: Final = "format.json"
"""the file by which a home is told"""
LAST_RUN: Final = "last_run.json"
_OPTIONS: Final = {
    "profile": "--profile",
    "machine_history": "--machine-history",
    "table_source": "--table-source",
    "seed": "--seed",
}
"""what the last run was given and decides its content → its option"""


def home_of(path: Path) -> Path | None:
    """The home that ``path`` lies in, or ``None``; it need not exist itself."""
    path = path.resolve()
    return next((folder for folder in (path, *path.parents) if (folder / MARK).is_file()), None)


def buffer_command(verb: str, *further: object, home: Path | None = None, path: Path | None = None) -> str:
    """A line to type, such as ``agentpipe buffer check --fix --home /data/home``.

    Args:
        verb: Such as ``check --fix``.
        further: Its arguments.
        home: For ``--home``; absolute in the line.
        path: For ``--path``; absolute in the line.
    """
    words = ["agentpipe", "buffer", *verb.split(), *(str(word) for word in further)]
    words += [] if path is None else ["--path", str(path.resolve())]
    words += [] if home is None else ["--home", str(home.resolve())]
    return shlex.join(words)


def fix_command(place: Path) -> str:
    """The line that repairs the shard which ``place`` is, or is a file of: its whole home, else its folder."""
    home = home_of(place)
    folder = place if place.is_dir() else place.parent
    return buffer_command("check --fix", home=home, path=None if home else folder)


def mend(place: Path) -> str:
    """The remedy for damaged bytes of a shard: see :func:`fix_command`."""
    return f"run {fix_command(place)}"


def restore_command(shard: Path) -> str:
    """The line that makes the full records of a shrunk shard again."""
    return buffer_command("restore", shard.resolve(), home=home_of(shard))


def run_command(home: Path, day: str | None = None) -> str:
    """The line that materialises what is due in ``home``, under the options of its last run.

    Args:
        home: Where ``last_run.json`` says them; none are named where it cannot be read.
        day: Of a candidate; ``None`` = as of today.
    """
    words = ["agentpipe", "run", "--home", str(home.resolve())]
    for name, option in _OPTIONS.items():
        value = _last_run(home).get(name)
        words += [] if value is None else [option, str(value)]
    return shlex.join(words + ([] if day is None else ["--day", day]))


def _last_run(home: Path) -> dict[str, Any]:
    try:
        given = read_json(home / LAST_RUN)
    except CorruptError:
        return {}
    return given if isinstance(given, dict) else {}


def read_part(path: Path) -> Any:  # noqa: ANN401 - JSON
    """A JSON file of a shard; see :func:`agentpipe.storage.read_json`.

    Raises:
        CorruptError: it cannot be read; the remedy is :func:`mend`.
    """
    try:
        return read_json(path)
    except CorruptError as error:
        raise CorruptError(error.message, **error.where, remedy=mend(path)) from error
