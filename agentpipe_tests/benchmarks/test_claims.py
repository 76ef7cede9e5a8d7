"""What techniques are worth: the rule, the arithmetic behind it, the table of arms, the page. Nothing is trained."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from agentpipe.learning.aids.options import AidOptions
from benchmarks import claims
from benchmarks.claims_measures import came_later, mean_distance, paid_later, slope
from benchmarks.claims_run import SMOKE, Sizes, decisive, key_of, options_of
from benchmarks.claims_table import ARMS, CLAIMS, STANDARD, Claim, gain, quotient, steps
from benchmarks.claims_verdict import (
    NOT,
    PARTLY,
    REPRODUCED,
    UNMEASURED,
    Estimate,
    estimate,
    spread,
    steps_to,
    verdict,
)

BY_NAME = {arm.name: arm for arm in ARMS}


# -- the rule ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "field", "neutral", "more_is_better", "word"),
    [
        (3.0, 4.0, 3.8, 1.0, True, REPRODUCED),  # holds the field's figure
        (4.5, 5.0, 3.8, 1.0, True, REPRODUCED),  # all of it beyond
        (1.1, 2.0, 3.8, 1.0, True, PARTLY),  # an effect, but smaller
        (0.9, 4.0, 3.8, 1.0, True, NOT),  # too wide to exclude no effect
        (0.2, 0.8, 3.8, 1.0, True, NOT),  # the wrong way
        (0.5, 0.7, 0.59, 1.0, False, REPRODUCED),
        (0.3, 0.5, 0.59, 1.0, False, REPRODUCED),  # faster than the field
        (0.7, 0.9, 0.59, 1.0, False, PARTLY),
        (0.7, 1.0, 0.59, 1.0, False, NOT),  # touches no effect
        (1.2, 1.4, 0.59, 1.0, False, NOT),
        (0.001, 0.02, None, 0.0, True, REPRODUCED),  # no figure: any effect in the right direction
        (-0.001, 0.02, None, 0.0, True, NOT),
        (0.90, 0.95, 0.897, None, True, REPRODUCED),  # a level: to reach it is all
        (0.80, 0.88, 0.897, None, True, NOT),
    ],
)
def test_the_word_follows_from_interval_figure_and_no_effect(low, high, field, neutral, more_is_better, word):
    found = Estimate((low + high) / 2, low, high, ())
    assert verdict(found, field=field, neutral=neutral, more_is_better=more_is_better) == word


def test_nothing_and_one_seed_are_not_measured():
    given = {"field": 3.8, "neutral": 1.0, "more_is_better": True}
    assert verdict(None, **given) == UNMEASURED
    assert verdict(estimate([5.0], "ratio"), **given) == UNMEASURED


# -- intervals -----------------------------------------------------------------------------------------------------


def test_differences_have_the_t_interval_of_a_textbook():
    """1, 2, 3, 4, 5: mean 3, deviation sqrt(2.5), t = 2.7764: 3 ± 2.7764 · 1.58114 / 2.23607 = 3 ± 1.96324."""
    found = estimate([1.0, 2.0, 3.0, 4.0, 5.0], "difference")
    assert found.mean == 3.0
    assert found.low == pytest.approx(1.03676, abs=1e-5)
    assert found.high == pytest.approx(4.96324, abs=1e-5)


def test_ratios_are_averaged_by_their_logarithms():
    """1 and 4: mean log 2; half width 12.7062 · (log 4 / sqrt 2) / sqrt 2 = 12.7062 · log 2."""
    found = estimate([1.0, 4.0], "ratio")
    assert found.mean == pytest.approx(2.0)
    assert math.log(found.high / 2.0) == pytest.approx(12.7062 * math.log(2.0), rel=1e-5)
    assert found.low * found.high == pytest.approx(4.0)


def test_a_ratio_of_zero_has_no_estimate():
    assert estimate([0.5, 0.0], "ratio") is None
    assert estimate([], "difference") is None


def test_deviations_are_compared_by_f():
    """Deviations 1 and 2 of three seeds each: 0.5, with F(0.975; 2, 2) = 39: 0.5 / sqrt 39 to 0.5 · sqrt 39."""
    found = spread([1.0, 2.0, 3.0], [2.0, 4.0, 6.0])
    assert found.mean == pytest.approx(0.5)
    assert found.low == pytest.approx(0.5 / 39**0.5, rel=1e-6)
    assert found.high == pytest.approx(0.5 * 39**0.5, rel=1e-6)
    assert spread([1.0, 2.0], [3.0, 3.0]) is None
    assert spread([1.0], [3.0]) is None


# -- steps to a target ---------------------------------------------------------------------------------------------


def test_steps_to_a_target_lie_between_two_looks():
    assert steps_to([[0, 0.5], [100, 0.8], [200, 0.9]], 0.85) == pytest.approx(150)


def test_one_lucky_look_does_not_reach_a_target():
    """0.9 and 0.7 are pooled to 0.8 and 0.8; from there to 1.0 a quarter of the way is 0.85."""
    assert steps_to([[0, 0.5], [100, 0.9], [200, 0.7], [300, 1.0]], 0.85) == pytest.approx(225)


def test_a_target_may_be_reached_at_once_or_never():
    assert steps_to([[40, 0.9], [100, 0.95]], 0.85) == 40
    assert steps_to([[0, 0.5], [100, 0.6]], 0.85) is None


def test_where_one_arm_does_not_arrive_its_budget_is_a_bound():
    there = {"curve": [[150, 0.9]], "steps": 450, "cloned_steps": 50}
    not_there = {"curve": [[150, 0.1]], "steps": 450, "cloned_steps": 50}
    assert steps(0.85)(there, not_there) == (0.25, True)
    assert steps(0.85)(not_there, there) == (4.0, True)
    assert steps(0.85)(there, there) == (1.0, False)
    assert steps(0.85)(not_there, not_there) is None


# -- measures ------------------------------------------------------------------------------------------------------


def test_what_a_segment_pays_later_stays_in_its_episode():
    reward = np.array([[1.0], [2.0], [4.0], [8.0], [16.0]], np.float32)
    segment = np.array([[0], [3], [3], [0], [3]], np.int8)
    done = np.array([[False], [False], [True], [False], [False]])
    paid, ended = paid_later(reward, segment, done, 3)
    assert paid[:, 0].tolist() == [6.0, 6.0, 4.0, 16.0, 16.0]
    assert ended[:, 0].tolist() == [True, True, True, False, False]
    assert came_later(segment, done, 1)[:, 0].tolist() == [False] * 5


def test_the_slope_is_that_of_least_squares():
    assert slope(np.array([1.0, 3.0, 5.0]), np.array([0.0, 1.0, 2.0])) == pytest.approx(2.0)
    assert slope(np.array([1.0, 2.0]), np.array([3.0, 3.0])) == 0.0


def test_the_mean_distance_of_the_terms_of_an_advantage():
    """Three steps of one, decay 0.5: terms weigh 1, 1/2, 1/4 at the first, 1, 1/2 at the second, 1 at the third."""
    borders = np.array([[False], [False], [True]])
    expected = (0.5 * 1 + 0.25 * 2 + 0.5 * 1) / (1.75 + 1.5 + 1.0)
    assert mean_distance(np.ones((3, 1), np.float32), borders, 0.5) == pytest.approx(expected)
    assert mean_distance(np.ones((3, 1), np.float32), np.ones((3, 1), np.bool_), 0.5) == 0.0


# -- arms ----------------------------------------------------------------------------------------------------------


def test_names_are_unique_and_every_arm_is_compared():
    assert len(BY_NAME) == len(ARMS)
    assert {name for claim in CLAIMS for name in claim.arms} == {*BY_NAME, STANDARD}
    assert len({(claim.system, claim.name, claim.arms) for claim in CLAIMS}) == len(CLAIMS)


@pytest.mark.parametrize("pair", sorted({claim.arms for claim in CLAIMS if len(claim.arms) == 2}), ids=" against ".join)
def test_the_two_arms_of_a_claim_differ_and_start_alike(pair):
    mine, other = (BY_NAME[name] for name in pair)
    assert key_of(mine, Sizes(), 0) != key_of(other, Sizes(), 0)
    assert mine.cold == other.cold


def test_equal_arms_share_their_runs_and_seeds_do_not():
    same = dataclasses.replace(BY_NAME["default"], name="another name")
    assert key_of(same, Sizes(), 0) == key_of(BY_NAME["default"], Sizes(), 0)
    assert key_of(same, Sizes(), 1) != key_of(same, Sizes(), 0)
    assert key_of(same, SMOKE, 0) != key_of(same, Sizes(), 0)


def test_thresholds_of_aids_that_are_off_are_no_part_of_a_run():
    def moved(options):
        return dataclasses.replace(options, aids=dataclasses.replace(options.aids, reach=0.123))

    off = options_of(BY_NAME["default"], Sizes(), 0, 1)
    on = options_of(BY_NAME["dynamic lambda"], Sizes(), 0, 1)
    assert decisive(moved(off)) == decisive(off)
    assert decisive(moved(on)) != decisive(on)
    assert dataclasses.replace(off.aids, curiosity="always") != AidOptions()


def test_options_that_no_run_here_reads_are_no_part_of_its_key():
    assert "demonstrations" not in decisive(options_of(BY_NAME["default"], SMOKE, 0, 1))


def test_arms_are_what_their_names_say():
    made = {name: options_of(arm, Sizes(), 0, 1) for name, arm in BY_NAME.items()}
    assert made["one clip range"].ppo.clip == (0.2, 0.2, 0.2, 0.2)
    assert made["one clip range"].ppo.normalise == "batch"
    assert made["credit cut"].ppo.credit == "segment"
    assert (made["plain MLP"].network.encoder, made["plain MLP"].network.actor_head) == ("mlp", "linear")
    assert made["memory"].network.memory > 0 == made["no memory"].network.memory
    assert made["perception"].network.perception > 0 == made["no perception"].network.perception
    assert made["orchestrator"].orchestrator is not None
    apart = made["distillation"]
    assert apart.budget_steps + apart.aids.distillation_steps == made["default"].budget_steps
    assert [name for name, options in made.items() if options.warm_up is None] == [arm.name for arm in ARMS if arm.cold]


# -- the page ------------------------------------------------------------------------------------------------------


def row(arm, seed, success, reached, **more):
    figures = {
        "curve": [[0, 0.5], [reached, 0.85]],
        "steps": 2_000_000,
        "cloned_steps": 0,
        "entropy_mean": 0.5,
        "entropy_deviation": 0.4,
        "steps_per_processor_second": 30_000,
        "decision_seconds": 2.0,
        "rules_decision_seconds": 4.0,
        "arrived_episode": 0.38,
        "arrived_segment": 0.1,
        "distance_episode": 5.0,
        "distance_segment": 2.5,
        "key_fault_causal": 0.4,
        "key_fault_uniform": 0.2,
        "idle_causal": 0.02,
        "idle_uniform": 0.2,
        "coverage": 0.99,
    }
    return {"arm": arm, "seed": seed, "success": success, **figures, **more}


def content(rows):
    return {
        "sizes": dataclasses.asdict(Sizes()),
        "rows": rows,
        "left": 3,
        "origins": {"revisions": ["aaa", "bbb"], "first": "", "last": ""},
    }


def test_the_page_says_what_was_found_and_what_is_missing():
    rows = [row("default", 0, 0.90, 1e6), row("default", 1, 0.91, 1e6)]
    rows += [row("one clip range", 0, 0.89, 1.5e6), row("one clip range", 1, 0.90, 1.6e6)]
    written = claims.section(content(rows))
    assert "credited | 3.8 × reach | 3.8 × [3.8, 3.8] | 3.8, 3.8 | **reproduced** |" in written
    assert "| 41 % faster | 0.645 × [0.428, 0.973] | 0.667, 0.625 | **reproduced** |" in written
    assert "share of key-fault steps | 5.2 × | 2 × [2, 2] | 2, 2 | **partly** |" in written
    assert "| the same: success on held-out lines | – | +1.00 points [+1.00, +1.00] | +1.00, +1.00 |" in written
    assert "curiosity: steps to 85% | – | – | – | **not measured** |" in written
    assert "| default | 2 | 90.5% [84.1%, 96.9%] | 0.71 points | 1.00 M | 0.500 ± 0.400 | 30.0 k |" in written
    assert "Runs that are missing: 3." in written
    assert "Runs of several revisions: aaa, bbb." in written
    assert all(f"{arm.name} ({arm.waiting})" in written for arm in ARMS if arm.waiting)


def test_arms_are_paired_by_seed_and_seeds_that_one_lacks_do_not_count():
    claim = Claim("S0", "gain", "", ("default", "credit cut"), gain, "difference", neutral=0.0)
    rows = claims.as_rows([row("default", 0, 0.9, 1), row("default", 1, 0.8, 1), row("credit cut", 1, 0.7, 1)])
    found, bounds, nowhere = claims.measured(claim, rows)
    assert found.values == (pytest.approx(0.1),)
    assert (bounds, nowhere) == (0, 0)


def test_a_quotient_over_nothing_counts_as_missing():
    assert quotient("a", "b")({"a": 1.0, "b": 0.0}) is None
    assert quotient("a")({"a": 1.0}, {"a": 4.0}).value == 0.25


def test_one_run_for_each_arm_and_seed_and_none_for_what_is_waited_for(tmp_path):
    waits = dataclasses.replace(BY_NAME["default"], waiting="the moon")
    made = claims.pieces([BY_NAME["default"], BY_NAME["credit cut"], waits], [0, 1], SMOKE, 1, tmp_path)
    assert [piece.label for piece in made] == [
        "seed 0, default",
        "seed 0, credit cut",
        "seed 1, default",
        "seed 1, credit cut",
    ]
    assert len({piece.digest for piece in made}) == 4
