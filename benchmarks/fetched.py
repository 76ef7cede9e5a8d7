"""Contestants that are no dependencies: fetched with pip into folders of their own, behind everything installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from agentpipe.storage import publish_directory

if TYPE_CHECKING:
    from collections.abc import Callable


def folder(name: str) -> Path:
    """``$AGENTPIPE_CACHE`` or ``~/.cache/agentpipe``, then package and version."""
    root = os.environ.get("AGENTPIPE_CACHE") or Path.home() / ".cache" / "agentpipe"
    return Path(root) / "benchmarks" / name


def fetch(target: Path, packages: tuple[str, ...], finish: Callable[[Path], None] = lambda _: None) -> str:
    """Installs into ``target`` at first use, puts it behind everything installed; says why where it cannot be had."""
    if not target.is_dir():
        try:
            with publish_directory(target) as staging:
                install = ["-m", "pip", "install", "--quiet", "--no-deps", "--target", str(staging), *packages]
                subprocess.run([sys.executable, *install], capture_output=True, text=True, check=True)
                finish(staging)
        except (OSError, subprocess.CalledProcessError) as error:
            lines = str(getattr(error, "stderr", None) or error).strip().splitlines() or ["no message"]
            return f"{packages[0]} could not be installed: {lines[-1]}"
    sys.path.append(str(target))
    return ""
