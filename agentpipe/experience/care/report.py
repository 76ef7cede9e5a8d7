"""What a check found, and what a repair did."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a shard, or with what refers to shards."""

    shard: str
    file: str
    record: int | None
    """number of the record in ``file``, or of the episode row for a graph; from 0"""
    field: str | None
    message: str
    remedy: str
    """a whole line to type where one helps"""

    def __str__(self) -> str:
        place = "".join(
            f", {name} {value}" for name, value in (("record", self.record), ("field", self.field)) if value is not None
        )
        return f"{self.shard}: {self.message} [file {self.file}{place}] - {self.remedy}"


@dataclass(frozen=True)
class Loss:
    """What a repair could not bring back."""

    shard: str
    episodes: int | None
    """how many; ``None`` where it cannot be told"""
    message: str
    quarantine: str | None
    """folder that holds them as they were found"""

    def __str__(self) -> str:
        place = "" if self.quarantine is None else f"; as found it lies in {self.quarantine}"
        return f"{self.shard}: {self.message}{place}"


@dataclass
class Repairs:
    """What a repair did, one sentence each, the shard first."""

    done: list[str] = field(default_factory=list)
    """brought back byte for byte, or made again from what it follows from"""
    failed: list[str] = field(default_factory=list)
    """not possible here: it stays a problem"""
    lost: list[Loss] = field(default_factory=list)


@dataclass
class Report:
    """What a check found."""

    shards: int = 0
    episodes: int = 0
    steps: int = 0
    bytes: int = 0
    problems: list[Problem] = field(default_factory=list)
    held: dict[str, str] = field(default_factory=dict)
    """shards that are being written, of which LevelDB's part was left out → by whom"""
    repairs: list[str] = field(default_factory=list)
    """what was repaired without loss, one sentence each"""
    unrepaired: list[str] = field(default_factory=list)
    """what could not be repaired here, and why"""
    lost: list[Loss] = field(default_factory=list)
    """what a repair could not bring back"""

    @property
    def ok(self) -> bool:
        """Nothing is wrong (any more), and nothing was lost on the way."""
        return not self.problems and not self.lost

    def to_json(self) -> dict[str, Any]:
        """As a JSON object, ``ok`` first."""
        return {"ok": self.ok, **asdict(self)}
