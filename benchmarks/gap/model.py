"""The simulator's model as an observer uses it: how causes occur, how machines scatter, what a plant has heard."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from agentpipe.environments import physics
from agentpipe.environments.layout import FALSE_ALARM, MODES
from benchmarks.gap.patterns import Patterns, line_patterns, log_priors

if TYPE_CHECKING:
    import numpy.typing as npt

    from agentpipe.environments.pool import LinePool
    from agentpipe.environments.state import Fixed
    from benchmarks.gap.log import ReceivedLog

    Floats = npt.NDArray[np.float64]

GROWTH: Final = float(np.log(2.0 / 0.75) / 1.25)
"""mean of 1 / (0.75 + 1.25 u), u uniform: a fault grows to its limit in (0.75 + 1.25 u) deadlines"""
SENSOR: Final = slice(0, 9)
"""of a disturbance: sigma, ripple, its period, step, its probability, impulse, its probability and coupling, drift"""
LOAD: Final = slice(18, 23)
"""of a disturbance: sigma, probability of a spike and its size, periodic part and its period"""


class World(NamedTuple):
    """A disturbance of the sensors, and the sensors' own."""

    sensor: tuple[float, ...]
    """nine parameters, see :data:`SENSOR`"""
    phase: float
    """of the ripple, 0 to 1"""
    noise: Floats
    """f64[5] own noise of the channels, SDs"""
    lag: Floats
    """f64[5] seconds"""


class Packets(NamedTuple):
    """K packets in order."""

    machine: npt.NDArray[np.int8]
    time: Floats
    """f64[K] seconds since the alarm"""
    samples: Floats
    offset: Floats
    """f64[K] scan-period offset reported with it"""
    values: Floats
    """f64[K, 5]"""
    stuck: npt.NDArray[np.bool_]
    """bool[K, 5]: only repeats the reading before"""


class Reports(NamedTuple):
    """What the PLC said of its scan period, step by step, S steps."""

    heard: npt.NDArray[np.bool_]
    offset: Floats
    time: Floats


class Heard(NamedTuple):
    """All that one environment has received in its episode, and what it shows of itself."""

    packets: Packets
    reports: Reports
    deadline: float
    """seconds"""
    topology: int
    machines: int

    @property
    def horizon(self) -> float:
        """Seconds in which a fault would grow from nothing to its limit, in the mean."""
        return self.deadline / GROWTH


def heard(log: ReceivedLog, fixed: Fixed, pool: LinePool, n: int) -> Heard:
    """What environment ``n`` of ``pool`` has received, of which ``fixed`` are the fixed arrays."""
    k, s = int(log.count[n]), int(log.steps[n]) + 1
    readings = (log.values[n, :k], log.stuck[n, :k])
    packets = Packets(log.machine[n, :k], log.time[n, :k], log.samples[n, :k], log.offset[n, :k], *readings)
    reports = Reports(log.heard[n, :s], log.offsets[n, :s], log.reported[n, :s])
    return Heard(packets, reports, float(pool.plant().deadline[n]), int(fixed.topology[n]), int(fixed.machines[n]))


@dataclass(frozen=True)
class Model:
    """What is known of all lines."""

    signatures: tuple[npt.NDArray[np.float32], ...]
    """shift of the faulty machine, of those that it feeds, of those that feed it, each f32[modes, 5]"""
    scatters: Floats
    """f64[modes + 1, 5, 5] covariance of the operating point, healthy first"""
    process: Floats
    """f64[5, 5] covariance of a machine's state between packets"""
    modes: Floats
    """f64[modes] how often each occurs"""
    physical: int
    """fault modes of the profile"""
    _lines: dict[tuple[int, int], tuple[Patterns, Floats]] = field(default_factory=dict)

    def line(self, topology: int, machines: int) -> tuple[Patterns, Floats]:
        """Patterns, and log priors f64[machines * modes, CASES]."""
        key = (topology, machines)
        if key not in self._lines:
            patterns = line_patterns(topology, machines, self.physical, self.signatures)
            self._lines[key] = patterns, log_priors(self.modes, machines)
        return self._lines[key]


def model_of(fixed: Fixed) -> Model:
    """The model behind a pool; as many templates count as known for each mode, none for the false alarm."""
    healthy = fixed.healthy_factor.astype(np.float64)
    factors = [healthy, *fixed.mode_factor.astype(np.float64)]
    scatters = np.stack([physics.OPERATING_SCATTER**2 * factor @ factor.T for factor in factors])
    own = np.where(np.arange(len(MODES)) == FALSE_ALARM, 0.0, physics.OWN_MODE_PROBABILITY / (len(MODES) - 1))
    modes = own + (1.0 - physics.OWN_MODE_PROBABILITY) * np.diff(fixed.prevalence, prepend=0.0)
    process: Floats = physics.PROCESS_NOISE**2 * healthy @ healthy.T
    return Model((fixed.shift, fixed.down, fixed.up), scatters, process, modes, int(fixed.physical[0]))


def true_world(fixed: Fixed, phase: float, n: int) -> World:
    """The world of environment ``n``."""
    suite = fixed.sensor_type[n]
    noise, lag = physics.TYPE_NOISE[suite].astype(np.float64), physics.TYPE_LAG[suite].astype(np.float64)
    return World(tuple(fixed.parameters[n, SENSOR].tolist()), phase, noise, lag)


def load_of(parameters: Any) -> tuple[float, ...]:  # noqa: ANN401 - a row of the disturbance table
    """The five load parameters of a row."""
    return tuple(float(value) for value in parameters[LOAD])
