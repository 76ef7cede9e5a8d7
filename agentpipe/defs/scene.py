"""What every rollout needs together: catalogue, pinned table version, line profile, seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentpipe.defs.resources import Workspace
    from agentpipe.environments.catalog import Catalog, EnvironmentSpec
    from agentpipe.environments.line_profile import LineProfile
    from agentpipe.environments.pool import LinePool
    from agentpipe.environments.table import DisturbanceTable


@dataclass(frozen=True)
class Scene:
    """Everything that decides an episode, except the player."""

    catalog: Catalog
    table: DisturbanceTable
    profile: LineProfile
    seed: int
    threads: int

    def pool(self, environments: Sequence[EnvironmentSpec], purpose: str, threads: int | None = None) -> LinePool:
        """A pool over ``environments`` whose random numbers belong to ``purpose``."""
        from agentpipe.environments.layout import Purpose
        from agentpipe.environments.pool import build_pool

        return build_pool(
            environments,
            self.table,
            self.profile,
            seed=self.seed,
            purpose=Purpose[purpose],
            threads=self.threads if threads is None else threads,
        )

    def origin(self, purpose: str) -> dict[str, Any]:
        """What a shard of such a pool says of where its episodes come from."""
        from agentpipe.experience.origin import origin

        return origin(self.seed, purpose, self.profile.digest)


def scene(workspace: Workspace, cell: str | None = None) -> Scene:
    """The scene of the materialised assets: of one cell, or of all together."""
    settings = workspace.settings
    table, profile = workspace.table(cell), workspace.line_profile()
    return Scene(workspace.catalog(), table, profile, settings.seed, settings.threads)
