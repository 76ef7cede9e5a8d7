"""Watching the readings in a line's questions: sensors that freeze, fall silent or say nothing are estimated.

Works on lines with the observation names of the built-in line and leaves every other line's questions alone.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from agentpipe.environments.layout import CHANNELS, MACHINES, OBSERVATION_NAMES, block_start
from agentpipe.environments.line_profile import default_profile
from agentpipe.serving.agent.kalman import ReadingModel, effective_samples, estimate
from agentpipe.serving.agent.probes import Change
from agentpipe.serving.signature import names_digest

if TYPE_CHECKING:
    from collections.abc import Callable

    from agentpipe.environments.line_profile import LineProfile
    from agentpipe.serving.agent.types import Frame
    from agentpipe.serving.signature import Signature
    from agentpipe.settings import AgentSettings

IN_A_ROW: Final = 4
"""packets with one and the same reading after which it is frozen: chance makes two of 500, four of 10¹¹"""
IMPULSE: Final = 6.0
"""standard deviations from the mean beyond which a reading is an impulse"""
MOST_LINES: Final = 256
"""lines that are remembered; the oldest is forgotten first"""
_SHAPE: Final = (MACHINES, CHANNELS)
_BLOCK: Final = MACHINES * CHANNELS
_READING, _MEAN = block_start("reading"), block_start("mean")
_AGE, _COUNT, _PRESENT = block_start("age"), block_start("count"), block_start("present")
_SECONDS_OF_AGE: Final = 10.0

Block = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Seen:
    """A question after a look at its sensors."""

    frame: Frame
    """with estimates in place of what lost sensors say"""
    estimated: tuple[str, ...] = ()
    """the sensors whose estimates are in it"""
    ask: str = ""
    """why a person is to decide, where an estimate is too uncertain"""


def _zeros() -> Block:
    return np.zeros(_SHAPE)


def _flags() -> Flags:
    return np.zeros(_SHAPE, np.bool_)


@dataclass
class _Line:
    """What is remembered of one line. Blocks are ``[machine, channel]``."""

    order: str = ""
    reading: Block = field(default_factory=lambda: np.full(_SHAPE, np.nan))
    heard: Block = field(default_factory=lambda: np.zeros(MACHINES))
    total: Block = field(default_factory=_zeros)
    """of the historian's sum at the last question"""
    samples: Block = field(default_factory=_zeros)
    """accepted in this order, and their sum"""
    sums: Block = field(default_factory=_zeros)
    doubtful: Block = field(default_factory=_zeros)
    """samples since a reading last changed, and their sum: accepted when it changes"""
    doubtful_sums: Block = field(default_factory=_zeros)
    unchanged: Block = field(default_factory=_zeros)
    changed: Block = field(default_factory=_zeros)
    silent: Block = field(default_factory=lambda: np.zeros(MACHINES))
    lost: Flags = field(default_factory=_flags)
    since: Block = field(default_factory=_zeros)
    """monotonic seconds at which a sensor was lost"""
    spoilt: Flags = field(default_factory=_flags)
    """the historian's mean of this order holds what a lost sensor said"""

    def begin(self, order: str) -> None:
        self.order = order
        for block in (self.heard, self.total, self.samples, self.sums, self.doubtful, self.doubtful_sums):
            block[...] = 0.0
        self.spoilt = self.lost.copy()


def lost_context(frame: Frame) -> str:
    """What is lost of a question of the built-in line that no estimate can stand for; empty where nothing is.

    Readings, means, ages and counts of packets are a sensor's; segment, clock and everything else are not.
    """
    lost = np.isnan(frame.observation)
    for start, size in ((_READING, _BLOCK), (_MEAN, _BLOCK), (_AGE, MACHINES), (_COUNT, MACHINES)):
        lost[start : start + size] = False
    places = np.flatnonzero(lost)
    if not len(places):
        return ""
    names = ", ".join(OBSERVATION_NAMES[place] if place < len(OBSERVATION_NAMES) else "?" for place in places[:3])
    return f"{names}{f' and {len(places) - 3} more' if len(places) > 3 else ''} cannot be estimated"


