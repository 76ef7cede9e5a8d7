"""The physical line: a route graph that is a metric, people who can do everything, couplings of each topology."""

from __future__ import annotations

import numpy as np
import pytest

from agentpipe.environments.geometry import NODES, downstream_matrices, line_geometry
from agentpipe.environments.layout import MACHINES, SKILLS, TOPOLOGIES
from agentpipe_tests.environments.line import catalog

LINES = sorted({(t.line_id, t.topology, t.machines) for t in catalog().templates})


@pytest.fixture(scope="module")
def geometries():
    return {line: line_geometry(*line) for line in LINES}


def test_every_surveyed_line_has_its_own_geometry(geometries):
    assert len(LINES) == 127
    assert len({geometry.route.tobytes() for geometry in geometries.values()}) == 127


def test_equal_ids_give_equal_lines():
    first, second = line_geometry("L001", "serial", 8), line_geometry("L001", "serial", 8)
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    assert not np.array_equal(first.route, line_geometry("L002", "serial", 8).route)


def test_routes_are_shortest_ways(geometries):
    """Symmetric, zero to itself, and no detour is shorter."""
    for geometry in geometries.values():
        route = geometry.route.astype(np.float64)
        assert route.shape == (NODES, NODES) == (11, 11)
        assert np.array_equal(route, route.T)
        assert (np.diag(route) == 0).all()
        assert (route[~np.eye(NODES, dtype=bool)] > 5).all()
        detour = route[:, :, None] + route[None]
        assert (route[:, None] <= detour.transpose(0, 1, 2) + 1e-4).all()


def test_walks_take_as_long_as_the_bounds_of_the_observation_assume(geometries):
    for geometry in geometries.values():
        assert geometry.route[:MACHINES, :MACHINES].max() <= 140
        assert geometry.route[MACHINES:, :MACHINES].max() <= 170


def test_every_skill_is_there_twice(geometries):
    for geometry in geometries.values():
        skills = (geometry.skills[:, None] >> np.arange(SKILLS)) & 1
        assert (skills.sum(axis=0) == 2).all()
        assert (skills.sum(axis=1) == 2).all()


def test_gains_are_near_one(geometries):
    gains = np.stack([geometry.gain for geometry in geometries.values()])
    assert gains.min() >= 0.85
    assert gains.max() < 1.15
    assert gains.mean() == pytest.approx(1.0, abs=0.01)


def test_downstream_weights_of_each_topology():
    """1 over the root of the number of machines fed, and nothing feeds itself."""
    weights = dict(zip(TOPOLOGIES, downstream_matrices(), strict=True))
    assert np.array_equal(weights["serial"], np.eye(8, k=1, dtype=np.float32))
    assert weights["parallel"][0].tolist() == pytest.approx([0] + [5**-0.5] * 5 + [0, 0])
    assert weights["parallel"][:, 6].tolist() == pytest.approx([0, 1, 1, 1, 1, 1, 0, 0])
    assert weights["fork_join"][0, [1, 2]].tolist() == pytest.approx([2**-0.5] * 2)
    assert weights["re_entrant"][5, [2, 6]].tolist() == pytest.approx([2**-0.5] * 2)
    assert weights["ring"][6, [0, 7]].tolist() == pytest.approx([2**-0.5] * 2)
    assert weights["tree"][[1, 2, 3]].sum(axis=1).tolist() == pytest.approx([2**0.5, 2**0.5, 1.0])
    for matrix in weights.values():
        assert (np.diag(matrix) == 0).all()
        assert ((matrix > 0).sum(axis=0) + (matrix > 0).sum(axis=1) > 0).all()  # no machine stands alone


def test_a_seven_machine_line_is_still_connected():
    line = next(line for line in LINES if line[2] == 7)
    assert np.isfinite(line_geometry(*line).route).all()
