"""The ideal observer: names the most probable machine and cause given what was received.

It applies Bayes' rule to the simulator's own model.
One that is *told* knows besides what no player is told: the disturbance's parameters, the phase of the ripple, the
sensor suite, the gains of the machines. What it misses with every packet in mind, every player misses. One that is
*untold* knows only the disturbance table and infers the rest, as a player could.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
from scipy.special import logsumexp

from agentpipe.environments import physics
from agentpipe.environments.layout import CHANNELS, FALSE_ALARM, MODES, PLC_OVERLOAD
from agentpipe.environments.parameters import CELLS
from agentpipe.environments.state import ORDER_ESCALATIONS, ORDER_MACHINE, ORDER_MODE, ORDER_VERIFIED
from benchmarks.gap.filter import GROWING, LOW, RISE, ripple_phase
from benchmarks.gap.log import ReceivedLog
from benchmarks.gap.model import SENSOR, World, heard, load_of, true_world
from benchmarks.gap.patterns import CASES, GAIN_VARIANCE, PAIRS
from benchmarks.gap.players import declarations

if TYPE_CHECKING:
    import numpy.typing as npt

    from agentpipe.environments.players import Actions
    from agentpipe.environments.pool import LinePool
    from agentpipe.environments.state import Fixed
    from agentpipe.environments.table import DisturbanceTable
    from benchmarks.gap.model import Heard, Model
    from benchmarks.gap.patterns import Patterns
    from benchmarks.gap.sight import Sight

    Floats = npt.NDArray[np.float64]
    Bools = npt.NDArray[np.bool_]
    Rows = npt.NDArray[np.int64]

PHASES, VISIBLE_RIPPLE = 6, 0.015
"""phases that are tried, and the ripple below which none matters"""
LIKELY, CLOSE, MARGIN, ROUNDS = 8, 6, 6.0, 2
"""hypotheses under which worlds are compared; worlds looked at for every hypothesis, and within how many nats of the
best; how often the likely hypotheses are chosen anew"""
FADING_STRENGTH: Final = 0.2
"""mean strength of a false alarm, for the spread that the gain of a machine adds"""
_OVERLOAD: Final = (np.arange(PAIRS) % len(MODES) == PLC_OVERLOAD).astype(np.int64)


class Knowledge(Protocol):
    """What an observer knows of the disturbance."""

    def scores(self, model: Model, received: Heard, key: np.uint64, n: int) -> Floats:
        """Log of the joint density of each case and of all that was received, f64[pairs, CASES].

        Args:
            model: of all lines.
            received: by environment ``n``.
            key: of its episode's random numbers.
            n: number of the environment.
        """


class Told:
    """Knows disturbance, phase of the ripple, sensor suite and gains.

    Args:
        sight: what it keeps of what it receives.
        fixed: the arrays of the pool that is played.
    """

    def __init__(self, sight: Sight, fixed: Fixed) -> None:
        self._sight, self._fixed = sight, fixed

    def scores(self, model: Model, received: Heard, key: np.uint64, n: int) -> Floats:
        """One world: the true one."""
        fixed = self._fixed
        patterns, prior = model.line(received.topology, received.machines)
        gain = fixed.gain[fixed.line[n]].reshape(-1, CHANNELS).astype(np.float64)[patterns.machine]
        effect = np.where(patterns.geared[:, None], patterns.effect * gain, patterns.effect)
        world = true_world(fixed, float(ripple_phase(key)), n)
        every = np.ones(len(effect), np.bool_)
        _, found = self._sight.readings(model, received, world, effect, patterns.extra, every)
        load = load_of(fixed.parameters[n])
        added = np.array([self._sight.offsets(received, shift, load) for shift in (0.0, physics.OVERLOAD_OFFSET)])
        total: Floats = prior + found + added[_OVERLOAD[: len(prior)], None]
        return total


class Untold:
    """Knows the disturbance table, and that every cell of it is as frequent.

    Worlds (sensor disturbance and phase of its ripple) are compared under the likeliest hypotheses first; those that
    may matter are then worked out for every hypothesis. The sensor suite counts with its mean noise and lag, the gain
    of a machine with its spread.

    Args:
        sight: what it keeps of what it receives.
        table: of the disturbances.
    """

    def __init__(self, sight: Sight, table: DisturbanceTable) -> None:
        self._sight = sight
        rows = [table.parameters[list(table.cell_rows(cell))].astype(np.float64) for cell in CELLS]
        self._loads = [[load_of(row) for row in each] for each in rows]
        distinct, self._kind_of_cell = np.unique(
            np.stack([each[:, SENSOR].mean(axis=0) for each in rows]).round(6), axis=0, return_inverse=True
        )
        noise = np.sqrt((physics.TYPE_NOISE.astype(np.float64) ** 2).mean(axis=0))
        lag = physics.TYPE_LAG.astype(np.float64).mean(axis=0)
        self._worlds: list[World] = []
        kinds, shares = [], []
        for kind, sensor in enumerate(distinct):
            phases = PHASES if sensor[1] >= VISIBLE_RIPPLE else 1
            sensor[1] *= phases > 1
            self._worlds += [World(tuple(sensor.tolist()), k / phases, noise, lag) for k in range(phases)]
            kinds += [kind] * phases
            shares += [-np.log(phases * len(CELLS))] * phases
        self._kinds, self._shares = np.array(kinds), np.array(shares)
        order = np.argsort([world.sensor[0] for world in self._worlds], kind="stable")
        self._middle = self._worlds[order[len(order) // 2]]

    def scores(self, model: Model, received: Heard, key: np.uint64, n: int) -> Floats:  # noqa: ARG002 - untold
        """The sum over all worlds that may matter."""
        patterns, prior = model.line(received.topology, received.machines)
        effect, extra = patterns.effect, patterns.extra + _gain_variance(patterns)
        added = self._added(received)[:, _OVERLOAD[: len(prior)], None]

        def look(world: World, chosen: Bools) -> tuple[float, Floats]:
            return self._sight.readings(model, received, world, effect, extra, chosen)

        every = np.ones(len(effect), np.bool_)
        total = prior + look(self._middle, every)[1] + added.max(axis=0)
        for _ in range(ROUNDS):
            likely = np.argsort(total, axis=None, kind="stable")[::-1][:LIKELY]
            few = (patterns.hypothesis < 0) | np.isin(patterns.hypothesis, likely)
            evidence = np.empty(len(self._worlds))
            for w, world in enumerate(self._worlds):
                calm, found = look(world, few)
                evidence[w] = calm + logsumexp((prior + found + added[w]).ravel()[likely])
            close = np.argsort(evidence, kind="stable")[::-1][:CLOSE]
            parts = []
            for w in close[evidence[close] > evidence.max() - MARGIN]:
                calm, found = look(self._worlds[w], every)
                parts.append(calm + found + added[w])
            total = prior + logsumexp(parts, axis=0)
            if total.argmax() in likely:
                break
        result: Floats = total
        return result

    def _added(self, received: Heard) -> Floats:
        """f64[worlds, 2]: log of a world's share and of the density of the offsets, without and with an overload."""
        shifts = (0.0, physics.OVERLOAD_OFFSET)
        offsets = self._sight.offsets
        cells = np.array(
            [[logsumexp([offsets(received, s, load) for load in each]) for s in shifts] for each in self._loads]
        )
        cells -= np.log([len(each) for each in self._loads])[:, None]
        kinds = range(int(self._kinds.max()) + 1)
        by_kind = np.stack([logsumexp(cells[self._kind_of_cell == kind], axis=0) for kind in kinds])
        added: Floats = by_kind[self._kinds] + self._shares[:, None]
        return added


