"""Rewards are held against what is declared of them; what deviates is named."""

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest

from agentpipe.environments.catalog import load_catalog
from agentpipe.environments.datafiles import data_dir
from agentpipe.environments.layout import A_DEPOT, A_START, A_TECHNICIAN, Purpose, block_start
from agentpipe.environments.line_profile import default_profile
from agentpipe.environments.pool import build_pool
from agentpipe.environments.rules import RulesPlayer
from agentpipe.environments.table import load_table
from agentpipe.errors import LearningError
from agentpipe.experience.record import record_trajectories
from agentpipe.learning.aids.reward_checks import (
    LINE,
    Steps,
    check_shard,
    declared_gradients,
    gradient_figure,
    line_gradients,
    range_figures,
    sign_figure,
    sign_ratio,
)
from agentpipe.learning.aids.reward_watch import RewardWatch, reward_figures
from agentpipe_tests.learning.aids.told import CALM, rollout_of


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """60 environments, two episodes each, played by the rules."""
    chosen = load_catalog().spread("train", 60)
    table, profile = load_table(data_dir() / "disturbances.csv"), default_profile()
    return record_trajectories(
        lambda some: build_pool(some, table, profile, seed=0, purpose=Purpose.COLLECT),
        RulesPlayer(profile),
        environments=chosen,
        table=table,
        episodes_per_env=2,
        out_dir=tmp_path_factory.mktemp("rewards") / "shard",
        cell="all",
        policy_version="rules",
        durability="process",
    )


def by_name(figures):
    return {figure.name: figure for figure in figures}


def test_the_line_pays_what_it_declares(recorded):
    report = check_shard(recorded, deviation=1.4)
    assert {gradient.term for gradient in report.gradients} == set(LINE)
    for gradient in report.gradients:
        assert gradient.measured == pytest.approx(LINE[gradient.term], rel=0.02)
        assert gradient.error < 0.02 * abs(gradient.declared)
    assert {figure.status for figure in report.figures} == {"pass"}
    assert len(report.figures) == 2 + len(LINE)
    assert [note.partition(":")[0] for note in report.notes] == [
        "positive to negative rewards",
        "positive to negative rewards net of the running cost",
    ]


def test_seconds_of_all_steps_are_the_time_of_the_episodes(recorded):
    steps = Steps.of(recorded)
    assert steps.seconds.min() > 0
    assert steps.seconds.sum() == pytest.approx(recorded.episodes["elapsed_seconds"].sum(dtype=np.float64), rel=1e-5)
    assert steps.last.sum() == len(recorded.episodes)


@pytest.mark.parametrize(
    ("term", "changes"),
    [
        ("decision second", lambda steps: 0.001 * steps.seconds * ~steps.earned * (steps.action < A_START)),
        ("step", lambda steps: 0.002 * ~steps.earned),
        ("waiting second", lambda steps: -0.0002 * steps.seconds * (steps.action == A_START)),
        ("lead minute", lambda steps: 0.02 * of_action(steps, "lead", A_DEPOT, 3)),
        ("travel minute", lambda steps: -0.02 * of_action(steps, "travel", A_TECHNICIAN, 4)),
    ],
)
def test_a_term_that_deviates_by_a_fifth_warns_and_is_named(recorded, term, changes):
    steps = Steps.of(recorded)
    other = dataclasses.replace(steps, reward=steps.reward + changes(steps))
    warned = [figure for figure in map(gradient_figure, line_gradients(other)) if figure.status != "pass"]
    assert [figure.name for figure in warned] == [f"reward gradient of {term}"]
    assert warned[0].status == "warn"
    assert warned[0].value == pytest.approx(0.2 if term != "decision second" else 0.25, abs=0.03)
    assert f"declared {LINE[term]:g}" in warned[0].remedy


def of_action(steps, block, first, count):
    chosen = (steps.action >= first) & (steps.action < first + count)
    column = block_start(block) + np.where(chosen, steps.action - first, 0)
    return np.where(chosen, steps.observation[np.arange(len(chosen)), column], 0.0)


def test_what_cannot_be_measured_is_said(recorded):
    steps = Steps.of(recorded)
    still = dataclasses.replace(steps, action=np.zeros_like(steps.action), earned=np.ones_like(steps.earned))
    assert line_gradients(still) == ()
    few = SimpleNamespace(
        episodes=recorded.episodes[:2], records=recorded.records[: recorded.episodes["steps"][:2].sum()]
    )
    report = check_shard(few)
    assert "reward gradient of waiting second: not measured, too few steps or no variation" in report.notes


