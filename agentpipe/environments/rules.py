"""The rule-based player: thresholds on the historian's means, nearest depot, nearest technician with the skill.

It looks at nothing but what a line shows, so it answers one question of a plant as well as a pool of thousands. It is
what a careful engineer would write without learning anything, and its thresholds are tuned by random search on training
environments, so that it is an honest rival.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from agentpipe.environments.layout import (
    A_CLOSE,
    A_DEPTH,
    A_ESCALATE,
    A_MACHINE,
    A_MODE,
    A_REJECT,
    A_RETRY,
    A_SEVERITY,
    A_START,
    A_VERIFY,
    CHANNELS,
    FALSE_ALARM,
    MACHINES,
    MAX_STEPS,
    MODES,
    PLC_OVERLOAD,
    SENSOR_FAILURE,
    block_start,
)
from agentpipe.environments.players import Actions, Decision, certain, dispatch_actions

if TYPE_CHECKING:
    from collections.abc import Callable

    from agentpipe.environments.line_profile import LineProfile
    from agentpipe.environments.players import Seen

O_MEAN, O_COUNT = block_start("mean"), block_start("count")
O_PRESENT, O_PLC = block_start("present"), block_start("plc")
O_DECLARED_MACHINE, O_DECLARED_MODE = block_start("declared_machine"), block_start("declared_mode")
O_SEVERITY, O_ORDER = block_start("severity"), block_start("order")
O_STEPS_LEFT = block_start("clock") + 2
GIVE_UP = 1.0 - 40 / MAX_STEPS
"""share of the steps left from which nothing more is measured"""
Means = npt.NDArray[np.float32]


@dataclass(frozen=True)
class RuleThresholds:
    """What the search tunes. Readings in healthy standard deviations, severities as share of the full signature.

    The defaults are the best of 120 candidates on 2,000 training environments of the default line.
    """

    samples: float = 25.0
    """samples of the suspected machine before anything is declared"""
    alarm: float = 1.68
    """below this largest deviation the alarm counts as false"""
    overload: float = 0.154
    """mean scan-period offset above which the PLC is blamed"""
    single: float = 0.212
    """second-largest over largest deviation below which the sensor is blamed"""
    medium: float = 0.706
    """amplitude from which a fault is of medium severity"""
    high: float = 0.872
    """amplitude from which a fault is of high severity"""
    search: float = 4.6
    """samples of every machine before one is suspected"""


def largest_deviation(seen: Seen) -> tuple[Means, Actions]:
    """The historian's means f32[N, 8, 5], and the machine i64[N] one of whose channels deviates most."""
    means = seen.observation[:, O_MEAN : O_MEAN + MACHINES * CHANNELS].reshape(-1, MACHINES, CHANNELS)
    flat = np.abs(means).reshape(len(means), -1).argmax(axis=1)
    return means, flat // CHANNELS


def samples_heard(seen: Seen) -> Means:
    """f32[N, 8]: samples behind each machine's mean; infinite where the line has no such machine."""
    heard = np.exp2(seen.observation[:, O_COUNT : O_COUNT + MACHINES]) - 1.0
    present = seen.observation[:, O_PRESENT : O_PRESENT + MACHINES] > 0
    return np.where(present, heard, np.inf).astype(np.float32)


def measuring(seen: Seen, suspect: Actions, search: float, samples: float) -> Actions:
    """i64[N]: the machine to measure next, or -1 when all is heard often enough."""
    heard = samples_heard(seen)
    least = heard.argmin(axis=1)
    rows = np.arange(len(heard))
    wanted = np.where(heard[rows, least] < search, least, np.where(heard[rows, suspect] < samples, suspect, -1))
    return np.where(seen.observation[:, O_STEPS_LEFT] <= GIVE_UP, -1, wanted)


def execute_actions(seen: Seen) -> Actions:
    """i64[N]: start, verify, close when it is well, else go one deeper, else start over."""
    order = seen.observation[:, O_ORDER : O_ORDER + 6]
    started, good, bad = order[:, 1] > 0, order[:, 2] > 0, order[:, 3] > 0
    again = np.where(seen.mask[:, A_RETRY], A_RETRY, np.where(seen.mask[:, A_ESCALATE], A_ESCALATE, A_CLOSE))
    choice = np.where(good, A_CLOSE, np.where(bad, again, A_VERIFY))
    return np.where(started, choice, A_START).astype(np.int64)


def _fault_table(profile: LineProfile) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """The troubleshooting table: for the largest channel, its sign and the second-largest channel, the likeliest mode.

    Returns:
        i64[channel, sign, second] mode slots, and f64[modes] the size of each mode's largest shift.
    """
    table = np.full((CHANNELS, 2, CHANNELS), SENSOR_FAILURE, np.int64)
    weight = np.zeros((CHANNELS, 2, CHANNELS))
    size = np.ones(len(MODES))
    for slot, mode in enumerate(profile.modes):
        shift = np.asarray(mode.shift)
        second, first = np.abs(shift).argsort()[-2:]
        sign = int(shift[first] < 0)
        size[slot] = max(abs(float(shift[first])), 1e-3)
        for other in range(CHANNELS):  # an entry of its own beats one that only shares the largest channel
            value = mode.prevalence + (1.0 if other == second else 0.0)
            if value > weight[first, sign, other]:
                weight[first, sign, other], table[first, sign, other] = value, slot
    return table, size


