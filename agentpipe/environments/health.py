"""Health of the vectorised pool, cell by cell: reset latency, start success, steps a second, resident memory (S2).

What a digest covers (``content``: which environments, what they showed) is kept apart from what a clock or the system
says (``reset_ms``, ``step_rate``, ``resident_mb``). Figures that mean something only for one process an environment are
listed as not applicable, never made up.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from agentpipe.environments.jit import compiled_before
from agentpipe.environments.layout import SIMULATOR_VERSION, Purpose
from agentpipe.errors import AgentpipeError, InputError
from agentpipe.progress import Progress, silent
from agentpipe.storage import canonical_json, digest_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agentpipe.environments.catalog import EnvironmentSpec
    from agentpipe.environments.line_profile import LineProfile
    from agentpipe.environments.pool import LinePool
    from agentpipe.environments.table import DisturbanceTable
    from agentpipe.environments.table_redis import RedisHealth

NOT_APPLICABLE = {
    "process_start_ms": "the vectorised pool starts no process for an environment",
    "memory_limit_mb": "environments share one process",
    "cpu_share_sd": "environments share one process",
    "crash_rate": "an environment cannot die without the process",
    "context_switches": "belong to one process an environment",
    "redis_round_trip_ms": "no Redis is set: the table is read from files",
    "redis_connection_share": "no Redis is set: the table is read from files",
}
_ACTION_CHANNEL = 31

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class CellHealth:
    """Health of the environments of one cell.

    Attributes:
        cell: such as ``sensor-3``.
        content: what the digest covers; equal for equal inputs on any machine and for any number of threads.
        failures: environments that did not start, with the reason (at most twenty are kept).
        reset_ms: f64[samples], wall time to build and reset one environment alone, milliseconds.
        pool_reset_ms: f64[resets], wall time to reset all environments of the cell together, milliseconds.
        step_rate: f64[steps], environment steps a second of each pool step, choice of actions not included.
        resident_mb: resident memory of the process with the pool built, MiB.
        pool_mb: by how much building the pool raised it, MiB (0 where memory was reused).
        redis: round trip and connections of the Redis that distributes the table; ``None`` without one.
    """

    cell: str
    content: dict[str, Any]
    failures: tuple[tuple[str, str], ...]
    reset_ms: Floats
    pool_reset_ms: Floats
    step_rate: Floats
    resident_mb: float
    pool_mb: float
    redis: RedisHealth | None = None

    @property
    def digest(self) -> str:
        """SHA-256 of ``content``."""
        return digest_bytes(canonical_json(self.content))

    @property
    def start_success(self) -> float:
        """Share of environments that started: built, reset, a finite observation and a legal action."""
        return float(self.content["started"]) / float(self.content["environments"])

    def reset_quantile_ms(self, share: float) -> float:
        """Quantile of the reset latency of one environment, milliseconds."""
        return float(np.quantile(self.reset_ms, share)) if len(self.reset_ms) else float("inf")

    def slow_reset_share(self, limit_ms: float) -> float:
        """Share of resets slower than ``limit_ms``."""
        return float((self.reset_ms > limit_ms).mean()) if len(self.reset_ms) else 1.0

    @property
    def steps_per_second(self) -> float:
        """Median environment steps a second."""
        return float(np.median(self.step_rate)) if len(self.step_rate) else 0.0

    @property
    def redis_figures(self) -> dict[str, float | None]:
        """``redis_round_trip_ms`` and ``redis_connection_share`` as gate 1 takes them; ``None`` does not apply."""
        if self.redis is None:
            return {"redis_round_trip_ms": None, "redis_connection_share": None}
        return {
            "redis_round_trip_ms": self.redis.round_trip_ms,
            "redis_connection_share": self.redis.connection_share,
        }

    @property
    def not_applicable(self) -> dict[str, str]:
        """Figures that mean nothing for this pool, and why."""
        measured = {name for name, value in self.redis_figures.items() if value is not None}
        reasons = {name: reason for name, reason in NOT_APPLICABLE.items() if name not in measured}
        if self.redis and "redis_connection_share" in reasons:
            reasons["redis_connection_share"] = "the Redis server does not tell its maxclients"
        return reasons

    def to_json(self) -> dict[str, Any]:
        """JSON-ready form, durations apart from content."""
        quantiles = (
            {f"p{round(q * 100)}": self.reset_quantile_ms(q) for q in (0.5, 0.9, 0.99)} if len(self.reset_ms) else {}
        )
        return {
            "cell": self.cell,
            "digest": self.digest,
            "content": self.content,
            "start_success": self.start_success,
            "failures": [list(failure) for failure in self.failures],
            "measured": {
                "reset_ms": quantiles,
                "pool_reset_ms": float(np.median(self.pool_reset_ms)) if len(self.pool_reset_ms) else None,
                "steps_per_second": self.steps_per_second,
                "resident_mb": self.resident_mb,
                "pool_mb": self.pool_mb,
                **{name: value for name, value in self.redis_figures.items() if value is not None},
            },
            "not_applicable": self.not_applicable,
        }


@dataclass(frozen=True)
class Effort:
    """How much is measured: resets of the whole pool, environments reset alone, and pool steps."""

    resets: int = 20
    samples: int = 100
    steps: int = 64


FULL = Effort()


def cell_health(
    environments: Sequence[EnvironmentSpec],
    table: DisturbanceTable,
    profile: LineProfile,
    *,
    seed: int,
    threads: int = 1,
    effort: Effort = FULL,
    progress: Progress = silent,
    redis: RedisHealth | None = None,
) -> CellHealth:
    """Builds, resets and steps the environments of one cell and measures it.

    Args:
        environments: those of one cell, at least one.
        table: gives each environment its disturbance.
        profile: the line profile.
        seed: root seed; random numbers are drawn for ``Purpose.HEALTH``.
        threads: worker threads of the pool.
        effort: how much is measured.
        progress: told what is being done.
        redis: health of the Redis that distributes the table, kept with the rest.

    Raises:
        InputError: no environments, or of more than one cell.
    """
    cell = _only_cell(environments)
    stage = f"health of {cell}"
    note = "" if compiled_before() else "; compiling the simulator, once on this machine, takes about half a minute"
    progress(stage, 0, 3, f"building{note}")
    _warm_up(environments[:1], table, profile, seed)
    before = _resident_mb()
    pool, started, failures = _start(environments, table, profile, seed, threads)
    resident = _resident_mb()
    seen, pool_reset, rates = "", np.empty(0), np.empty(0)
    if pool is not None:
        failures += _not_started(pool)
        pool_reset = _time_resets(pool, effort.resets)
        progress(stage, 1, 3, "stepping")
        rates, seen = _time_steps(pool, effort.steps)
        pool.close()
    progress(stage, 2, 3, "resetting one by one")
    reset = _time_single(started, table, profile, seed, effort.samples)
    progress(stage, 3, 3, f"{len(environments)} environments")
    content = {
        "cell": cell,
        "environments": len(environments),
        "environment_ids": digest_bytes(canonical_json([e.environment_id for e in environments])),
        "started": len(environments) - len(failures),
        "steps": effort.steps,
        "seed": seed,
        "observations": seen,
        "cell_digest": table.cell_digests[cell],
        "profile": profile.digest,
        "simulator_version": SIMULATOR_VERSION,
    }
    kept = tuple(failures[:20])
    return CellHealth(cell, content, kept, reset, pool_reset, rates, resident, max(0.0, resident - before), redis)


def _only_cell(environments: Sequence[EnvironmentSpec]) -> str:
    cells = sorted({environment.cell for environment in environments})
    if len(cells) != 1:
        found = ", ".join(cells) or "none"
        raise InputError("environments of one cell wanted", cells=found, remedy="measure one cell at a time")
    return cells[0]


def _build(
    environments: Sequence[EnvironmentSpec], table: DisturbanceTable, profile: LineProfile, seed: int, threads: int
) -> LinePool:
    from agentpipe.environments.pool import build_pool

    return build_pool(environments, table, profile, seed=seed, purpose=Purpose.HEALTH, threads=threads)


def _warm_up(environments: Sequence[EnvironmentSpec], table: DisturbanceTable, profile: LineProfile, seed: int) -> None:
    """Compiles or loads the kernels before anything is measured; a failure here shows again where it counts."""
    with contextlib.suppress(AgentpipeError):
        pool = _build(environments, table, profile, seed, 1)
        pool.step(random_actions(pool))
        pool.close()


def _start(
    environments: Sequence[EnvironmentSpec], table: DisturbanceTable, profile: LineProfile, seed: int, threads: int
) -> tuple[LinePool | None, list[EnvironmentSpec], list[tuple[str, str]]]:
    """The pool of all environments that start, these environments, and why the others do not."""
    try:
        return _build(environments, table, profile, seed, threads), list(environments), []
    except AgentpipeError:
        started, failures = _start_each(environments, table, profile, seed)
        return _build(started, table, profile, seed, threads) if started else None, started, failures


def _start_each(
    environments: Sequence[EnvironmentSpec], table: DisturbanceTable, profile: LineProfile, seed: int
) -> tuple[list[EnvironmentSpec], list[tuple[str, str]]]:
    """Which environments start when built alone, and why the others do not."""
    started: list[EnvironmentSpec] = []
    failures: list[tuple[str, str]] = []
    for environment in environments:
        try:
            _build([environment], table, profile, seed, 1).close()
        except AgentpipeError as error:
            failures.append((environment.environment_id, str(error)))
        else:
            started.append(environment)
    return started, failures


def _not_started(pool: LinePool) -> list[tuple[str, str]]:
    finite = np.isfinite(pool.observation).all(axis=1)
    legal = pool.mask.any(axis=1)
    reasons = [(i, "the first observation is not finite") for i in np.flatnonzero(~finite)]
    reasons += [(i, "no action is legal at the start") for i in np.flatnonzero(finite & ~legal)]
    return [(pool.names[int(i)], reason) for i, reason in reasons]


def _time_resets(pool: LinePool, resets: int) -> Floats:
    times = np.empty(resets)
    for index in range(resets):
        begin = time.perf_counter()
        pool.reset(index)
        times[index] = time.perf_counter() - begin
    return times * 1e3


def _time_steps(pool: LinePool, steps: int) -> tuple[Floats, str]:
    """Environment steps a second of each step from episode 0 on, and a digest of the last observations."""
    pool.reset(0)
    rates = np.empty(steps)
    for index in range(steps):
        actions = random_actions(pool)
        begin = time.perf_counter()
        pool.step(actions)
        rates[index] = pool.size / max(time.perf_counter() - begin, 1e-9)
    return rates, digest_bytes(np.ascontiguousarray(pool.observation).tobytes())


def random_actions(pool: LinePool) -> npt.NDArray[np.int64]:
    """One legal action i64[N] each, uniformly, from the pool's own counter-based random numbers."""
    legal = pool.mask.cumsum(axis=1)
    wanted = (pool.uniforms(_ACTION_CHANNEL) * legal[:, -1]).astype(np.int64) + 1
    actions: npt.NDArray[np.int64] = (legal >= wanted[:, None]).argmax(axis=1).astype(np.int64)
    return actions


def _time_single(
    environments: Sequence[EnvironmentSpec], table: DisturbanceTable, profile: LineProfile, seed: int, samples: int
) -> Floats:
    """Wall time in milliseconds to build and reset environments alone, evenly spread over those given."""
    count = min(samples, len(environments))
    times = np.empty(count)
    for index in range(count):
        environment = environments[index * len(environments) // count]
        begin = time.perf_counter()
        _build([environment], table, profile, seed, 1).close()
        times[index] = time.perf_counter() - begin
    return times * 1e3


def _resident_mb() -> float:
    import psutil

    return float(psutil.Process().memory_info().rss) / 2**20
