# ruff: noqa: ANN401, C901, D417, FBT001, PLR0912, PLR0913, PLR0917
"""Compiled: how likely received packets are under each hypothesis, by the simulator's own model.

A *pattern* is what one machine looks like under one hypothesis: how far its channels are moved, whether that stays,
grows with the fault or fades with a false alarm, and how its operating point scatters. For each pattern a Gaussian over
operating point b and drift d (five channels each) is carried from packet to packet. A reading of channel c in a packet
of n samples, t seconds after the alarm, is

    y_c = a (z_c + k_c) + 10 (a - 1) + sqrt(t / 60) d_c + noise + impulse,    z = b + process noise

with k_c what fault and PLC load move it by, and a = 1 + ripple (+ the gain step, with its probability). Step and
impulse make it a mixture of six normals; after each reading the mixture is replaced by the one normal with its mean and
covariance (assumed-density filtering). Without steps and impulses that is exact.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np

from agentpipe.environments import physics
from agentpipe.environments.jit import cache_directory
from agentpipe.environments.layout import CHANNELS
from agentpipe.environments.rng import bits, uniform
from agentpipe.environments.sense import C_PHASE

numba.config.CACHE_DIR = str(cache_directory())  # type: ignore[attr-defined]
compiled: Any = numba.njit(cache=True, nogil=True, error_model="numpy")

CONSTANT, GROWING, FADING = 0, 1, 2
STATE = 2 * CHANNELS
"""operating point and drift"""
_ALL = 3 * CHANNELS
_TINY = 1e-300
_LOG_TWO_PI = math.log(2.0 * math.pi)
LOW, RISE, TRANSIENT = physics.AMPLITUDE_LOW, physics.AMPLITUDE_RISE, physics.TRANSIENT_SECONDS
PROCESS, CURRENT, SCALE = physics.PROCESS_NOISE, physics.CURRENT, float(physics.FULL_SCALE[0])
STILL = 0.01
"""SDs a minute of drift that are nothing beside the scatter of 0.3"""
LOAD_RESPONSE = physics.LOAD_RESPONSE.astype(np.float64)


@compiled
def _folded(mean: float, variance: float) -> float:
    """Mean of the absolute value of a normal."""
    deviation = math.sqrt(2.0 * variance)
    ratio = mean / deviation
    return deviation / math.sqrt(math.pi) * math.exp(-ratio * ratio) + mean * math.erf(ratio)


@compiled
def _channel(c: int, y: float, k: float, w: float, size: int, noise: Any, x: Any, P: Any) -> float:
    """Takes in one reading; returns the log of its density.

    ``noise``: variance, ripple, step and its probability, size of an impulse and its probability; of the state the
    first ``size`` numbers are looked at.
    """
    variance, ripple, step, p_step, impulse, p_impulse = noise
    drift = 2 * CHANNELS + c
    szz, szd, sdd = P[c, c], w * P[c, drift], w * w * P[drift, drift]
    total = alpha = beta = uu = uv = vv = 0.0
    for stepped in range(2):
        chance = p_step if stepped else 1.0 - p_step
        if chance <= 0.0:
            continue
        a = 1.0 + ripple + (step if stepped else 0.0)
        spread = a * a * szz + 2.0 * a * szd + sdd + variance
        centre = a * (x[c] + k) + SCALE * (a - 1.0) + w * x[drift]
        for sign in range(3):
            share = chance * (1.0 - p_impulse if sign == 0 else 0.5 * p_impulse)
            if share <= 0.0:
                continue
            e = y - centre - (impulse if sign == 1 else (-impulse if sign == 2 else 0.0))
            weight = share * math.exp(-0.5 * e * e / spread) / math.sqrt(spread)
            total += weight
            pull, curve = e / spread, e * e / (spread * spread) - 1.0 / spread
            alpha += weight * a * pull
            beta += weight * pull
            uu += weight * a * a * curve
            uv += weight * a * curve
            vv += weight * curve
    if total < _TINY:
        return -700.0
    alpha, beta = alpha / total, beta / total
    uu, uv, vv = uu / total - alpha * alpha, uv / total - alpha * beta, vv / total - beta * beta
    u, v = P[_ALL], P[_ALL + 1]
    for i in range(size):
        u[i], v[i] = P[i, c], w * P[i, drift]
    for i in range(size):
        x[i] += alpha * u[i] + beta * v[i]
        left, right = uu * u[i] + uv * v[i], uv * u[i] + vv * v[i]
        for j in range(size):
            P[i, j] += left * u[j] + right * v[j]
    return math.log(total) - 0.5 * _LOG_TWO_PI


@compiled
def pattern_density(
    kind: int, effect: Any, severity: float, scatter: Any, horizon: float, packets: Any, world: Any, x: Any, P: Any
) -> float:
    """Log of the density of all packets of one machine under one pattern.

    Args:
        kind: constant, growing or fading; effect: f64[5] at full strength, SDs; severity: at the alarm.
        scatter: f64[5, 5] covariance of the operating point.
        horizon: seconds in which a fault would grow from nothing to its limit.
        packets: of this machine in order: t f64[K], samples f64[K], offset f64[K], readings f64[K, 5], bool[K, 5] those
            that only repeat the one before.
        world: sensor parameters f64[9]: sigma, ripple and its period, step and its probability, impulse, its
            probability and its coupling, drift; phase of the ripple; own noise of the sensors f64[5]; their lag f64[5];
            covariance f64[5, 5] of a machine's state between packets.
        x, P: f64[15], f64[17, 15] to work in.
    """
    times, samples, offsets, values, stuck = packets
    parameters, phase, type_noise, lag, process = world
    sigma, ripple, period, step, p_step, impulse, impulse_p, coupling, drift = parameters
    x[:] = 0.0
    P[:] = 0.0
    for i in range(CHANNELS):
        for j in range(CHANNELS):
            P[CHANNELS + i, CHANNELS + j] = scatter[i, j]
        P[2 * CHANNELS + i, 2 * CHANNELS + i] = drift * drift
    size = _ALL if drift > STILL else STATE
    total = 0.0
    for index in range(len(times)):
        t, root = times[index], 1.0 / math.sqrt(samples[index])
        for i in range(CHANNELS):  # the machine's state now: operating point and process noise
            x[i] = x[CHANNELS + i]
            for j in range(size):
                P[i, j] = P[CHANNELS + i, j]
        for i in range(size):
            for j in range(CHANNELS):
                P[i, j] = P[i, CHANNELS + j]
        for i in range(CHANNELS):
            for j in range(CHANNELS):
                P[i, j] += process[i, j] / samples[index]
        gain = ripple * math.sin(2.0 * math.pi * (phase + t / period))
        jump = _folded(x[CURRENT] + effect[CURRENT], P[CURRENT, CURRENT])
        p_impulse = min(impulse_p + coupling * jump, 0.5) * root
        for c in range(CHANNELS):
            if stuck[index, c]:
                continue
            strength = 1.0
            if kind == GROWING:
                grown = severity + (1.0 - severity) * max(t - lag[c], 0.0) / horizon
                strength = LOW + RISE * min(grown, 1.0)
            elif kind == FADING:
                strength = math.exp(-t / TRANSIENT)
            k = strength * effect[c] + LOAD_RESPONSE[c] * offsets[index]
            variance = ((type_noise[c] + sigma) * root) ** 2
            noise = (variance, gain, step, p_step, impulse * root, p_impulse)
            total += _channel(c, values[index, c], k, math.sqrt(t / 60.0), size, noise, x, P)
    return total


@compiled
def take_offset(heard: bool, value: float, sigma: float, spike: float, p_spike: float, x: Any, P: Any) -> float:
    """One step of the scan-period offset, an AR(2) process that spikes; returns the log of the density of ``value``.

    Args:
        heard: whether the PLC reported; without it the process only moves on.
        value: reported, less what is periodic and what the hypothesis adds.
        sigma: of the process; spike: size of a spike, p_spike its probability.
        x: f64[2], P: f64[2, 2], of the last two values; changed.
    """
    now = 0.7 * x[0] + 0.2 * x[1]
    own = 0.49 * P[0, 0] + 0.28 * P[0, 1] + 0.04 * P[1, 1] + sigma * sigma
    cross = 0.7 * P[0, 0] + 0.2 * P[0, 1]
    x[1], x[0] = x[0], now
    P[1, 1], P[0, 0], P[0, 1], P[1, 0] = P[0, 0], own, cross, cross
    if not heard:
        return 0.0
    density: float = offset_density(value, spike, p_spike, x, P)
    return density


@compiled
def offset_density(value: float, spike: float, p_spike: float, x: Any, P: Any) -> float:
    """Takes in a reported offset; see :func:`take_offset`."""
    variance = P[0, 0] + 1e-8
    total = alpha = curve = 0.0
    for spiked in range(2):
        e = value - x[0] - (spike if spiked else 0.0)
        weight = (p_spike if spiked else 1.0 - p_spike) * math.exp(-0.5 * e * e / variance) / math.sqrt(variance)
        total += weight
        alpha += weight * e / variance
        curve += weight * (e * e / (variance * variance) - 1.0 / variance)
    if total < _TINY:
        return -700.0
    alpha /= total
    curve = curve / total - alpha * alpha
    u0, u1 = P[0, 0], P[1, 0]
    x[0] += alpha * u0
    x[1] += alpha * u1
    P[0, 0] += curve * u0 * u0
    P[0, 1] += curve * u0 * u1
    P[1, 0] = P[0, 1]
    P[1, 1] += curve * u1 * u1
    return math.log(total) - 0.5 * _LOG_TWO_PI


@compiled
def offsets_density(reports: Any, added: float, load: Any) -> float:
    """Log of the density of all reported offsets where a hypothesis adds ``added``.

    Args:
        reports: heard bool[S], offset f64[S], seconds f64[S], one a step.
        added: relative scan-period offset.
        load: sigma, probability of a spike and its size, periodic part and its period in seconds.
    """
    heard, offsets, times = reports
    sigma, p_spike, spike, cycle, period = load
    x, P = np.zeros(2), np.full((2, 2), (2.1 * sigma) ** 2)
    total = 0.0
    for step in range(len(heard)):
        value = offsets[step] - added - cycle * math.sin(2.0 * math.pi * times[step] / period)
        if step > 0:
            total += take_offset(heard[step], value, sigma, spike, p_spike, x, P)
        elif heard[0]:
            total += offset_density(value, spike, p_spike, x, P)
    return total


@compiled
def line_density(
    packets: Any, start: Any, hypothesis: Any, kind: Any, severity: Any, mode: Any, effect: Any, extra: Any,
    chosen: Any, scatters: Any, horizon: float, world: Any, out: Any,
) -> float:  # fmt: skip
    """Log of the density of all packets on a healthy line; to ``out`` f64[hypotheses] goes what each adds to it.

    See :class:`benchmarks.gap.patterns.Patterns` and :class:`benchmarks.gap.model.Packets`; only the ``chosen`` bool[P]
    patterns are looked at, every healthy one must be among them.
    """
    machine, time, samples, offset, values, stuck = packets
    x, P, scatter = np.empty(_ALL), np.empty((_ALL + 2, _ALL)), np.empty((CHANNELS, CHANNELS))
    calm = 0.0
    for j in range(len(start) - 1):
        rows = np.flatnonzero(machine == j)
        own = (time[rows], samples[rows], offset[rows], values[rows], stuck[rows])
        healthy = 0.0
        for p in range(start[j], start[j + 1]):
            if not chosen[p]:
                continue
            scatter[:] = scatters[mode[p] + 1]
            for c in range(CHANNELS):
                scatter[c, c] += extra[p, c]
            found = pattern_density(kind[p], effect[p], severity[p], scatter, horizon, own, world, x, P)
            if hypothesis[p] < 0:
                healthy = found
                calm += found
            else:
                out[hypothesis[p]] += found - healthy
    return calm


@compiled
def ripple_phase(key: Any) -> float:
    """Phase of the gain ripple in the episode of ``key`` u64, 0 to 1."""
    phase: float = uniform(bits(key, 0, C_PHASE))
    return phase
