"""What a comparison of candidate and champion came to, and how it is kept on disk and shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from agentpipe.errors import CorruptError, VersionError
from agentpipe.evaluation.report import EvaluationReport
from agentpipe.evaluation.stored import SUMMARY, publish_result
from agentpipe.evaluation.tables import markdown_table
from agentpipe.storage import canonical_json, digest_bytes, read_json

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

PROMOTE, NOT_BETTER_ENOUGH, VETO_CELL = "PROMOTE", "NOT_BETTER_ENOUGH", "VETO_CELL"
INSUFFICIENT_DATA = "INSUFFICIENT_DATA"
VERDICTS = (PROMOTE, NOT_BETTER_ENOUGH, VETO_CELL, INSUFFICIENT_DATA)

FORMAT = 1
_FILE = "challenge.json"


@dataclass(frozen=True)
class Challenge:
    """A verdict with everything it rests on; equal episodes and limits give an equal ``digest``."""

    figures: dict[str, Any]
    """JSON: verdict, reasons, limits, bounds, discordant episodes, one entry a cell; holds no times."""
    report: EvaluationReport
    """The episodes of both, one row each."""

    @classmethod
    def build(cls, figures: Mapping[str, Any], report: EvaluationReport) -> Self:
        """``figures`` with their digest, beside the episodes."""
        content = {"format": FORMAT, **figures}
        return cls({**content, "digest": digest_bytes(canonical_json(content))}, report)

    @property
    def verdict(self) -> str:
        """One of :data:`VERDICTS`."""
        return str(self.figures["verdict"])

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why, in words."""
        return tuple(self.figures["reasons"])

    @property
    def digest(self) -> str:
        """Content digest of figures and episodes."""
        return str(self.figures["digest"])

    def markdown(self) -> str:
        """Verdict, reasons, overall figures and cells, for people."""
        figures, look = self.figures, self.figures["look"]
        success, lines = figures["success"], figures["by_template"]
        differing = (
            f"Only the candidate succeeded in {figures['only_candidate']:,} of {figures['episodes']:,} episodes, only "
            f"the champion in {figures['only_champion']:,}."
        )
        bounds = f"{_signed(figures['low'])} and {_signed(figures['high'])} at {1 - figures['alpha']:.0%}"
        text = (
            f"**{self.verdict}**: {'; '.join(self.reasons)}.\n\n"
            f"Success {_percent(success['candidate'])} against {_percent(success['champion'])}; difference "
            f"{_signed(figures['difference'])}, one-sided bounds {bounds}. {differing} For lines drawn anew "
            f"({lines['templates']} templates): {_signed(lines['ci95'][0])} … {_signed(lines['ci95'][1])} at 95%. "
            f"Look {look['of_champion']} of this champion, {look['number']} of all.\n\n"
        )
        rows = [
            [
                cell,
                _percent(part["success"]["candidate"]),
                _percent(part["success"]["champion"]),
                _signed(part["difference"]),
                f"{_signed(part['low'])} … {_signed(part['high'])}",
                f"{part['only_candidate']} : {part['only_champion']}",
                f"{part['p_holm']:.2g}",
                "worse" if part["worse"] else "",
            ]
            for cell, part in figures["by_cell"].items()
        ]
        header = ["cell", "candidate", "champion", "difference", "bounds", "only one", "p (Holm)", ""]
        return text + markdown_table(header, rows)

    def save(self, path: Path) -> Path:
        """Publishes verdict and episodes as the directory ``path`` (JSON and Parquet), whole or not at all."""
        documents = {_FILE: self.figures, SUMMARY: self.report.summary, "durations.json": self.report.durations}
        return publish_result(path, "episodes", self.report.table, documents)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Reads a saved comparison and checks both parts against their digests.

        Raises:
            CorruptError: missing, damaged, or changed since it was written.
            VersionError: written in another format.
        """
        figures = read_json(path / _FILE)
        remedy = "compare again"
        if not isinstance(figures, dict) or "digest" not in figures:
            raise CorruptError("not a comparison", file=path / _FILE, remedy=remedy)
        if figures.get("format") != FORMAT:
            text = f"comparison format {figures.get('format')!r}, this program reads {FORMAT}"
            raise VersionError(text, file=path / _FILE)
        report = EvaluationReport.load(path)
        content = {name: value for name, value in figures.items() if name != "digest"}
        if digest_bytes(canonical_json(content)) != figures["digest"] or figures["episodes_digest"] != report.digest:
            raise CorruptError("the comparison does not match its digest", file=path, remedy=remedy)
        return cls(figures, report)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _signed(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:+.2f} %"