def _gain_variance(patterns: Patterns) -> Floats:
    """f64[P, 5]: what an unknown gain adds to the scatter of a pattern."""
    strength = np.where(patterns.kind == GROWING, LOW + RISE * patterns.severity, FADING_STRENGTH)
    spread = GAIN_VARIANCE * (strength[:, None] * patterns.effect) ** 2
    return np.where(patterns.geared[:, None], spread, 0.0)


class IdealObserver:
    """Names the likeliest machine and mode when it is asked.

    What a verification has refuted keeps the probability of a mishap.

    Args:
        model: of all lines.
        knowledge: of the disturbance.
        fixed: the arrays of the pool that is played.

    Attributes:
        claims: how likely it found each first diagnosis that it named.
    """

    def __init__(self, model: Model, knowledge: Knowledge, fixed: Fixed) -> None:
        self._model, self._knowledge, self._fixed = model, knowledge, fixed
        self._log = ReceivedLog(len(fixed.line))
        self.claims: list[float] = []
        self._named = np.zeros((len(fixed.line), 2), np.int64)
        self._refuted = np.zeros((len(fixed.line), PAIRS), np.bool_)

    def follow(self, pool: LinePool) -> None:
        """Hears what the last step brought, and what a verification has refuted."""
        self._refuted[pool.plant().step == 0] = False
        self._log.follow(pool)
        order = pool.plant().order.astype(np.int64)
        rows = np.flatnonzero(order[:, ORDER_VERIFIED] == 2)
        self._refuted[rows, order[rows, ORDER_MACHINE] * len(MODES) + order[rows, ORDER_MODE]] = True

    def posterior(self, pool: LinePool, rows: Rows) -> Floats:
        """f64[rows, PAIRS, CASES]: probability of each machine, mode and case."""
        result = np.full((len(rows), PAIRS, CASES), -np.inf)
        for index, n in enumerate(rows):
            received = heard(self._log, self._fixed, pool, int(n))
            found = self._knowledge.scores(self._model, received, pool.hidden().key[n], int(n))
            refuted = self._refuted[n, : len(found), None]
            result[index, : len(found)] = found + np.where(refuted, np.log(physics.MISHAP_PROBABILITY), 0.0)
        chances: Floats = np.exp(result - logsumexp(result, axis=(1, 2), keepdims=True))
        return chances

    def name(self, pool: LinePool, rows: Rows) -> tuple[Rows, Rows, Floats]:
        """The likeliest machine and mode of each row, and how likely; the machine of a false alarm is 0."""
        pairs = self.posterior(pool, rows).sum(axis=2)
        alarms = pairs[:, FALSE_ALARM :: len(MODES)]
        alarm = alarms.sum(axis=1)
        alarms[:] = 0.0
        best, chance = pairs.argmax(axis=1), pairs.max(axis=1)
        machine = np.where(alarm > chance, 0, best // len(MODES))
        return machine, np.where(alarm > chance, FALSE_ALARM, best % len(MODES)), np.maximum(alarm, chance)

    def declare(self, pool: LinePool, asked: Bools) -> Actions:
        """The machine, then the mode that was the likeliest with it."""
        rows = np.flatnonzero(asked & (pool.plant().order[:, ORDER_MACHINE] < 0))
        if len(rows):
            machine, mode, chance = self.name(pool, rows)
            self.claims += chance[pool.plant().order[rows, ORDER_ESCALATIONS] == 0].tolist()
            self._named[rows] = np.stack([machine, mode], axis=1)
        return declarations(pool, self._named[:, 0], self._named[:, 1])
