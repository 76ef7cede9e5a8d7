"""What an observer keeps of what it receives: every packet, or only what the historian shows when it is asked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from scipy.special import erf

from agentpipe.environments import physics
from agentpipe.environments.layout import CHANNELS
from benchmarks.gap.filter import FADING, GROWING, LOW, RISE, TRANSIENT, line_density, offsets_density

if TYPE_CHECKING:
    import numpy.typing as npt

    from benchmarks.gap.model import Heard, Model, World

    Floats = npt.NDArray[np.float64]
    Bools = npt.NDArray[np.bool_]

SCALE = float(physics.FULL_SCALE[0])
LOAD_RESPONSE = physics.LOAD_RESPONSE.astype(np.float64)
AR_VARIANCE = 2.1**2
"""stationary variance of the scan-period offset over that of its noise"""


class Sight(Protocol):
    """How likely what was kept is."""

    def readings(
        self, model: Model, heard: Heard, world: World, effect: Floats, extra: Floats, chosen: Bools
    ) -> tuple[float, Floats]:
        """Log of the density of the readings on a healthy line, and what each hypothesis adds to it.

        Args:
            model: of all lines.
            heard: what was received.
            world: the sensors' disturbance.
            effect: f64[P, 5] shift of each pattern at full strength.
            extra: f64[P, 5] variance of the operating point besides.
            chosen: bool[P] the patterns to look at, every healthy one among them.
        """

    def offsets(self, heard: Heard, added: float, load: tuple[float, ...]) -> float:
        """Log of the density of the reported scan-period offsets where a hypothesis adds ``added``."""


class EveryPacket:
    """Remembers each packet, its time and the offset that came with it."""

    def readings(
        self, model: Model, heard: Heard, world: World, effect: Floats, extra: Floats, chosen: Bools
    ) -> tuple[float, Floats]:
        """Exact but for steps and impulses, see :mod:`benchmarks.gap.filter`."""
        patterns, prior = model.line(heard.topology, heard.machines)
        out = np.zeros(prior.size)
        shape = (patterns.start, patterns.hypothesis, patterns.kind, patterns.severity, patterns.mode)
        given = (np.ascontiguousarray(effect), np.ascontiguousarray(extra), chosen)
        rest = (model.scatters, heard.horizon, (*world, model.process), out)
        calm = line_density(tuple(heard.packets), *shape, *given, *rest)
        return float(calm), out.reshape(prior.shape)

    def offsets(self, heard: Heard, added: float, load: tuple[float, ...]) -> float:
        """All of them, as the AR(2) process that they are."""
        return float(offsets_density(tuple(heard.reports), added, load))


class MeansOnly:
    """Knows of each machine the historian's mean and how it came about, and of the offset its mean.

    The mean of the received readings is taken as normal, with the mean and covariance that the model gives it; of a
    machine's own mean offset only the line's is known.
    """

    def readings(
        self, model: Model, heard: Heard, world: World, effect: Floats, extra: Floats, chosen: Bools
    ) -> tuple[float, Floats]:
        """A normal for each machine and pattern."""
        patterns, prior = model.line(heard.topology, heard.machines)
        out, calm, packets = np.zeros(prior.size), 0.0, heard.packets
        offset, spread = _mean_offset(heard)
        for j in range(heard.machines):
            own = packets.machine == j
            if not own.any():
                continue
            rows = patterns.start[j] + np.flatnonzero(chosen[patterns.start[j] : patterns.start[j + 1]])
            times, samples = packets.time[own], packets.samples[own]
            share = samples / samples.sum()
            mean = share @ packets.values[own]
            strength = _strength(patterns, rows, times, heard.horizon, world.lag) @ share
            gain, variances = _sensor(world, times, samples, effect[rows])
            centre = gain * (strength[:, None] * effect[rows] + LOAD_RESPONSE * offset) + SCALE * (gain - 1.0)
            covariance = gain**2 * (model.scatters[patterns.mode[rows] + 1] + model.process / samples.sum())
            covariance += np.einsum("pc,cd->pcd", variances + extra[rows], np.eye(CHANNELS))
            covariance += np.outer(LOAD_RESPONSE, LOAD_RESPONSE) * spread / own.sum()
            density = _normal(mean - centre, covariance)
            calm += float(density[0])
            out[patterns.hypothesis[rows[1:]]] += density[1:] - density[0]
        return calm, out.reshape(prior.shape)

    def offsets(self, heard: Heard, added: float, load: tuple[float, ...]) -> float:
        """The mean, as a normal of half the variance of one offset."""
        sigma, p_spike, spike, cycle, _ = load
        variance = 0.5 * (AR_VARIANCE * sigma**2 + 0.5 * cycle**2 + p_spike * spike**2) + 1e-5
        return float(-0.5 * ((_mean_offset(heard)[0] - added) ** 2 / variance + np.log(variance)))


def _mean_offset(heard: Heard) -> tuple[float, float]:
    """Mean of the reported offsets, and their variance."""
    offsets = heard.reports.offset[heard.reports.heard]
    return (float(offsets.mean()), float(offsets.var())) if len(offsets) else (0.0, 0.0)


def _strength(patterns: Any, rows: Any, times: Floats, horizon: float, lag: Floats) -> Floats:  # noqa: ANN401
    """f64[rows, K]: share of each pattern's effect that shows at each packet."""
    kind, severity = patterns.kind[rows, None], patterns.severity[rows, None]
    grown = severity + (1.0 - severity) * np.maximum(times - lag.mean(), 0.0) / horizon
    growing = LOW + RISE * np.minimum(grown, 1.0)
    strength: Floats = np.where(kind == GROWING, growing, np.where(kind == FADING, np.exp(-times / TRANSIENT), 1.0))
    return strength


def _sensor(world: World, times: Floats, samples: Floats, effect: Floats) -> tuple[float, Floats]:
    """Mean gain of a machine's mean, and the variance f64[rows, 5] that the sensors add to it."""
    sigma, ripple, period, step, p_step, impulse, impulse_p, coupling, drift = world.sensor
    share = samples / samples.sum()
    gain = 1.0 + p_step * step + share @ (ripple * np.sin(2.0 * np.pi * (world.phase + times / period)))
    scatter = physics.OPERATING_SCATTER**2 + physics.PROCESS_NOISE**2
    current = effect[:, physics.CURRENT] / np.sqrt(2.0 * scatter)
    jump = np.sqrt(2.0 * scatter) * (np.exp(-(current**2)) / np.sqrt(np.pi) + current * erf(current))
    struck = np.minimum(impulse_p + coupling * jump, 0.5) * impulse**2 * (share**2 @ samples**-1.5)
    own = (world.noise + sigma) ** 2 / samples.sum() + (drift * (share @ np.sqrt(times / 60.0))) ** 2
    own = own + p_step * (1.0 - p_step) * (SCALE * step) ** 2 * (share @ share)
    return float(gain), own + struck[:, None]


def _normal(deviation: Floats, covariance: Floats) -> Floats:
    """f64[rows]: log density of ``deviation`` f64[rows, 5] under normals around 0, ``covariance`` f64[rows, 5, 5]."""
    factor = np.linalg.cholesky(covariance)
    scaled = np.linalg.solve(factor, deviation[..., None])[..., 0]
    logarithms = np.log(np.einsum("pcc->pc", factor)).sum(axis=1)
    density: Floats = -0.5 * (scaled**2).sum(axis=1) - logarithms - 0.5 * CHANNELS * np.log(2.0 * np.pi)
    return density
