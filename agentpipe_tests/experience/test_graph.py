"""The graph, held against plain sets."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentpipe.errors import RecordError
from agentpipe.experience import graph
from agentpipe.experience.store.records import graph_words

LONG = (1, 2, 63, 64, 65, 128, 129, 200)


def rows(words, lengths):
    """Parents of every step of every episode, as sets, read bit by bit."""
    found, first = [], 0
    for steps in lengths:
        width = -(-steps // 64)
        own = words[first : first + steps * width].reshape(steps, width).tolist()
        found.append([{64 * w + b for w in range(width) for b in range(64) if row[w] >> b & 1} for row in own])
        first += steps * width
    assert first == len(words)
    return found


def naive_parents(produced, used, accumulating):
    makers, parents = {token: [] for token in range(32)}, []
    for step, (made, needed) in enumerate(zip(produced, used, strict=True)):
        mine = set()
        for token in range(32):
            if needed >> token & 1:
                mine |= set(makers[token] if accumulating >> token & 1 else makers[token][-1:])
        parents.append(mine)
        for token in range(32):
            if made >> token & 1:
                makers[token].append(step)
    return parents


def naive_dependents(parents):
    """By following every path forward, again and again."""
    children = [{child for child, mine in enumerate(parents) if step in mine} for step in range(len(parents))]
    reached = []
    for step in range(len(parents)):
        seen, frontier = set(), set(children[step])
        while frontier:
            seen |= frontier
            frontier = set().union(*(children[step] for step in frontier)) - seen
        reached.append(seen)
    return reached


@st.composite
def token_episodes(draw):
    lengths = draw(st.lists(st.one_of(st.integers(1, 12), st.sampled_from(LONG)), min_size=1, max_size=4))
    seed = draw(st.integers(0, 2**32 - 1))
    density = draw(st.sampled_from([0.02, 0.1, 0.4]))
    random = np.random.default_rng(seed)
    bits = random.random((2, sum(lengths), 32)) < density
    tokens = (bits * (1 << np.arange(32, dtype=np.uint64))).sum(axis=2).astype(np.uint32)
    return lengths, tokens[0], tokens[1], draw(st.integers(0, 2**32 - 1))


@given(token_episodes())
@settings(max_examples=60, deadline=None)
def test_a_step_depends_on_the_newest_maker_of_what_it_used_or_on_all_of_them(drawn):
    lengths, produced, used, accumulating = drawn
    words = graph.derive_parents(produced, used, np.array(lengths), accumulating)
    ends = np.cumsum(lengths)
    for steps, end, found in zip(lengths, ends, rows(words, lengths), strict=True):
        own = slice(end - steps, end)
        assert found == naive_parents(produced[own].tolist(), used[own].tolist(), accumulating)


def test_tokens_to_the_letter():
    """Step 2 needs what 0 and 1 made of token 0; only token 0 accumulates; 3 makes and needs the same token."""
    produced = np.array([0b01, 0b11, 0b10, 0b10], np.uint32)
    used = np.array([0b01, 0b00, 0b11, 0b10], np.uint32)
    words = graph.derive_parents(produced, used, np.array([4]), accumulating=0b01)
    assert words.tolist() == [0, 0, 0b011, 0b100]
    assert graph.derive_parents(produced, used, np.array([4]), accumulating=0).tolist() == [0, 0, 0b010, 0b100]
    again = graph.derive_parents(np.tile(produced, 2), np.tile(used, 2), np.array([4, 4]), 0b01)
    assert again.tolist() == [0, 0, 0b011, 0b100] * 2  # nothing is carried over into the next episode


@st.composite
def edge_sets(draw):
    lengths = draw(st.lists(st.one_of(st.integers(1, 10), st.sampled_from(LONG)), min_size=1, max_size=4))
    seed, density = draw(st.integers(0, 2**32 - 1)), draw(st.sampled_from([0.01, 0.1, 0.5]))
    random = np.random.default_rng(seed)
    pairs = [
        (episode, int(parent), int(child))
        for episode, steps in enumerate(lengths)
        for parent, child in np.argwhere(np.triu(random.random((steps, steps)) < density, 1))
    ]
    random.shuffle(pairs)
    rewards = (random.normal(size=sum(lengths)) * draw(st.sampled_from([1.0, 1e-3, 1e4]))).astype(np.float32)
    return lengths, pairs, rewards + draw(st.sampled_from([np.float32(0), np.float32(1e4)]))


@given(edge_sets())
@settings(max_examples=60, deadline=None)
def test_pairs_closure_dependents_and_variance_are_those_of_plain_sets(drawn):
    lengths, pairs, rewards = drawn
    words = graph.parents_from_pairs(np.array(lengths), np.array(pairs * 2).reshape(-1, 3))
    dependents, influences = graph.influence(words, np.array(lengths), rewards)
    first = 0
    for episode, found in enumerate(rows(words, lengths)):
        expected = [set() for _ in range(lengths[episode])]
        for row, parent, child in pairs:
            if row == episode:
                expected[child].add(parent)
        assert found == expected
        for step, reached in enumerate(naive_dependents(expected)):
            assert dependents[first + step] == len(reached)
            values = rewards[[first + other for other in sorted(reached)]].astype(np.float64)
            wanted = len(reached) * float(values.var()) if reached else 0.0
            rounding = 1e-12 * float(np.abs(rewards).max()) ** 2
            assert influences[first + step] == pytest.approx(wanted, rel=1e-6, abs=rounding)
        first += lengths[episode]


def test_influence_to_the_letter():
    """0 -> 1 -> 3, 0 -> 2: three depend on 0 with rewards 1, 2, 6 (variance 14/3); one on 1; none on 2 and 3."""
    words = graph.parents_from_pairs(np.array([4]), np.array([(0, 0, 1), (0, 1, 3), (0, 0, 2)]))
    dependents, influences = graph.influence(words, np.array([4]), np.array([9, 1, 2, 6], np.float32))
    assert dependents.tolist() == [3, 1, 0, 0]
    assert influences.tolist() == [14.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("steps", [*LONG, 4096])
def test_in_a_chain_of_any_length_all_later_steps_depend_on_a_step(steps):
    words = graph.temporal_parents(np.array([steps]))
    assert len(words) == graph_words(steps) == graph.words_of(np.array([steps])).sum()
    assert graph.edges(words.reshape(steps, -1)) == [(step - 1, step) for step in range(1, steps)]
    rewards = np.arange(steps, dtype=np.float32)
    dependents, influences = graph.influence(words, np.array([steps]), rewards)
    later = np.arange(steps - 1, -1, -1)
    assert dependents.tolist() == later.tolist()
    np.testing.assert_allclose(influences, np.maximum(later * (later**2.0 - 1) / 12, 0), rtol=1e-5)


def test_a_spike_without_a_parent_is_unexplained_and_one_with_a_parent_is_not():
    lengths = np.array([3, 70])
    words = graph.parents_from_pairs(lengths, np.array([(0, 0, 1), (1, 66, 69)]))
    rewards = np.zeros(73, np.float32)
    rewards[[0, 1, 2, 3 + 68, 3 + 69]] = [4.0, -4.0, -3.99, -4.0, 4.0]
    spikes = graph.unexplained_spikes(words, lengths, rewards, 4.0)
    assert np.flatnonzero(spikes).tolist() == [0, 3 + 68]


def test_direct_neighbours_both_ways():
    words = graph.parents_from_pairs(np.array([66]), np.array([(0, 0, 65), (0, 64, 65), (0, 0, 2)]))
    above, below = graph.neighbours(words.reshape(66, 2))
    assert (above[65], above[2], above[0]) == ([0, 64], [0], [])
    assert (below[0], below[64], below[65]) == ([2, 65], [65], [])


@pytest.mark.parametrize(
    ("pair", "text"),
    [
        ((0, 1, 1), "edge 1 -> 1"),
        ((0, 2, 1), "edge 2 -> 1"),
        ((0, -1, 1), "edge -1 -> 1"),
        ((0, 1, 3), "edge 1 -> 3"),
        ((1, 0, 2), "edge 0 -> 2"),
        ((2, 0, 1), "edge 0 -> 1"),
        ((-1, 0, 1), "edge 0 -> 1"),
    ],
)
def test_an_edge_that_does_not_go_forward_within_its_episode_is_refused(pair, text):
    with pytest.raises(RecordError, match=text) as caught:
        graph.parents_from_pairs(np.array([3, 2]), np.array([(0, 0, 1), pair]))
    assert caught.value.where == {"episode": pair[0], "record": 1}


def test_nothing_at_all_is_a_graph_too():
    none = np.zeros(0, np.int64)
    assert graph.temporal_parents(none).shape == (0,)
    assert graph.parents_from_pairs(none, np.zeros((0, 3))).shape == (0,)
    assert graph.derive_parents(none, none, none, 0).shape == (0,)
    dependents, influences = graph.influence(np.zeros(0, np.uint64), none, np.zeros(0, np.float32))
    assert (len(dependents), len(influences)) == (0, 0)
    with pytest.raises(RecordError):
        graph.parents_from_pairs(none, np.array([(0, 0, 1)]))


@given(edge_sets(), st.data())
@settings(max_examples=40, deadline=None)
def test_a_bit_for_the_step_itself_or_a_later_one_is_found_wherever_it_is(drawn, data):
    lengths, pairs, rewards = drawn
    words = graph.parents_from_pairs(np.array(lengths), np.array(pairs).reshape(-1, 3))
    graph.require_forward(words, np.array(lengths))
    episode = data.draw(st.integers(0, len(lengths) - 1))
    step = data.draw(st.integers(0, lengths[episode] - 1))
    width = -(-lengths[episode] // 64)
    bit = data.draw(st.integers(step, 64 * width - 1))
    before = sum(graph_words(steps) for steps in lengths[:episode])
    words[before + step * width + bit // 64] |= np.uint64(1 << bit % 64)
    with pytest.raises(RecordError) as caught:
        graph.require_forward(words, np.array(lengths))
    assert caught.value.where == {"episode": episode, "step": step}
    graph.influence(words, np.array(lengths), rewards)  # stays within its arrays all the same
    with pytest.raises(RecordError, match="words instead of"):
        graph.require_forward(words[1:], np.array(lengths))
