import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentpipe.experience.sampling.tree import SumTree, level_offsets

from .naive import step_at


@pytest.mark.parametrize(
    ("size", "offsets"),
    [(1, [0, 16]), (16, [0, 16]), (17, [0, 32, 48]), (256, [0, 256, 272]), (257, [0, 272, 304, 320])],
)
def test_levels_are_padded_to_whole_nodes(size, offsets):
    assert level_offsets(size).tolist() == offsets


whole = st.integers(0, 1_000).map(float)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 600))
def test_the_tree_finds_what_cumulated_sums_find_after_any_updates(data, size):
    """Whole numbers: every sum is exact in any order."""
    priorities = np.array(data.draw(st.lists(whole, min_size=size, max_size=size)))
    tree = SumTree(size)
    tree.fill(priorities)
    for _ in range(data.draw(st.integers(0, 3))):
        ids = data.draw(st.lists(st.integers(0, size - 1), max_size=40))
        values = np.array(data.draw(st.lists(whole, min_size=len(ids), max_size=len(ids))))
        tree.update(np.array(ids, np.int64), values)
        for step, value in zip(ids, values, strict=True):
            priorities[step] = value
    assert tree.stored.tolist() == priorities.tolist()
    assert tree.total == priorities.sum()
    if tree.total:
        points = np.array(data.draw(st.lists(st.floats(0, tree.total, exclude_max=True), min_size=1, max_size=50)))
        assert tree.find(points).tolist() == [step_at(priorities, point) for point in points]


def test_a_point_that_rounding_puts_behind_the_end_falls_to_the_last_step_above_zero():
    tree = SumTree(40)
    tree.fill([0.1] * 20 + [0.0] * 20)
    assert tree.find(np.array([tree.total * 2])).tolist() == [19]


def test_sums_do_not_drift():
    """A million changes between huge and tiny leave exactly what a new tree has."""
    random = np.random.default_rng(0)
    tree = SumTree(1_000)
    for _ in range(1_000):
        ids = random.integers(0, 1_000, 1_000)
        tree.update(ids, 10.0 ** random.uniform(-12, 12, 1_000))
    fresh = SumTree(1_000)
    fresh.fill(tree.stored)
    assert tree.sums.tolist() == fresh.sums.tolist()


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=300).filter(any), st.lists(st.floats(0, 1), min_size=1))
def test_no_rounding_leads_to_a_step_of_priority_zero_or_far_from_its_point(priorities, shares):
    tree = SumTree(len(priorities))
    tree.fill(priorities)
    points = np.array(shares) * tree.total
    cumulated = np.concatenate([[0.0], np.cumsum(priorities)])
    for step, point in zip(tree.find(points), points, strict=True):
        assert priorities[step] > 0
        assert cumulated[step] - 1e-9 * tree.total <= point <= cumulated[step + 1] + 1e-9 * tree.total