class RulesPlayer:
    """Thresholds, nearest depot, nearest technician."""

    name = "rules"

    def __init__(self, profile: LineProfile, thresholds: RuleThresholds | None = None) -> None:
        self.thresholds = thresholds or RuleThresholds()
        self._table, self._size = _fault_table(profile)

    def act(self, pool: Seen) -> Decision:
        """One action an environment, without chance."""
        means, suspect = largest_deviation(pool)
        choices = [
            self._identify(pool, means, suspect),
            self._assess(pool, means),
            dispatch_actions(pool),
            execute_actions(pool),
        ]
        return certain(np.choose(pool.segment.astype(np.int64), choices).astype(np.int64))

    def _identify(self, seen: Seen, means: Means, suspect: Actions) -> Actions:
        limits = self.thresholds
        rows = np.arange(seen.size)
        declared = seen.observation[:, O_DECLARED_MACHINE : O_DECLARED_MACHINE + MACHINES]
        known = declared.any(axis=1)
        suspect = np.where(known, declared.argmax(axis=1), suspect)
        own = np.abs(means[rows, suspect])
        order = own.argsort(axis=1)
        channel = order[:, -1]
        ranked = np.sort(own, axis=1)
        sign = (means[rows, suspect, channel] < 0).astype(np.int64)
        mode = self._table[channel, sign, order[:, -2]]
        mode = np.where(ranked[:, -2] < limits.single * ranked[:, -1], SENSOR_FAILURE, mode)
        mode = np.where(seen.observation[:, O_PLC + 1] > limits.overload, PLC_OVERLOAD, mode)
        quiet = ranked[:, -1] < limits.alarm
        mode = np.where(quiet, FALSE_ALARM, mode)
        measure = measuring(seen, suspect, limits.search, limits.samples)
        declare = np.where(known | quiet, A_MODE + mode, A_MACHINE + suspect)
        return np.where(~known & (measure >= 0), measure, declare)

    def _assess(self, seen: Seen, means: Means) -> Actions:
        limits = self.thresholds
        rows = np.arange(seen.size)
        machine = seen.observation[:, O_DECLARED_MACHINE : O_DECLARED_MACHINE + MACHINES].argmax(axis=1)
        mode = seen.observation[:, O_DECLARED_MODE : O_DECLARED_MODE + len(MODES)].argmax(axis=1)
        amplitude = np.abs(means[rows, machine]).max(axis=1) / self._size[mode]
        level = (amplitude > limits.medium).astype(np.int64) + (amplitude > limits.high)
        judged = seen.observation[:, O_SEVERITY : O_SEVERITY + 3].any(axis=1)
        depth = np.where(mode == SENSOR_FAILURE, 2, np.where(mode == PLC_OVERLOAD, 0, level))
        action = np.where(judged, A_DEPTH + depth, A_SEVERITY + level)
        return np.where(mode == FALSE_ALARM, A_REJECT, action)


def tune_rules(
    profile: LineProfile, score: Callable[[RulesPlayer], float], *, trials: int = 40, seed: int = 0
) -> tuple[RulesPlayer, float]:
    """Random search over the thresholds, then a finer one around the best.

    Args:
        profile: the line's signatures.
        score: success of a player on training environments, the higher the better.
        trials: number of candidates.
        seed: of the search.

    Returns:
        The best player and its score.
    """
    generator = np.random.Generator(np.random.Philox(key=seed))
    best, best_score = RulesPlayer(profile), -np.inf
    for trial in range(trials):
        candidate = RulesPlayer(profile, _candidate(generator, best.thresholds, trial, trials))
        value = score(candidate)
        if value > best_score:
            best, best_score = candidate, value
    return best, best_score


def _candidate(generator: np.random.Generator, best: RuleThresholds, trial: int, trials: int) -> RuleThresholds:
    ranges = {
        "samples": (4.0, 25.0),
        "alarm": (0.4, 1.8),
        "overload": (0.05, 0.5),
        "single": (0.05, 0.6),
        "medium": (0.45, 1.0),
        "high": (0.7, 1.5),
        "search": (1.0, 6.0),
    }
    if trial == 0:
        return RuleThresholds()
    if trial < trials // 2:
        return RuleThresholds(**{name: float(generator.uniform(*limits)) for name, limits in ranges.items()})
    moved = {}
    for name, (low, high) in ranges.items():
        value = asdict(best)[name] + generator.normal() * 0.1 * (high - low)
        moved[name] = float(np.clip(value, low, high))
    return RuleThresholds(**moved)
