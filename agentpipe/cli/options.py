"""The options that commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Home = Annotated[
    Path | None,
    typer.Option("--home", help="Folder that holds every store.", show_default=".agentpipe"),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]
MachineHistory = Annotated[
    Path | None,
    typer.Option(
        "--machine-history",
        help="A machine-history table (CSV) whose failure modes become the line; without it the project's own line.",
        show_default=False,
    ),
]
TableSource = Annotated[
    Path | None,
    typer.Option(
        "--table-source",
        help="Disturbance table (CSV) to follow instead of the home's copy.",
        show_default=False,
    ),
]
Seed = Annotated[int | None, typer.Option("--seed", help="Root of all randomness.", show_default="0")]
Threads = Annotated[
    int | None,
    typer.Option("--threads", help="Threads of simulation and training.", show_default="2"),
]
