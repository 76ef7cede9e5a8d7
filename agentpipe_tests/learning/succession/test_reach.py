"""Which labels move nothing, told without torch, is what the training finds."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentpipe.feedback.labelled import CORRECT, EXECUTION, NEEDS_IMPROVEMENT, PLANNING, WRONG
from agentpipe.learning.options import NetworkOptions
from agentpipe.learning.policy.network import PolicyNetwork
from agentpipe.learning.succession.labels import lessons
from agentpipe.learning.succession.reach import beyond, why_nothing
from agentpipe_tests.learning.succession.labelled import ACTION_SEGMENT, labelled
from agentpipe_tests.learning.tiny import ACTIONS, WIDTH

NETWORK = PolicyNetwork(WIDTH, ACTIONS, NetworkOptions(hidden=(8,), action_embedding=2))
COLUMNS = ("mask", "action", "verdict", "error_type", "confidence")


def alone(made, rows):
    """The mask of ``rows`` allows what was done, and nothing else."""
    mask = made.mask.copy()
    mask[rows] = False
    mask[rows, made.action[rows]] = True
    return dataclasses.replace(made, mask=mask)


@given(st.data(), st.integers(1, 12), st.sampled_from([0.0, 0.25]))
def test_what_moves_nothing_is_what_the_lessons_give_no_weight(data, rows, weak):
    def column(values, dtype):
        return np.array(data.draw(st.lists(st.sampled_from(values), min_size=rows, max_size=rows)), dtype=dtype)

    made = labelled(
        rows,
        verdict=column([CORRECT, WRONG, NEEDS_IMPROVEMENT], np.int8),
        error_type=column([-1, PLANNING, EXECUTION], np.int8),
        confidence=column([0.0, 0.5, 1.0], np.float32),
    )
    made = alone(made, np.flatnonzero(column([False, True], np.bool_)))
    taught = lessons(made, np.arange(rows), NETWORK, weak_negative=weak, action_segment=ACTION_SEGMENT)
    found = beyond(**{name: getattr(made, name) for name in COLUMNS}, weak_negative=weak, action_segment=ACTION_SEGMENT)
    assert (found.any == (taught.weight == 0).numpy()).all()
    assert bool(why_nothing(made, weak, ACTION_SEGMENT)) == (len(taught.useful()) == 0)


def test_each_label_is_counted_once_in_the_reason():
    made = labelled(4, verdict=np.full(4, WRONG, np.int8), error_type=np.full(4, EXECUTION, np.int8))
    made = dataclasses.replace(made, action=np.zeros(4, np.int64), mask=np.ones((4, ACTIONS), np.bool_))
    told = "an execution error of an action outside the execute segment"
    assert why_nothing(made, 0.25, ACTION_SEGMENT) == f"none of 4 new labels can teach anything: 4 {told}"
    one_way = "of a decision whose mask allows no other action"
    assert why_nothing(alone(made, [0]), 0.25, ACTION_SEGMENT).endswith(f": 1 {one_way}, 3 {told}")


@pytest.mark.parametrize("rows", [0, 3])
def test_where_one_can_teach_or_there_is_none_nothing_is_said(rows):
    assert why_nothing(labelled(rows), 0.25, ACTION_SEGMENT) == ""
