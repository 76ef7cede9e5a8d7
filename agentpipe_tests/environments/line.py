"""The built-in line for tests: catalogue, table and profile loaded once, small pools, recorders, naive references."""

from __future__ import annotations

import functools
import math

import numpy as np

from agentpipe.environments.catalog import load_catalog
from agentpipe.environments.fixed import build_fixed
from agentpipe.environments.layout import MODES, PHYSICAL_MODES, Purpose
from agentpipe.environments.line_profile import LineProfile, default_profile
from agentpipe.environments.pool import LinePool, build_pool
from agentpipe.environments.rng import NORMAL_TABLE
from agentpipe_tests.strategies import project_table

catalog = functools.cache(load_catalog)
table = functools.cache(project_table)
profile = functools.cache(default_profile)

VISIBLE = ("observation", "mask", "segment", "last_action", "time", "reward", "terminated", "truncated", "episode")
FINAL = ("final_observation", "final_mask", "final_last_action", "final_time")
RESULTS = (
    "success",
    "reason",
    "segment",
    "decisions",
    "decision_seconds",
    "elapsed_seconds",
    "mode",
    "machine",
    "return",
    "steps",
    "episode",
)


def make_pool(environments=None, *, seed=5, purpose=Purpose.TRAIN, line=None, **options) -> LinePool:
    """A pool over ``environments`` (specs, or None: the validation split)."""
    chosen = catalog().environments("validation") if environments is None else environments
    return build_pool(chosen, table(), line or profile(), seed=seed, purpose=purpose, **options)


def pool_with(parameters: dict[str, float], environments=None, *, seed=5, line=None, **options) -> LinePool:
    """A pool whose disturbance parameters are overwritten, the same in every environment."""
    from agentpipe.environments import physics
    from agentpipe.environments.parameters import PARAMETER_INDEX

    chosen = catalog().environments("validation") if environments is None else environments
    fixed = build_fixed(chosen, table(), line or profile(), seed=seed, purpose=Purpose.TRAIN)
    for name, value in parameters.items():
        fixed.parameters[:, PARAMETER_INDEX[name]] = value
    bandwidth, snr = (fixed.parameters[:, PARAMETER_INDEX[f"network_{n}"]] for n in ("bandwidth_khz", "snr_db"))
    fixed = fixed._replace(capacity=physics.packets_a_cycle(bandwidth, snr, fixed.protocol))
    return LinePool(fixed, tuple(environment.environment_id for environment in chosen), **options)


def arrays_of(pool: LinePool) -> dict[str, np.ndarray]:
    """Copies of everything a player sees, and of the outcomes where an episode has just ended."""
    done = pool.terminated | pool.truncated
    seen = {name: getattr(pool, name).copy() for name in VISIBLE}
    for name in FINAL:
        seen[name] = np.where(_column(done, getattr(pool, name)), getattr(pool, name), 0)
    for name in RESULTS:
        seen[f"result_{name}"] = np.where(done, getattr(pool, f"result_{name}"), 0)
    return seen


def _column(flags, like):
    return flags.reshape(-1, *[1] * (like.ndim - 1))


