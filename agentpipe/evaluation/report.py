"""An evaluation's result: one row per player, environment and episode, the figures, and how both are kept on disk."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from agentpipe.errors import EvaluationError
from agentpipe.evaluation.stored import SUMMARY, publish_result, read_result, sealed
from agentpipe.evaluation.summary import summarise
from agentpipe.storage import read_json

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import pyarrow as pa

FORMAT = 1
_NAME, _DURATIONS = "episodes", "durations.json"


@dataclass(frozen=True)
class EvaluationReport:
    """Everything later questions are asked of; equal inputs give an equal ``digest``."""

    table: pa.Table
    """One row per player x environment x episode."""
    summary: dict[str, Any]
    """JSON figures and what they were computed from; holds no times of day and no durations."""
    durations: dict[str, float] = field(default_factory=dict)
    """Wall seconds each player took; not part of the digest."""

    @classmethod
    def build(cls, table: pa.Table, context: Mapping[str, Any], durations: Mapping[str, float]) -> Self:
        """Computes the figures of ``table``; ``context`` says where it came from (seed, versions, split, ...).

        Raises:
            EvaluationError: the table has no rows.
        """
        if not table.num_rows:
            raise EvaluationError("no episode was played", remedy="evaluate at least one environment")
        figures = {"format": FORMAT, **context, **summarise(table)}
        return cls(table, sealed(table, figures), dict(durations))

    @property
    def digest(self) -> str:
        """Content digest of the table and the figures."""
        return str(self.summary["digest"])

    @property
    def players(self) -> tuple[str, ...]:
        """Names of the players, in the order they played."""
        return tuple(self.summary["players"])

    def player(self, name: str) -> dict[str, Any]:
        """One player's figures.

        Raises:
            EvaluationError: there is no such player.
        """
        if name not in self.summary["players"]:
            raise EvaluationError(f"no player {name!r} in this evaluation", remedy=f"one of {', '.join(self.players)}")
        figures: dict[str, Any] = self.summary["players"][name]
        return figures

    def save(self, path: Path) -> Path:
        """Publishes the report as the directory ``path`` (Parquet and JSON), whole or not at all."""
        return publish_result(path, _NAME, self.table, {SUMMARY: self.summary, _DURATIONS: self.durations})

    @classmethod
    def load(cls, path: Path) -> Self:
        """Reads a saved report and checks it against its digest.

        Raises:
            CorruptError: missing, damaged, or changed since it was written.
            VersionError: written in another format.
        """
        table, summary = read_result(path, _NAME, FORMAT)
        return cls(table, summary, dict(read_json(path / _DURATIONS)))
