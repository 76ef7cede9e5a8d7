"""What is said to be true of a fault is what the simulator acts by."""

import numpy as np

from agentpipe.environments.demonstrator import DemonstratorPlayer
from agentpipe.environments.layout import FALSE_ALARM, PHYSICAL_MODES
from agentpipe.environments.players import OraclePlayer
from agentpipe.environments.truth import TRUTH_SIZES, has_truth, truth
from agentpipe_tests.environments.line import make_pool


def test_truth_is_that_of_the_hidden_state_and_of_the_expert():
    """Against the demonstrator's answers while it identifies, and by definition once a line is repaired."""
    pool, player, expert = make_pool(), OraclePlayer(), DemonstratorPlayer()
    seen = np.zeros(3, np.int64)
    for _ in range(12):
        found, hidden = truth(pool), pool.hidden()
        assert found.shape == (pool.size, 3)
        assert found.dtype == np.int8
        assert (found < np.array(TRUTH_SIZES)).all()
        asked = pool.segment == 0
        answers = expert.answers(pool)
        offset = np.array([8, 16, 26])
        assert np.array_equal(np.where(answers < 0, -1, answers - offset)[asked], found[asked])
        assert (found[hidden.mode == FALSE_ALARM, 0] == -1).all()
        assert np.array_equal(found[:, 1], hidden.mode)
        healthy = (hidden.repaired == 1) | (hidden.mode >= PHYSICAL_MODES)
        assert np.array_equal(found[:, 2] == -1, healthy)
        seen += (found == -1).sum(axis=0) > 0
        pool.step(player.act(pool).actions)
    assert seen[0]
    assert not seen[1]
    assert seen[2]


def test_environments_of_ones_own_have_no_truth():
    assert has_truth(make_pool())
    assert not has_truth(object())