# -- environments of one's own -------------------------------------------------------------------------------------

NAMES = ("queue", "temperature", "constant")


def own_steps(count=400, noise=0.01):
    """reward = 0.3 action - 0.1 queue - 0.02 seconds, and noise."""
    generator = np.random.default_rng(0)
    observation = generator.normal(5, 2, (count, 3)).astype(np.float32)
    observation[:, 2] = 1.0
    action, seconds = generator.integers(0, 3, count), generator.uniform(1, 9, count)
    reward = 0.3 * action - 0.1 * observation[:, 0] - 0.02 * seconds + noise * generator.normal(size=count)
    last = np.arange(count) % 10 == 9
    reward[last] += 100.0  # the end of an episode is no part of it
    return Steps(reward, action, observation, seconds, np.ones(count, np.bool_), last)


def test_declared_gradients_of_an_environment_of_ones_own():
    found = declared_gradients(own_steps(), {"queue": -0.1, "seconds": -0.02, "temperature": 0.0}, NAMES)
    assert [gradient.measured for gradient in found] == pytest.approx([-0.1, -0.02, 0.0], abs=2e-3)
    assert [gradient_figure(gradient).status for gradient in found] == ["pass"] * 3
    (wrong,) = declared_gradients(own_steps(), {"queue": -0.2}, NAMES)
    assert gradient_figure(wrong).status == "warn"
    assert wrong.deviation == pytest.approx(0.5, abs=0.05)


def test_a_term_that_is_no_feature_is_refused():
    with pytest.raises(LearningError, match="pressure is no feature") as caught:
        declared_gradients(own_steps(), {"pressure": 1.0}, NAMES)
    assert caught.value.where["field"] == "pressure"


def test_a_feature_that_never_moves_is_not_measured():
    assert declared_gradients(own_steps(), {"constant": 1.0}, NAMES) == ()
    assert declared_gradients(own_steps(20), {"queue": -0.1}, NAMES) == ()


def test_nothing_declared_is_said(recorded):
    plain = np.zeros(
        50, [("reward", "f4"), ("action", "i2"), ("time", "f4"), ("earned", "u1"), ("observation", "f4", 3)]
    )
    plain["reward"][:] = np.where(np.arange(50) < 10, 20.0, -1.0)
    episodes = np.zeros(1, recorded.episodes.dtype)
    episodes["steps"] = 50
    shard = SimpleNamespace(records=plain, episodes=episodes)
    report = check_shard(shard, deviation=1.0)
    assert report.gradients == ()
    assert report.notes == ("positive to negative rewards: 0.25", "reward gradient: not declared")
    figures = by_name(report.figures)
    assert (figures["rewards within 10"].value, figures["rewards within 10"].status) == (0.8, "warn")
    assert (figures["clamped rewards"].value, figures["clamped rewards"].status) == (0.2, "warn")
    notes = check_shard(shard, declared={"seconds": -0.1}, names=("a", "b", "c")).notes
    assert notes[-1] == "reward gradient of seconds: not measured, too few steps or no variation"


# -- range and signs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "status", "target"), [(0.8, "pass", 1.2), (1.2, "pass", 1.2), (0.79, "warn", 0.8), (1.21, "warn", 1.2)]
)
def test_signs_are_healthy_between_two_bounds(ratio, status, target):
    figure = sign_figure(ratio)
    assert (figure.status, figure.target, figure.gate) == (status, target, "4")


def test_sign_ratio_counts():
    assert sign_ratio(np.array([3.0, 2.0, 0.0, -1.0])) == 2.0
    assert sign_ratio(np.ones(4)) == 4.0
    assert sign_ratio(np.zeros(4)) == 0.0


def test_a_share_that_is_no_number_does_not_pass():
    assert [figure.status for figure in range_figures(math.nan, math.nan)] == ["fail", "fail"]


def test_every_update_is_watched():
    watch, rollout = RewardWatch(), rollout_of(2, 10)
    rollout.reward[0, :3] = -11.0
    rollout.batch.advantage[:] = 1.0
    rollout.batch.advantage[:5] = -2.0
    watch.collected(rollout, None)
    watch.updated(CALM, ())
    row = {**watch.figures(), "rewards/clamped_share": 0.01}
    figures = by_name(reward_figures(row))
    assert figures["rewards within 10"].value == 0.85
    assert figures["positive to negative advantages"].value == 3.0
    assert {name: figure.status for name, figure in figures.items()} == {
        "rewards within 10": "warn",
        "clamped rewards": "pass",
        "positive to negative advantages": "warn",
    }
    assert reward_figures({}) == ()
