"""An attribution's result: one row per replayed failure, the figures, and how both are kept and shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from agentpipe.evaluation.columns import column
from agentpipe.evaluation.stored import SUMMARY, publish_result, read_result
from agentpipe.evaluation.tables import interval, markdown_table, percent

if TYPE_CHECKING:
    from pathlib import Path

    import pyarrow as pa

FORMAT = 1
_NAME = "attribution"


@dataclass(frozen=True)
class AttributionReport:
    """One row per failed episode that was replayed, and what they add up to."""

    table: pa.Table
    summary: dict[str, Any]

    @property
    def digest(self) -> str:
        """Content digest of the table and the figures."""
        return str(self.summary["digest"])

    def save(self, path: Path) -> Path:
        """Publishes the report as the directory ``path`` (Parquet and JSON), whole or not at all."""
        return publish_result(path, _NAME, self.table, {SUMMARY: self.summary})

    @classmethod
    def load(cls, path: Path) -> Self:
        """Reads a saved report and checks it against its digest.

        Raises:
            CorruptError: missing, damaged, or changed since it was written.
            VersionError: written in another format.
        """
        return cls(*read_result(path, _NAME, FORMAT))


def same_disturbance(table: pa.Table, fingerprint: str) -> pa.Table:
    """The rows under the disturbance with this SHA-256 or CRC-32."""
    import pyarrow as pa

    name = "crc32" if len(fingerprint) == 8 else "fingerprint"
    return table.filter(pa.array(column(table, name) == fingerprint))


def causes_markdown(summary: dict[str, Any]) -> str:
    """Causes with count and share, and the control, as Markdown."""
    if summary["attributed"] is None:
        return f"{summary['status']}: {summary['failures']:,} failures, {summary['replayed']:,} replayed."
    rows = [
        [name, item["count"], percent(item["share"]), percent(summary["control"].get(name, {}).get("share"))]
        for name, item in summary["causes"].items()
    ]
    head = (
        f"{percent(summary['attributed'])} ({interval(summary['ci95'])}) of {summary['replayed']:,} replayed failures "
        f"are due to a disturbance.\n\n"
    )
    rest = ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in summary["rest"].items())
    note = f"\n\nOf those that no switch helped, by what other players did in the same episode: {rest}."
    return head + markdown_table(["cause", "failures", "share", "control: successes lost with it off"], rows) + note
