"""Rows a second of the drift figures: KL of a million rows of 32 probabilities, and inputs of 100,000 rows.

``python -m benchmarks.drift`` measures, in turns: KL by row as agentpipe computes it (in blocks, smoothed, masked);
the same from :func:`scipy.special.rel_entr` and from one numpy expression over the whole arrays; and the whole
``policy_drift`` with its checks of both policies' probabilities and its bootstrap intervals overall, by 15 cells and by
4 segments over 7,000 environments. Then, apart, ``input_drift`` of 100,000 rows of 127 features against as many.
"""

from __future__ import annotations

import time
import tracemalloc
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.measure import Contestant, take_turns
from benchmarks.worker import Found, main

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

ROWS, ACTIONS, ENVIRONMENTS = 1_000_000, 32, 7_000
INPUT_ROWS, FEATURES = 100_000, 127
KL, SCIPY, NUMPY = "agentpipe, KL by row", "scipy rel_entr, whole arrays", "numpy, whole arrays"
WHOLE, INPUTS = "agentpipe, policy_drift with 20 intervals", "agentpipe, input_drift"
SMOOTHING = 1e-6


def probabilities(rows: int, seed: int, mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.float32]:
    """f32[rows, A], zero where the mask is False."""
    drawn: npt.NDArray[np.float32] = np.random.default_rng(seed).random((rows, mask.shape[1]), dtype=np.float32)
    drawn *= mask
    drawn /= drawn.sum(axis=1, keepdims=True)
    return drawn


class Fixed:
    """A policy that always says ``probabilities`` f32[n, A]."""

    def __init__(self, probabilities: npt.NDArray[np.float32]) -> None:
        self.output = SimpleNamespace(probabilities=probabilities)

    def act(self, *_: object) -> SimpleNamespace:
        """The same for any observations."""
        return self.output


def timed(work: Callable[[], object]) -> float:
    """Seconds of one call."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def memory(work: Callable[[], object]) -> str:
    """Most memory that numpy held at once beyond what was there before."""
    tracemalloc.start()
    work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return f"{peak / 1e6:,.0f} MB"


def policy_contestants(rows: int) -> list[Contestant]:
    """All that compare two policies on the same ``rows``."""
    from scipy.special import rel_entr

    from agentpipe.evaluation.drift import policy_drift
    from agentpipe.evaluation.drift_rows import smoothed_kl
    from agentpipe.evaluation.reference import ReferenceObservations

    generator = np.random.default_rng(0)
    mask = generator.random((rows, ACTIONS)) < 0.7
    mask[:, 0] = True
    p, q = probabilities(rows, 1, mask), probabilities(rows, 2, mask)
    environment = generator.integers(0, ENVIRONMENTS, rows)
    cells = np.array([f"{kind}-{n}" for kind in ("sensor", "network", "load") for n in range(1, 6)])
    reference = ReferenceObservations(
        observation=np.zeros((rows, 1), np.float32),
        last_action=np.zeros(rows, np.int64),
        time=np.zeros(rows, np.float32),
        mask=mask,
        segment=generator.integers(0, 4, rows).astype(np.int8),
        cell=cells[environment % len(cells)],
        environment=environment,
    )
    candidate, champion = Fixed(p), Fixed(q)

    def smoothed() -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        floor = SMOOTHING / mask.sum(axis=1, keepdims=True) * mask
        return (1 - SMOOTHING) * p.astype(np.float64) + floor, (1 - SMOOTHING) * q.astype(np.float64) + floor

    def with_numpy() -> npt.NDArray[np.float64]:
        first, second = smoothed()
        result: npt.NDArray[np.float64] = np.sum(
            first * np.log(np.where(mask, first, 1.0) / np.where(mask, second, 1.0)), axis=1
        )
        return result

    works: dict[str, Callable[[], object]] = {
        KL: lambda: smoothed_kl(p, q, mask, SMOOTHING),
        SCIPY: lambda: rel_entr(*smoothed()).sum(axis=1),
        NUMPY: with_numpy,
        WHOLE: lambda: policy_drift(candidate, champion, reference),
    }
    values = smoothed_kl(p, q, mask, SMOOTHING)
    np.testing.assert_allclose(rel_entr(*smoothed()).sum(axis=1), values, rtol=1e-9)
    np.testing.assert_allclose(with_numpy(), values, rtol=1e-9)
    return [contestant(name, work, rows) for name, work in works.items()]


def contestant(name: str, work: Callable[[], object], rows: int) -> Contestant:
    """``work`` on ``rows``, with the memory that one more call of it takes."""
    return Contestant(name, rows, lambda: timed(work), rows, lambda: {"memory": memory(work)})


def input_contestant(rows: int, features: int) -> Contestant:
    """Two samples of one distribution."""
    from agentpipe.evaluation.input_drift import input_drift

    first, second = (np.random.default_rng(seed).normal(size=(rows, features)).astype(np.float32) for seed in (1, 2))
    names = [f"feature {index}" for index in range(features)]
    return contestant(INPUTS, lambda: input_drift(first, second, names, seed=0), rows)


def body(cores: int, smoke: bool) -> Found:  # noqa: FBT001 - called by the worker
    """Measures on as many threads as there are cores."""
    rows, inputs, repeats = (20_000, 2_000, 1) if smoke else (ROWS, INPUT_ROWS, 5)
    found = Found()
    found.figures += take_turns(policy_contestants(rows), cores, repeats)
    found.figures += take_turns([input_contestant(inputs, FEATURES)], cores, min(repeats, 3))
    return found


def section(content: dict[str, Any]) -> str:
    """Seconds and memory of each, for the page of results."""
    rows = ["| | rows | cores | seconds (fastest – slowest) | memory |", "|---|---:|---:|---|---:|"]
    for figure in content["figures"]:
        seconds = [figure["steps"] / figure[key] for key in ("median", "best", "worst")]
        cells = f"{figure['steps']:,} | {figure['cores']} | {seconds[0]:.3g} ({seconds[1]:.3g} – {seconds[2]:.3g})"
        rows.append(f"| {figure['name']} | {cells} | {figure['notes']['memory']} |")
    text = (
        f"Rows of {ACTIONS} probabilities, seven in ten of them allowed; inputs of {FEATURES} features, as many rows "
        "again to compare with. Median of the turns; memory is what numpy held at most beyond its inputs."
    )
    return f"{text}\n\n" + "\n".join(rows)


if __name__ == "__main__":
    main("drift", body)
