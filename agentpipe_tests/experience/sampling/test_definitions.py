import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentpipe.experience.sampling.definitions import (
    idle_steps,
    key_fault_episodes,
    most_influential,
    strictly_idle_steps,
)
from agentpipe.experience.store import records as rec


def episodes(modes, success=1, cut=0):
    made = np.zeros(len(modes), rec.EPISODE)
    made["mode"], made["success"], made["cut"] = modes, success, cut
    return made


@pytest.mark.parametrize(
    ("modes", "key"),
    [
        ([3, 3, 1, 1, 1, 0, 0, 2, 2], {0}),  # 4 modes, one is rare: of 0, 2 and 3 the lowest number
        ([5, 5, 5, 1, 1], {1}),  # 2 modes: a quarter is one, rounded up
        ([4, 4], {4}),
        ([0, 1, 1, 2, 2, 3, 3, 4, 4], {0, 1}),  # 5 modes: two are rare
        ([-1, -1, -1], set()),
        ([], set()),
    ],
)
def test_the_rarest_quarter_of_the_modes_is_key(modes, key):
    assert key_fault_episodes(episodes(modes)).tolist() == [mode in key for mode in modes]


def test_a_failed_episode_is_key_and_a_cut_one_is_not():
    made = episodes([0, 1, 1, 1], success=[1, 1, 0, 0], cut=[0, 0, 0, 1])
    assert key_fault_episodes(made).tolist() == [True, False, True, False]


def test_idle_is_what_nothing_depends_on_and_what_earned_nothing():
    dependents, earned = np.array([0, 0, 1, 1], np.uint32), np.array([0, 1, 0, 1], np.uint8)
    assert idle_steps(dependents, earned).tolist() == [True, False, False, False]
    rewards = np.array([0, -0.1, 0, 1], np.float32)
    assert strictly_idle_steps(dependents, rewards).tolist() == [True, False, False, False]


@settings(deadline=None)
@given(st.lists(st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.5]), max_size=30), max_size=5))
def test_the_ten_most_influential_nodes_of_each_episode(values):
    expected = []
    for episode in values:
        order = sorted(range(len(episode)), key=lambda step: (-episode[step], step))
        top = {step for step in order[:10] if episode[step] > 0}
        expected += [step in top for step in range(len(episode))]
    flat = np.array([value for episode in values for value in episode], np.float32)
    assert most_influential(flat, np.array([len(episode) for episode in values], np.int64)).tolist() == expected