def fingerprints(frame: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A frame whose matrices are replaced by 64 bits a row that change with any bit of the row."""
    compact = {}
    for name, array in frame.items():
        if array.ndim == 1:
            compact[name] = array
            continue
        words = np.ascontiguousarray(array).view(np.uint8 if array.dtype == np.bool_ else np.uint32)
        weights = np.random.Generator(np.random.Philox(key=7)).integers(0, 2**63, words.shape[-1], np.uint64) * 2 + 1
        compact[name] = (words * weights).sum(axis=1, dtype=np.uint64)
    return compact


def record(pool: LinePool, player, steps: int, *, compact=False) -> list[dict[str, np.ndarray]]:
    """What is seen at the start and after each of ``steps`` steps; ``compact``: fingerprints of it."""
    keep = fingerprints if compact else dict
    frames = [keep(arrays_of(pool))]
    for _ in range(steps):
        pool.step(player.act(pool).actions)
        frames.append(keep(arrays_of(pool)))
    return frames


def assert_same_bytes(first, second, rows_first=slice(None), rows_second=slice(None)) -> None:
    """Two recordings agree in every byte of the given rows."""
    assert len(first) == len(second)
    for step, (one, other) in enumerate(zip(first, second, strict=True)):
        for name, array in one.items():
            left, right = np.ascontiguousarray(array[rows_first]), np.ascontiguousarray(other[name][rows_second])
            assert left.tobytes() == right.tobytes(), f"{name} differs at step {step}"


def success(player, environments, *, seed=0, episodes=1, purpose=Purpose.VALIDATION, line=None) -> float:
    """Share of successes over the first ``episodes`` episodes of each environment."""
    pool = make_pool(environments, seed=seed, purpose=purpose, line=line)
    total = 0.0
    for episode in range(episodes):
        pool.reset(episode)
        won, running = np.zeros(pool.size), np.ones(pool.size, bool)
        while running.any():
            pool.step(player.act(pool).actions)
            over = running & (pool.terminated | pool.truncated)
            won[over] = pool.result_success[over]
            running &= ~over
        total += won.mean()
    return total / episodes


def four_mode_profile() -> LineProfile:
    """The project's profile cut down to its first four modes, as a fit from a small machine history would be."""
    full = profile()
    modes = full.modes[:4]
    scale = (1.0 - sum(full.structural_prevalence.values())) / sum(mode.prevalence for mode in modes)
    kept = tuple(type(m)(m.name, m.shift, m.covariance, m.prevalence * scale, m.rows) for m in modes)
    return LineProfile("four", full.channels, full.healthy_covariance, kept, full.structural_prevalence, full.report)


def only_modes(shares: dict[str, float]) -> LineProfile:
    """The project's profile with other prevalences: ``shares`` of the ten mode slots."""
    full = profile()
    modes = tuple(
        type(m)(m.name, m.shift, m.covariance, shares.get(MODES[slot], 0.0), m.rows)
        for slot, m in enumerate(full.modes)
    )
    structural = {name: shares.get(name, 0.0) for name in MODES[PHYSICAL_MODES:]}
    return LineProfile("shares", full.channels, full.healthy_covariance, modes, structural, full.report)


# Naive references in Python's own integers and floats.

_WORD = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def ref_mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _WORD
    return x ^ (x >> 31)


def ref_fold(key: int, word: int) -> int:
    return ref_mix(((key ^ ref_mix((word + GOLDEN) & _WORD)) + GOLDEN) & _WORD)


def ref_bits(key: int, step: int, channel: int) -> int:
    return ref_mix((key + (step * 2048 + channel + 1) * GOLDEN) & _WORD)


def ref_uniform(word: int) -> float:
    return (word >> 11) / 2**53


def ref_normal(half: int) -> np.float32:
    """Linear between the two knots around ``half`` / 2**32."""
    cell, share = half >> 20, np.float32(half & ((1 << 20) - 1)) * np.float32(2.0**-20)
    low, high = NORMAL_TABLE[cell], NORMAL_TABLE[cell + 1]
    return np.float32(low + (high - low) * share)


class RefLink:
    """One machine-to-plant link: Gilbert-Elliott loss, RFC 6298 timer, window; float by float."""

    def __init__(self, key: int, parameters: dict[str, float]) -> None:
        self.key, self.p = key, {name: float(np.float32(value)) for name, value in parameters.items()}
        self.bad, self.srtt, self.rttvar, self.exchanges, self.failed, self.window = False, 0.0, 0.0, 0, 0, 8

    def transmit(self, word: int) -> float | None:
        """``None`` when lost, else a uniform that is left over."""
        move, draw = (word >> 32) / 2**32, (word & 0xFFFFFFFF) / 2**32
        leaving = self.p["network_to_good_probability" if self.bad else "network_to_bad_probability"]
        if move < leaving:
            self.bad = not self.bad
        loss = self.p["network_loss_bad" if self.bad else "network_loss_good"]
        return None if draw < loss else (draw - loss) / (1.0 - loss)

    def exchange(self, step: int) -> tuple[float, bool]:
        self.exchanges += 1
        seconds = 0.0
        for attempt in range(3):
            left = self.transmit(ref_bits(self.key, step, attempt))
            if left is not None:
                rtt, jitter = self.p["network_rtt_ms"], self.p["network_jitter_ms"]
                trip = (max(rtt - jitter, 0.0) - jitter * math.log(1.0 - left)) / 1000.0
                if attempt == 0 and self.srtt == 0.0:  # RFC 6298, 2.2
                    self.srtt, self.rttvar = trip, trip / 2
                elif attempt == 0:  # 2.3; Karn: no sample of what was sent twice
                    self.rttvar = 3 / 4 * self.rttvar + 1 / 4 * abs(self.srtt - trip)
                    self.srtt = 7 / 8 * self.srtt + 1 / 8 * trip
                self.window = min(8, self.window + 1)
                return seconds + trip, True
            self.window = max(1, self.window // 2)
            seconds += min(max(self.srtt + 4 * self.rttvar, 0.2) * 2**attempt, 3.0)
        self.failed += 1
        return seconds, False
