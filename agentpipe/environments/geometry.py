"""The physical line: how machines feed one another, where depots and technicians stand, what they can do.

All of it is fixed for one surveyed line (drawn from the line's id) and public: the plant knows its own floor plan.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from agentpipe.environments.layout import (
    CHANNELS,
    DEPOTS,
    MACHINES,
    SKILLS,
    TECHNICIANS,
    TOPOLOGIES,
)
from agentpipe.environments.rng import stable_hash

Float32 = npt.NDArray[np.float32]
NODES: Final = MACHINES + DEPOTS

# Edges "feeds" among eight machines; with seven machines the last one is left out.
_FEEDS: Final[dict[str, tuple[tuple[int, int], ...]]] = {
    "serial": tuple((i, i + 1) for i in range(7)),
    "parallel": (*((0, i) for i in range(1, 6)), *((i, 6) for i in range(1, 6)), (6, 7)),
    "fork_join": ((0, 1), (0, 2), (1, 3), (2, 4), (3, 5), (4, 5), (5, 6), (6, 7)),
    "re_entrant": (*((i, i + 1) for i in range(7)), (5, 2)),
    "ring": (*((i, i + 1) for i in range(6)), (6, 7), (6, 0), (7, 0)),
    "tree": ((0, 1), (0, 2), (1, 3), (1, 4), (2, 5), (2, 6), (3, 7)),
}


def downstream_matrices() -> Float32:
    """Coupling weights ``[topology, from, to]``: 1 over the root of the number of machines that one machine feeds."""
    weights = np.zeros((len(TOPOLOGIES), MACHINES, MACHINES), dtype=np.float32)
    for index, topology in enumerate(TOPOLOGIES):
        for source, target in _FEEDS[topology]:
            weights[index, source, target] = 1.0
    fan_out = weights.sum(axis=2, keepdims=True)
    return weights / np.sqrt(np.maximum(fan_out, 1.0))


class LineGeometry(NamedTuple):
    """What is fixed for one surveyed line. Times in seconds."""

    route: Float32
    """``[NODES, NODES]`` walking time between machines (0 … 7) and depots (8 … 10), shortest over the route graph."""
    gain: Float32
    """``[MACHINES, CHANNELS]`` response of each channel to a fault of its machine, near 1."""
    skills: npt.NDArray[np.uint8]
    """``[TECHNICIANS]`` bit set of the skills each technician has; every skill is present at least twice."""


def line_geometry(line_id: str, topology: str, machines: int) -> LineGeometry:
    """The geometry of the line ``line_id``: equal ids give equal lines, on any machine."""
    generator = np.random.Generator(np.random.Philox(key=int(stable_hash(f"line:{line_id}"))))
    return LineGeometry(
        route=_routes(generator, topology, machines),
        gain=generator.uniform(0.85, 1.15, (MACHINES, CHANNELS)).astype(np.float32),
        skills=_skills(generator),
    )


def _routes(generator: np.random.Generator, topology: str, machines: int) -> Float32:
    time = np.full((NODES, NODES), np.inf)
    np.fill_diagonal(time, 0.0)
    for source, target in _FEEDS[topology]:
        _connect(time, source, target, generator.uniform(6.0, 14.0))
    for machine in range(machines - 1):  # the aisle along the line
        _connect(time, machine, machine + 1, generator.uniform(10.0, 20.0))
    if machines < MACHINES:
        _connect(time, machines - 1, MACHINES - 1, 15.0)
    for depot in range(DEPOTS):
        for machine in generator.choice(machines, size=2, replace=False):
            _connect(time, MACHINES + depot, int(machine), generator.uniform(15.0, 30.0))
    for via in range(NODES):  # Floyd and Warshall
        np.minimum(time, time[:, via, None] + time[None, via, :], out=time)
    return time.astype(np.float32)


def _connect(time: npt.NDArray[np.float64], a: int, b: int, seconds: float) -> None:
    time[a, b] = time[b, a] = min(time[a, b], seconds)


def _skills(generator: np.random.Generator) -> npt.NDArray[np.uint8]:
    order = generator.permutation(SKILLS)
    masks = [(1 << int(order[t % SKILLS])) | (1 << int(order[(t + 1) % SKILLS])) for t in range(TECHNICIANS)]
    return np.array(masks, dtype=np.uint8)
