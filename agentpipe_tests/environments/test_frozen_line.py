"""The line is frozen under a version number: an unnoticed change of a kernel, of data or of the profile fails here."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from agentpipe.environments.layout import MODES, OBSERVATION_NAMES, REASONS, SIMULATOR_VERSION
from agentpipe.environments.players import RandomPlayer
from agentpipe_tests.environments.line import make_pool

GOLDEN = {
    "1.0.0": {
        "digest": "e4d4a7e86d27168b7dcc6322a8748be7ded2e6926c332c9cfb9350d190dfeca1",
        "reasons": [116, 434, 3, 164, 100, 2873, 26, 0, 2, 0],
        "blocks": {
            "reading": 1261264.1,
            "mean": 1021162.3,
            "age": 241314.51,
            "count": 575048.78,
            "present": 285000.0,
            "topology": 36750.0,
            "link": 71973.148,
            "plc": 3430.9631,
            "segment": 36750.0,
            "declared_machine": 25785.0,
            "declared_mode": 17983.0,
            "severity": 12573.0,
            "depth": 9356.0,
            "stock": 31607.0,
            "lead": 64427.804,
            "travel": 24078.059,
            "skilled": 26912.0,
            "depot": 5119.0,
            "technician": 5434.0,
            "order": 17774.0,
            "tried": 1990.0,
            "clock": 239288.16,
        },
        "names": {"environment": "t0234.sensor-1", "mode": "p2", "machine": 1},
        "numbers": [
            0.4662073,
            368.6716,
            -0.1952299,
            0.7476199,
            0.6967077,
            -0.2605013,
            0.1873764,
            -0.02141897,
            2.854742,
        ],
    }
}


def play():
    """150 steps of random play of the validation environments: digest of what is discrete, outcomes, sums of floats."""
    pool, player = make_pool(seed=1), RandomPlayer()
    digest, sums, reasons = hashlib.sha256(), np.zeros(len(OBSERVATION_NAMES)), np.zeros(len(REASONS), int)
    for _ in range(150):
        actions = player.act(pool).actions
        digest.update(actions.tobytes() + pool.mask.tobytes() + pool.segment.tobytes())
        sums += np.abs(pool.observation.astype(np.float64)).sum(axis=0)
        pool.step(actions)
        done = pool.terminated | pool.truncated
        reasons += np.bincount(pool.result_reason[done], minlength=len(REASONS))
        digest.update(np.where(done, pool.result_mode, -1).tobytes())
    blocks: dict[str, float] = {}
    for name, value in zip(OBSERVATION_NAMES, sums, strict=True):
        block = name.partition(".")[0]
        blocks[block] = blocks.get(block, 0.0) + float(value)
    return digest.hexdigest(), reasons.tolist(), blocks


def transition():
    """Machine 0 is measured in the first validation environment, all disturbances on."""
    pool = make_pool(seed=1)
    pool.step(np.zeros(pool.size, np.int64))
    hidden, plant = pool.hidden(), pool.plant()
    names = {"environment": pool.names[0], "mode": MODES[hidden.mode[0]], "machine": int(hidden.machine[0])}
    numbers = [hidden.severity[0], plant.deadline[0], *pool.observation[0, :5], pool.reward[0], plant.elapsed[0]]
    return names, [float(number) for number in numbers]


def test_the_frozen_line_is_unchanged():
    """A difference here means that the line changed: a new SIMULATOR_VERSION and new figures for every player.

    What is discrete is compared exactly; floats by sums, to within what another mathematical library may round.
    """
    golden = GOLDEN[SIMULATOR_VERSION]
    digest, reasons, blocks = play()
    assert reasons == golden["reasons"]
    assert digest == golden["digest"]
    assert blocks == pytest.approx(golden["blocks"], rel=1e-5)


def test_one_transition_to_the_letter():
    names, numbers = transition()
    assert names == GOLDEN[SIMULATOR_VERSION]["names"]
    assert numbers == pytest.approx(GOLDEN[SIMULATOR_VERSION]["numbers"], rel=1e-4, abs=1e-5)
