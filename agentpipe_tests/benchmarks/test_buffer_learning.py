"""The comparison of samplers in training: its table, from rows written by hand, and one tiny run."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks import buffer_learning
from benchmarks.buffer_learning import SMOKE, chosen_at_random, compare, section


def row(seed, sampler, steps):
    return {"seed": seed, "sampler": sampler, "start": 0.81, "steps": steps, "best": 0.86}


def content(rows):
    return {"sizes": dataclasses.asdict(SMOKE), "rows": rows, "seeds": 2}


def test_differences_are_paired_by_seed():
    """Differences -1 M and -2 M: mean -1.5 M, and with one degree of freedom 12.7 standard errors of 0.5 M."""
    rows = [row(0, "none", 3e6), row(1, "none", 4e6), row(0, "causal", 2e6), row(1, "causal", 2e6)]
    written = section(content(rows))
    assert "| none | 3.00 M, 4.00 M | 3.50 M | – | 81.0%, 81.0% |" in written
    assert "| causal | 2.00 M, 2.00 M | 2.00 M | -1.50 M [-7.85, +4.85] | 81.0%, 81.0% |" in written


def test_a_target_that_was_not_reached_has_no_mean():
    rows = [row(0, "none", 3e6), row(1, "none", 4e6), row(0, "causal", None), row(1, "causal", 2e6)]
    assert "| causal | not reached, 2.00 M | – | – | 81.0%, 81.0% |" in section(content(rows))


def test_environments_are_drawn_from_all_cells():
    environments = list(range(7_000))
    found = chosen_at_random(environments, 1_400, seed=0)
    assert found == sorted(set(found))
    assert len(found) == 1_400
    assert {one % 15 for one in found} == set(range(15))
    assert found != chosen_at_random(environments, 1_400, seed=1)


@pytest.mark.slow
def test_every_contestant_starts_from_the_same_weights(tmp_path):
    rows = compare(0, SMOKE, 1, tmp_path, lambda _: None)
    assert [one["sampler"] for one in rows] == list(buffer_learning.ARMS)
    assert len({one["curve"][0][1] for one in rows}) == 1
    assert all(one["curve"][0] == [0, one["start"]] for one in rows)