class SensorWatch:
    """Looks at each question of a line; belongs to the thread that decides.

    A sensor is lost where its reading or mean is NaN; where four packets in a row bring the same reading; or where its
    machine has been silent for ``sensor_silence`` seconds although others report. It is back after
    ``successes_to_recover`` packets with new readings. While it is lost, and until the order is over, its reading and
    mean are replaced by the estimate of :mod:`agentpipe.serving.agent.kalman`, and the machine's packet count by the
    mean number of samples that would know as much, so that whoever decides sees how much is known. Where the standard
    deviation of an estimate exceeds ``estimate_limit``, a person is asked, as where something is lost that is no
    sensor's (see :func:`lost_context`).

    Args:
        signature: of the line.
        settings: see above.
        profile: what its channels are called, and how they move together; the project's own where none is given.
        on_change: told of each loss and return.
    """

    def __init__(
        self,
        signature: Signature,
        settings: AgentSettings,
        profile: LineProfile | None = None,
        on_change: Callable[[Change], None] | None = None,
    ) -> None:
        self.known = signature.observation_digest == names_digest(OBSERVATION_NAMES)
        self._settings, self._on_change = settings, on_change
        profile = profile or default_profile()
        self._model, self._channels = ReadingModel.of(profile), tuple(channel.name for channel in profile.channels)
        self._lines: dict[str, _Line] = {}
        self.impulses = 0
        """readings so far that were far from their mean"""
        self.readings = 0

    def lost(self) -> tuple[str, ...]:
        """Names of the sensors that are lost now."""
        return tuple(
            self._name(line, index) for line, state in list(self._lines.items()) for index in np.argwhere(state.lost)
        )

    def look(self, frame: Frame) -> Seen:
        """``frame`` with estimates where sensors are lost."""
        if not self.known or len(frame.observation) != len(OBSERVATION_NAMES):
            return Seen(frame)
        line = self._line(frame.line_id)
        if line.order != frame.order_id:
            line.begin(frame.order_id)
        self._update(line, frame)
        lost = lost_context(frame)
        if lost:
            return Seen(frame, ask=lost)
        replaced = line.lost | line.spoilt
        replaced &= (frame.observation[_PRESENT : _PRESENT + MACHINES] > 0)[:, None] | line.lost
        return self._estimated(line, frame, replaced) if replaced.any() else Seen(frame)

    def _line(self, line_id: str) -> _Line:
        if line_id not in self._lines:
            if len(self._lines) >= MOST_LINES:
                del self._lines[next(iter(self._lines))]
            self._lines[line_id] = _Line()
        return self._lines[line_id]

    # ------------------------------------------------------------------------------------------ what was lost

    def _update(self, line: _Line, frame: Frame) -> None:
        seen = frame.observation.astype(np.float64)
        reading, mean = (seen[start : start + MACHINES * CHANNELS].reshape(_SHAPE) for start in (_READING, _MEAN))
        heard = np.exp2(seen[_COUNT : _COUNT + MACHINES]) - 1.0
        heard = np.where(np.isnan(heard), line.heard, heard)
        nothing = np.isnan(reading) | np.isnan(mean) | np.isnan(seen[_COUNT : _COUNT + MACHINES])[:, None]
        total = np.where(nothing, line.total, mean * heard[:, None])
        fresh = np.maximum(heard - line.heard, 0.0)
        came = np.broadcast_to((fresh > 0)[:, None], _SHAPE) & ~nothing
        same = came & (reading == line.reading)
        new = came & ~same
        line.unchanged = np.where(same, line.unchanged + 1, np.where(new, 0, line.unchanged))
        line.changed = np.where(new & line.lost, line.changed + 1, np.where(same | nothing, 0, line.changed))
        line.doubtful += np.where(came, fresh[:, None], 0.0)
        line.doubtful_sums += np.where(came, total - line.total, 0.0)
        self._count_impulses(line, reading, new)
        silent = self._silent(line, seen, fresh)
        gone = ~line.lost & (nothing | (line.unchanged >= IN_A_ROW) | silent[:, None])
        back = line.lost & (line.changed >= self._settings.successes_to_recover) & ~nothing & ~silent[:, None]
        self._lose(line, frame, gone, nothing, silent)
        line.lost &= ~back
        line.doubtful[line.lost] = line.doubtful_sums[line.lost] = 0.0
        taken = new & ~line.lost
        line.samples[taken] += line.doubtful[taken]
        line.sums[taken] += line.doubtful_sums[taken]
        line.doubtful[taken] = line.doubtful_sums[taken] = 0.0
        line.reading = np.where(came, reading, line.reading)
        line.heard, line.total = heard, total
        for index in np.argwhere(back):
            self._tell(self._name(frame.line_id, index), up=True, reason="new readings", frame=frame)

    def _lose(self, line: _Line, frame: Frame, gone: Flags, nothing: Flags, silent: Flags) -> None:
        line.lost |= gone
        line.since[gone] = frame.received
        line.changed[gone] = 0
        line.spoilt |= gone
        for machine, channel in np.argwhere(gone):
            reason = f"the same reading in {IN_A_ROW} packets"
            if nothing[machine, channel]:
                reason = "no reading"
            elif silent[machine]:
                reason = f"no packet for {self._settings.sensor_silence:g} s"
            self._tell(self._name(frame.line_id, (machine, channel)), up=False, reason=reason, frame=frame)

    def _silent(self, line: _Line, seen: Block, fresh: Block) -> Flags:
        """Machines that have not reported for long, in four questions in a row in which others did report.

        Others: for while a repair is under way nobody is polled, and after it one after the other.
        """
        age = seen[_AGE : _AGE + MACHINES] * _SECONDS_OF_AGE
        missing = (seen[_PRESENT : _PRESENT + MACHINES] > 0) & (fresh <= 0) & ~(age <= self._settings.sensor_silence)
        line.silent = np.where(fresh > 0, 0, np.where(missing & (fresh > 0).any(), line.silent + 1, line.silent))
        return line.silent >= IN_A_ROW

    def _count_impulses(self, line: _Line, reading: Block, new: Flags) -> None:
        known = new & (line.samples >= IN_A_ROW)
        self.readings += int(known.sum())
        if known.any():
            mean = line.sums / np.maximum(line.samples, 1.0)
            self.impulses += int((known & (np.abs(reading - mean) > IMPULSE * np.sqrt(self._model.noise))).sum())

    # -------------------------------------------------------------------------------------------- what is put in

    def _estimated(self, line: _Line, frame: Frame, replaced: Flags) -> Seen:
        observation = frame.observation.copy()
        names, ask = [], ""
        hours = np.where(line.lost, np.maximum(frame.received - line.since, 0.0), 0.0) / 3_600.0
        growth = hours * self._settings.estimate_growth * np.diag(self._model.covariance)
        for machine in np.flatnonzero(replaced.any(axis=1)):
            samples = line.samples[machine]
            means = line.sums[machine] / np.maximum(samples, 1e-9)
            found = estimate(self._model, samples, means, growth[machine])
            known = np.where(replaced[machine], effective_samples(self._model, found.variance), samples)
            at = machine * CHANNELS
            for channel in np.flatnonzero(replaced[machine]):
                value = np.float32(found.value[channel])
                if line.lost[machine, channel]:
                    observation[_READING + at + channel] = value
                observation[_MEAN + at + channel] = value
                deviation = float(np.sqrt(found.variance[channel]))
                name = self._name(frame.line_id, (int(machine), int(channel)))
                names.append(name)
                if deviation > self._settings.estimate_limit:
                    ask = f"{name} is known to ±{deviation:.1f} healthy deviations only"
            observation[_COUNT + machine] = np.log2(1.0 + min(float(known.mean()), line.heard[machine]))
            if np.isnan(observation[_AGE + machine]):
                observation[_AGE + machine] = self._settings.sensor_silence / _SECONDS_OF_AGE
        return Seen(frame.with_inputs(observation, frame.mask), tuple(names), ask)

    def _name(self, line: str, index: npt.NDArray[np.intp] | tuple[int, int]) -> str:
        machine, channel = int(index[0]), int(index[1])
        return f"{line}: {self._channels[channel]} of machine {machine}"

    def _tell(self, name: str, *, up: bool, reason: str, frame: Frame) -> None:
        if self._on_change is not None:
            self._on_change(Change(f"sensor {name}", up, reason, dt.datetime.now(dt.UTC), frame.received))
