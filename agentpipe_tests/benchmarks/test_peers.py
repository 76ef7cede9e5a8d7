"""The race: its clock, what is kept on the way, who is chosen by trial, and its page. Nothing is trained."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from agentpipe.environments.layout import ACTION_COUNT, OBSERVATION_NAMES
from agentpipe.learning.policy.normalisation import ObservationStatistics
from benchmarks import peers, peers_own, peers_recorder, peers_report
from benchmarks.peers_line import PeerPlayer, Preparation
from benchmarks.peers_recorder import Recorder
from benchmarks.peers_run import key_of
from benchmarks.peers_settings import CONTESTANTS, MASKABLE, ONE_FILE, OURS, PLAIN, REPLACED, SMOKE, WITH_MASK, Sizes
from benchmarks.resumable import Cache


class Clock:
    """A clock that stands still until it is told the time."""

    def __init__(self):
        self.now = 100.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(peers_recorder, "time", made)
    return made


# -- what agentpipe run would do, shrunk ---------------------------------------------------------------------------


def test_a_run_beyond_its_limit_is_made_again_and_smaller(monkeypatch):
    shares, costs = [], iter([1.3e6, 1.21e6, 1.15e6])

    def as_run(ground, rates, axis, safe):
        shares.append(safe)
        return "package", {"steps": next(costs), "seconds": 1.0}

    monkeypatch.setattr(peers_own, "_as_run", as_run)
    ground = SimpleNamespace(sizes=Sizes())
    assert peers_own.train_as_run(ground, {}, "steps") == ("package", {"steps": 1.15e6, "seconds": 1.0})
    assert shares == pytest.approx([0.97, 0.97**2 * 1.2 / 1.3, 0.97**3 * 1.2 / 1.3 * 1.2 / 1.21])


# -- the clock -----------------------------------------------------------------------------------------------------


def test_the_last_weights_before_each_mark_are_kept(clock):
    recorder = Recorder([50, 100], [2.0, 4.0], "both", 60.0)
    recorder.begin()
    over = []
    for second, steps in enumerate((0, 40, 80, 100, 120, 140)):
        clock.now = 100.0 + second * 0.9
        over.append(recorder.look(steps, lambda steps=steps: f"weights of {steps}"))
        if over[-1]:
            break
    assert over == [False] * 5 + [True]  # 100 steps were done at 2.7 s, 4 seconds at 140 steps
    kept = {(one.axis, one.at): (one.steps, one.weights) for one in recorder.snapshots}
    assert kept == {
        ("steps", 50): (40, "weights of 40"),
        ("steps", 100): (100, "weights of 100"),  # exactly there
        ("seconds", 2.0): (80, "weights of 80"),
        ("seconds", 4.0): (120, "weights of 120"),
    }


def test_the_clock_stands_still_while_weights_are_copied(clock):
    recorder = Recorder([], [10.0], "seconds", 60.0)
    recorder.begin()

    def slow():
        clock.now += 30.0
        return "weights"

    clock.now += 3.0
    assert not recorder.look(10, slow)
    assert recorder.seconds == pytest.approx(3.0)
    clock.now += 7.0
    assert recorder.look(20, slow)
    assert recorder.ended == pytest.approx(10.0)


def test_a_run_that_takes_too_long_ends_and_its_marks_get_what_it_had(clock):
    recorder = Recorder([100], [], "steps", 5.0)
    recorder.begin()
    clock.now += 6.0
    assert recorder.look(30, lambda: "late")
    recorder.finish()
    assert [(one.at, one.steps, one.weights) for one in recorder.snapshots] == [(100, 30, "late")]


def test_progress_goes_by_steps_or_by_seconds(clock):
    for end, expected in (("steps", 0.25), ("seconds", 0.5)):
        recorder = Recorder([200], [4.0], end, 60.0)
        recorder.begin()
        clock.now += 2.0
        recorder.look(50, lambda: None)
        assert recorder.progress == pytest.approx(expected)


# -- what a peer reads, and how it is played -----------------------------------------------------------------------


def preparation(*, last_action):
    names = OBSERVATION_NAMES
    statistics = ObservationStatistics(names, 4, np.full(len(names), 2.0), np.full(len(names), 4.0))
    return Preparation(statistics, last_action=last_action)


def test_a_peer_reads_normalised_observations_and_the_last_action_where_it_may():
    observation = np.full((1, len(OBSERVATION_NAMES)), 4.0, np.float32)
    last = np.array([3])
    plain, more = preparation(last_action=False), preparation(last_action=True)
    assert plain(observation, last).shape == (1, plain.size)
    assert np.ptp(plain(observation, last)) == 0
    assert plain(observation * 1e6, last).max() == 8.0
    found = more(observation, last)
    assert found.shape == (1, more.size) == (1, len(OBSERVATION_NAMES) + ACTION_COUNT + 1)
    assert np.flatnonzero(found[0, len(OBSERVATION_NAMES) :]).tolist() == [3]


@pytest.mark.parametrize(("play", "expected"), [(WITH_MASK, [1, 3]), (REPLACED, [1, 3])])
def test_a_forbidden_action_is_never_played(play, expected):
    class Pool:
        observation = np.zeros((2, len(OBSERVATION_NAMES)), np.float32)
        last_action = np.full(2, ACTION_COUNT)
        mask = np.zeros((2, ACTION_COUNT), np.bool_)

    Pool.mask[0, [1, 2]] = Pool.mask[1, [3]] = True
    logits = np.zeros((2, ACTION_COUNT), np.float32)
    logits[:, 0], logits[:, 1] = 9.0, 5.0
    player = PeerPlayer(lambda _: logits, preparation(last_action=False), play)
    assert player.act(Pool()).actions.tolist() == expected


def test_the_two_ways_of_playing_differ_where_the_lowest_allowed_action_is_not_the_likeliest():
    class Pool:
        observation = np.zeros((1, len(OBSERVATION_NAMES)), np.float32)
        last_action = np.full(1, ACTION_COUNT)
        mask = np.zeros((1, ACTION_COUNT), np.bool_)

    Pool.mask[0, [1, 2]] = True
    logits = np.zeros((1, ACTION_COUNT), np.float32)
    logits[0, [0, 1, 2]] = 9.0, 1.0, 5.0
    played = {
        play: PeerPlayer(lambda _: logits, preparation(last_action=False), play).act(Pool()).actions.tolist()
        for play in (WITH_MASK, REPLACED)
    }
    assert played == {WITH_MASK: [2], REPLACED: [1]}


# -- who races -----------------------------------------------------------------------------------------------------


def test_the_most_successful_trial_chooses_setting_and_play():
    rows = [{"success": {"a": 0.2, "b": 0.5}}, {"success": {"a": 0.5, "b": 0.1}}, {"success": {"a": 0.4, "b": 0.3}}]
    assert peers_report.best_of(rows) == (0, "b")  # the earlier of equals


def test_settings_and_seeds_have_keys_of_their_own():
    one = next(one for one in CONTESTANTS if one.name == ONE_FILE)
    keys = [key_of(one, setting, Sizes(), seed, "trial") for setting in one.settings for seed in (0, 1)]
    assert len({str(key) for key in keys}) == 2 * len(one.settings)
    assert key_of(one, one.settings[0], SMOKE, 0, "trial") != keys[0]


def test_nobody_runs_before_all_settings_were_tried(tmp_path):
    cache = Cache(tmp_path)
    found = peers.complete(CONTESTANTS, SMOKE, 1, cache)
    assert set(found) == {one.name for one in CONTESTANTS}
    assert not any(found.values())
    assert not any(peers.races(CONTESTANTS, found, [0], SMOKE, 1).values())


def test_runs_take_turns_and_a_falling_rate_has_a_run_for_each_comparison():
    one = next(one for one in CONTESTANTS if one.name == ONE_FILE)
    constant, falling = (
        [{"success": {WITH_MASK: score}, "threads": 1} for score in scores]
        for scores in ([0.9, 0.1, 0.1], [0.1, 0.1, 0.9])
    )
    runs = peers.races([one], {ONE_FILE: constant}, [0, 1], SMOKE, 1)[ONE_FILE]
    assert [piece.key["what"] for piece in runs] == ["both", "both"]
    runs = peers.races([one], {ONE_FILE: falling}, [0, 1], SMOKE, 1)[ONE_FILE]
    assert [(piece.key["seed"], piece.key["what"]) for piece in runs] == [
        (0, "steps"),
        (0, "seconds"),
        (1, "steps"),
        (1, "seconds"),
    ]
    assert peers.by_seed([["a0", "a1", "a2"], ["b0"]]) == ["a0", "b0", "a1", "a2"]


def test_a_plan_counts_trials_and_runs_before_any_was_made(tmp_path):
    said = peers.planned(CONTESTANTS, [0, 1, 2], SMOKE, 2, Cache(tmp_path))
    assert "trials: 0 of 12 are there" in said
    assert "races: 0 of 12 are there" in said
    assert "own-seconds: 0 of 3 are there" in said


# -- the page ------------------------------------------------------------------------------------------------------


def run(seed, success, at_half=0.3):
    curve = [
        {"axis": axis, "at": share * whole, "steps": share * 2_000, "seconds": share * 9.0, "success": found}
        for axis, whole in (("steps", SMOKE.steps), ("seconds", SMOKE.seconds))
        for share, found in ((0.5, at_half), (1.0, success))
    ]
    return {"seed": seed, "curve": curve, "steps_per_second": 20_000.0}


def content(**more):
    rows = {
        ONE_FILE: [run(0, 0.5), run(1, 0.5), run(2, 0.51)],
        OURS: [run(0, 0.6), run(1, 0.62), run(2, 0.61)],
        MASKABLE: [run(0, 0.2), run(1, 0.99), run(2, 0.6)],
    }
    tried = {ONE_FILE: [{"setting": "wide", "success": {WITH_MASK: 0.4}, "steps_per_second": 9_000.0, "threads": 2}]}
    return {
        "sizes": dataclasses.asdict(SMOKE),
        "cores": 2,
        "rows": rows,
        "tried": tried,
        "left": 2,
        "skipped": {PLAIN: "not to be had"},
        "origins": {"revisions": ["aaa"], "first": "", "last": ""},
        **more,
    }


def test_differences_are_paired_by_seed_with_their_t_interval():
    """0.10, 0.12, 0.10: mean 10.67 points, deviation 1.155, t(0.975; 2) = 4.3027: ± 2.87."""
    written = peers_report.section(content())
    lead = "+10.7 [+7.8, +13.5]"
    assert f"| {ONE_FILE} | 50.3% [48.9%, 51.8%] | 50.0%, 50.0%, 51.0% | {lead} | 30.0% |" in written
    assert f"| {OURS} | 61.0% [58.5%, 63.5%] | 60.0%, 62.0%, 61.0% | – | 30.0% |" in written


def test_an_interval_of_shares_stays_within_them():
    written = peers_report.section(
        content(rows={OURS: [run(0, 0.02), run(1, 0.3)], ONE_FILE: [run(0, 0.99), run(1, 0.9)]})
    )
    assert f"| {OURS} | 16.0% [0.0%, 100.0%] |" in written
    assert f"| {ONE_FILE} | 94.5% [37.3%, 100.0%] |" in written


def test_the_page_says_who_is_behind_and_who_cannot_be_told_apart():
    written = peers_report.section(content())
    assert f"agentpipe is ahead of {ONE_FILE} (+10.7 points); not told apart from {MASKABLE} (+1.3 points)." in written
    slow = content()
    slow["rows"][OURS] = [run(0, 0.3), run(1, 0.3), run(2, 0.31)]
    assert f"agentpipe is behind {ONE_FILE} (-20.0 points)" in peers_report.section(slow)
    alone = content(rows={OURS: [run(0, 0.6)]})
    assert "Too few runs to compare." in peers_report.section(alone)


def test_the_page_says_what_was_tried_and_what_is_missing():
    written = peers_report.section(content())
    assert f"| {ONE_FILE} | wide, 2 threads | 40.0% | 9.0 k | chosen |" in written
    assert f"Not measured: {PLAIN} (not to be had)." in written
    assert "Trainings that are missing: 2." in written
