"""The seam between the training loop and its aids.

An aid is told what happens and may turn the knobs of the next update. Whatever its next decision depends on is in its
:meth:`Aid.state`, which every checkpoint keeps, so that resuming equals continuing. What it does it writes in the log.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from agentpipe.errors import CheckpointError, NonFiniteError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from agentpipe.environments.pool import LinePool
    from agentpipe.learning.gates import GateFigure
    from agentpipe.learning.samples.rollout import Rollout
    from agentpipe.learning.tensors import Arrays


@dataclass
class Knobs:
    """What an aid may turn before an update; each update begins with what schedule and options say."""

    learning_rate: float
    """of the heads, and of everything unless ``bottom_rate`` says otherwise"""
    entropy_weight: float
    """of the entropy bonus"""
    gae_lambda: float
    """of the advantages"""
    bottom_rate: float = 1.0
    """learning rate of the lowest layer over that of the heads; the layers between rise geometrically"""


@dataclass(frozen=True)
class LogEntry:
    """One thing that an aid did."""

    update: int
    aid: str
    action: str
    """what, in a word or two"""
    reason: str
    """why, with the figures that it was decided by"""
    value: float
    """to what"""


class Aid:
    """Does nothing; an aid overrides what it needs. Each update calls ``before`` to ``figures`` once, in that order."""

    name: ClassVar[str] = ""

    def __init__(self) -> None:
        self._news: list[tuple[str, str, float]] = []

    def note(self, action: str, reason: str, value: float) -> None:
        """Writes an entry of the log."""
        self._news.append((action, reason, value))

    def take_notes(self) -> list[tuple[str, str, float]]:
        """What was noted since the last call."""
        news, self._news = self._news, []
        return news

    def warmed_up(self, warnings: Sequence[GateFigure]) -> None:
        """After the warm-up, where there was one: the figures of gate 2 that do not pass."""

    def before(self, knobs: Knobs, pool: LinePool) -> None:
        """Before the rollout of an update."""

    def bonus(self, rollout: Rollout) -> npt.NDArray[np.float32] | None:
        """f32[T, N] to be added to the scaled rewards of the rollout that was just collected, or ``None``."""
        del rollout
        return None

    def collected(self, rollout: Rollout, pool: LinePool) -> None:
        """After the rollout, before the update."""

    def updated(self, figures: Mapping[str, float], warnings: Sequence[GateFigure]) -> None:
        """After the update: its figures and those of the episodes that ended, and what of gate 4 does not pass."""

    def figures(self) -> dict[str, float]:
        """For the update's log and TensorBoard."""
        return {}

    def leave(self, directory: Path) -> Path | None:
        """At the end of the run: writes a file into ``directory`` for whoever asks later what it did, or nothing."""
        del directory
        return None

    def state(self) -> tuple[dict[str, Any], Arrays]:
        """JSON values, and arrays, that the next call depends on."""
        return {}, {}

    def restore(self, content: Mapping[str, Any], arrays: Arrays) -> None:
        """The inverse of :meth:`state`."""


class Aids:
    """All aids of one run, and their log.

    Args:
        aids: in the order in which they are asked; names differ.
    """

    def __init__(self, aids: Sequence[Aid] = ()) -> None:
        self.aids = tuple(aids)
        self.log: list[LogEntry] = []

    def warmed_up(self, warnings: Sequence[GateFigure]) -> None:
        """Tells of the warm-up."""
        for aid in self.aids:
            aid.warmed_up(warnings)
        self._take_notes(0)

    def before(self, knobs: Knobs, pool: LinePool) -> Knobs:
        """The knobs of the next update."""
        for aid in self.aids:
            aid.before(knobs, pool)
        return knobs

    def collected(self, rollout: Rollout, pool: LinePool) -> npt.NDArray[np.float32] | None:
        """Tells of a rollout; f32[T, N], the sum of all bonuses, or ``None`` where there is none.

        Raises:
            NonFiniteError: a bonus is not finite; names the aid, the environment and the step of the rollout.
        """
        total: npt.NDArray[np.float32] | None = None
        for aid in self.aids:
            bonus = aid.bonus(rollout)
            if bonus is not None:
                _require_finite(bonus, aid.name, pool)
                total = bonus if total is None else total + bonus
        for aid in self.aids:
            aid.collected(rollout, pool)
        return total

    def updated(self, number: int, figures: Mapping[str, float], warnings: Sequence[GateFigure]) -> dict[str, float]:
        """Tells of an update; returns the aids' own figures, and takes their notes into the log."""
        own: dict[str, float] = {}
        for aid in self.aids:
            aid.updated(figures, warnings)
            own |= aid.figures()
        self._take_notes(number)
        return own

    def leave(self, directory: Path) -> dict[str, Path]:
        """The files that aids leave, by the name of the aid."""
        left = {aid.name: aid.leave(directory) for aid in self.aids}
        return {name: path for name, path in left.items() if path is not None}

    def _take_notes(self, number: int) -> None:
        for aid in self.aids:
            self.log += [LogEntry(number, aid.name, *note) for note in aid.take_notes()]

    def state(self) -> tuple[dict[str, Any], Arrays]:
        """JSON values by the name of the aid, with the log; arrays under ``name/key``."""
        content: dict[str, Any] = {"log": [asdict(entry) for entry in self.log], "aids": {}}
        arrays: Arrays = {}
        for aid in self.aids:
            content["aids"][aid.name], own = aid.state()
            arrays |= {f"{aid.name}/{key}": np.array(array) for key, array in own.items()}
        return content, arrays

    def restore(self, content: Mapping[str, Any], arrays: Arrays, path: Path) -> None:
        """The inverse of :meth:`state`.

        Raises:
            CheckpointError: made with other aids.
        """
        if set(content["aids"]) != {aid.name for aid in self.aids}:
            remedy = "resume with the aids that it was made with"
            raise CheckpointError("made with other training aids", file=path, field="aids", remedy=remedy)
        self.log = [LogEntry(**entry) for entry in content["log"]]
        for aid in self.aids:
            own = {key.partition("/")[2]: array for key, array in arrays.items() if key.partition("/")[0] == aid.name}
            aid.restore(content["aids"][aid.name], own)


def _require_finite(bonus: npt.NDArray[np.float32], name: str, pool: LinePool) -> None:
    finite = np.isfinite(bonus)
    if not finite.all():
        step, row = (int(index) for index in np.argwhere(~finite)[0])
        remedy = "switch this training aid off; the last checkpoint is good"
        raise NonFiniteError(
            "not finite", environment=pool.names[row], field=f"bonus of {name}", step=step, remedy=remedy
        )
