"""Where the project's own data files are: templates, splits, disturbances, line profile."""

from __future__ import annotations

import os
from pathlib import Path

from agentpipe.errors import InputError

MARKER = "templates.csv"


def data_dir() -> Path:
    """The folder of the project's data files.

    In order: ``$AGENTPIPE_DATA``, ``agentpipe/_data`` of an installed package, ``data/`` beside the package in a
    checkout.

    Raises:
        InputError: none of them holds ``templates.csv``.
    """
    chosen = os.environ.get("AGENTPIPE_DATA")
    package = Path(__file__).resolve().parents[1]
    candidates = [Path(chosen)] if chosen else [package / "_data", package.parent / "data"]
    for candidate in candidates:
        if (candidate / MARKER).is_file():
            return candidate
    looked = ", ".join(str(candidate) for candidate in candidates)
    remedy = "install agentpipe again, or set AGENTPIPE_DATA to a folder like the project's data/"
    raise InputError(f"no {MARKER} found", looked_in=looked, remedy=remedy)
