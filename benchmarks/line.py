"""The production line as it is frozen: the catalogue's training environments, the project's table and line profile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentpipe.environments.line_profile import LineProfile
    from agentpipe.environments.pool import LinePool


@dataclass(frozen=True)
class FrozenLine:
    """A pool with every disturbance on, and the profile that its rules need."""

    pool: LinePool
    profile: LineProfile


def frozen_line(size: int | None, threads: int) -> FrozenLine:
    """``size`` training environments, evenly spread over the catalogue (``None``: all 7,000)."""
    from agentpipe.environments.catalog import load_catalog
    from agentpipe.environments.datafiles import data_dir
    from agentpipe.environments.layout import Purpose
    from agentpipe.environments.line_profile import default_profile
    from agentpipe.environments.pool import build_pool
    from agentpipe.environments.table import load_table

    everything = load_catalog().environments("train")
    count = len(everything) if size is None else size
    chosen = [everything[index * len(everything) // count] for index in range(count)]
    table, profile = load_table(data_dir() / "disturbances.csv"), default_profile()
    pool = build_pool(chosen, table, profile, seed=0, purpose=Purpose.HEALTH, threads=threads)
    return FrozenLine(pool, profile)
