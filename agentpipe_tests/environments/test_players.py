"""The players: legal, replayable, honest about what they look at, and as good as the frozen difficulty says."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from agentpipe.environments.demonstrator import QUESTIONS, DemonstratorPlayer
from agentpipe.environments.diagnoser import DiagnoserPlayer, fit_diagnosis
from agentpipe.environments.layout import (
    A_DEPOT,
    A_MACHINE,
    A_MODE,
    A_SEVERITY,
    A_TECHNICIAN,
    FALSE_ALARM,
    MODES,
    OBSERVATION_SIZE,
    PHYSICAL_MODES,
    PLC_OVERLOAD,
    SENSOR_FAILURE,
    Purpose,
    block_start,
)
from agentpipe.environments.machine_history import fit_profile
from agentpipe.environments.players import (
    OraclePlayer,
    RandomPlayer,
    dispatch_actions,
    nearest_depot,
    nearest_technician,
)
from agentpipe.environments.rules import RulesPlayer, RuleThresholds, samples_heard, tune_rules
from agentpipe_tests.environments.line import catalog, four_mode_profile, make_pool, profile, success
from agentpipe_tests.strategies import shared_data

O_LEAD, O_TRAVEL, O_SKILLED = (block_start(name) for name in ("lead", "travel", "skilled"))
O_MEAN, O_COUNT, O_PRESENT, O_PLC = (block_start(name) for name in ("mean", "count", "present", "plc"))


@functools.cache
def tuned(seed=0):
    environments = catalog().environments("train")[::14]
    score = functools.partial(success, environments=environments, seed=3, purpose=Purpose.TRAIN)
    return tune_rules(profile(), score, trials=24, seed=seed)


@functools.cache
def diagnoser():
    pool = make_pool(catalog().environments("train")[::2], seed=2)
    return DiagnoserPlayer(fit_diagnosis(pool, 4))


def everyone():
    return [RandomPlayer(), RulesPlayer(profile()), diagnoser(), DemonstratorPlayer(), OraclePlayer()]


# The frozen difficulty: success on the 245 validation environments.


def validation(player):
    return success(player, catalog().environments("validation"), episodes=4)


def test_random_play_hardly_ever_succeeds():
    assert 0.0 < validation(RandomPlayer()) < 0.10


@pytest.mark.parametrize("player", [lambda: RulesPlayer(profile()), lambda: tuned()[0]], ids=["frozen", "searched"])
def test_rules_succeed_about_half_of_the_time(player):
    assert 0.40 <= validation(player()) <= 0.60


def test_the_diagnoser_beats_the_rules_and_the_oracle_beats_all():
    rules, diagnosed, oracle = validation(tuned()[0]), validation(diagnoser()), validation(OraclePlayer())
    assert rules + 0.05 < diagnosed < oracle
    assert oracle > 0.97


def test_disturbances_make_the_line_harder_for_those_who_must_measure():
    """Intensity 5 of sensor and load against intensity 1; the oracle does not care."""
    for kind in ("sensor", "load"):
        weak, strong = (catalog().environments("train", f"{kind}-{intensity}")[::4] for intensity in (1, 5))
        assert success(tuned()[0], weak, episodes=2) > success(tuned()[0], strong, episodes=2) + 0.05
        assert success(OraclePlayer(), strong) > 0.97


# What every player does.


@pytest.mark.parametrize("index", range(5))
def test_every_player_is_legal_and_says_how_likely_its_choice_was(index):
    player, pool = everyone()[index], make_pool()
    for _ in range(70):
        decision = player.act(pool)
        assert decision.actions.dtype == np.int64
        assert pool.mask[np.arange(pool.size), decision.actions].all()
        assert decision.probabilities.dtype == np.float32
        expected = 1.0 / pool.mask.sum(axis=1) if player.name == "random" else np.ones(pool.size)
        assert decision.probabilities == pytest.approx(expected)
        pool.step(decision.actions)


@pytest.mark.parametrize("index", range(5))
def test_every_player_plays_the_same_twice_and_alone(index):
    player, pool, again = everyone()[index], make_pool(), make_pool()
    alone = make_pool([catalog().environments("validation")[100]])
    for _ in range(40):
        actions = player.act(pool).actions
        assert np.array_equal(actions, player.act(again).actions)
        assert player.act(alone).actions[0] == actions[100]
        for each, chosen in ((pool, actions), (again, actions), (alone, actions[100:101])):
            each.step(chosen)


def test_players_have_the_names_that_reports_use():
    assert [player.name for player in everyone()] == ["random", "rules", "diagnoser", "demonstrator", "oracle"]


@pytest.mark.parametrize("player", [RulesPlayer(profile()), diagnoser], ids=["rules", "diagnoser"])
def test_rules_and_diagnoser_do_not_look_at_the_hidden_state(player):
    player = player() if callable(player) else player
    pool = make_pool()
    for _ in range(30):
        actions = player.act(pool).actions
        kept = {name: array.copy() for name, array in pool.hidden()._asdict().items()}
        for name, array in pool.hidden()._asdict().items():
            if name not in ("key", "episode"):
                array[...] = np.random.default_rng(1).integers(0, 2, array.shape)
        assert np.array_equal(player.act(pool).actions, actions)
        for name, array in kept.items():
            getattr(pool.hidden(), name)[...] = array
        pool.step(actions)


# Dispatching.


def observation(**values):
    seen = np.zeros((1, OBSERVATION_SIZE), np.float32)
    for name, numbers in values.items():
        seen[0, block_start(name) : block_start(name) + len(numbers)] = numbers
    return seen


def test_nearest_depot_is_where_the_part_comes_from_first():
    assert nearest_depot(observation(lead=[3.0, 0.5, 0.6])).tolist() == [1]


def test_nearest_technician_must_have_the_skill_if_any_has():
    assert nearest_technician(observation(travel=[0.1, 2.0, 1.0, 3.0], skilled=[0, 1, 1, 0])).tolist() == [2]
    assert nearest_technician(observation(travel=[0.4, 2.0, 0.2, 3.0], skilled=[0, 0, 0, 0])).tolist() == [2]


def test_the_part_is_reserved_before_the_technician_is_chosen():
    pool = make_pool()
    pool.observation[:, O_LEAD : O_LEAD + 3] = [2.0, 1.0, 3.0]
    pool.observation[:, O_TRAVEL : O_TRAVEL + 4] = [4.0, 1.0, 2.0, 3.0]
    pool.observation[:, O_SKILLED : O_SKILLED + 4] = [1, 0, 1, 0]
    assert (dispatch_actions(pool) == A_DEPOT + 1).all()
    pool.observation[:, block_start("depot") + 1] = 1.0
    assert (dispatch_actions(pool) == A_TECHNICIAN + 2).all()


# The rules.


def seen_by_rules(means, *, plc=0.0, samples=30.0):
    """A pool that shows the given means of machine 4 and nothing elsewhere, all heard often."""
    pool = make_pool()
    pool.observation[:, O_MEAN : O_MEAN + 40] = 0.0
    pool.observation[:, O_MEAN + 20 : O_MEAN + 25] = means
    pool.observation[:, O_COUNT : O_COUNT + 8] = np.log2(1 + samples)
    pool.observation[:, O_PLC + 1] = plc
    return pool


@pytest.mark.parametrize(
    ("means", "plc", "mode"),
    [
        ([0.1, 0.2, 0.1, 0.0, 0.1], 0.0, FALSE_ALARM),
        ([0.0, 4.0, 0.2, 0.0, 0.1], 0.0, SENSOR_FAILURE),  # one channel alone
        ([0.2, 1.0, 2.0, 0.5, 1.0], 0.5, PLC_OVERLOAD),
    ],
)
def test_rules_name_what_their_thresholds_say(means, plc, mode):
    thresholds = RuleThresholds(alarm=0.9, overload=0.14, single=0.35, samples=8.0, search=2.0)
    player, pool = RulesPlayer(profile(), thresholds), seen_by_rules(means, plc=plc)
    actions = player.act(pool).actions
    if mode != FALSE_ALARM:  # the machine first
        assert (actions == A_MACHINE + 4).all()
        pool.observation[:, block_start("declared_machine") + 4] = 1.0
        actions = player.act(pool).actions
    assert (actions == A_MODE + mode).all()


def test_rules_measure_whom_they_have_heard_least_and_then_the_suspect():
    player = RulesPlayer(profile(), RuleThresholds(search=2.0, samples=8.0))
    pool = seen_by_rules([0.2, 3.0, 2.5, 0.5, 1.0], samples=3.0)
    assert (player.act(pool).actions == 4).all()
    pool.observation[:, O_COUNT + 2] = np.log2(1 + 1.0)
    assert (player.act(pool).actions == 2).all()


def test_samples_heard_are_infinite_where_there_is_no_machine():
    pool = make_pool()
    absent = pool.observation[:, O_PRESENT : O_PRESENT + 8] == 0
    assert absent.any()
    assert np.array_equal(np.isinf(samples_heard(pool)), absent)


def test_search_for_thresholds_is_repeatable_and_never_worse_than_where_it_began():
    environments = catalog().environments("train")[::14]
    default = success(RulesPlayer(profile()), environments, seed=3, purpose=Purpose.TRAIN)
    player, score = tuned()
    assert score >= default
    assert success(player, environments, seed=3, purpose=Purpose.TRAIN) == pytest.approx(score)
    tuned.cache_clear()
    assert tuned()[0].thresholds == player.thresholds


# The demonstrator.


def test_demonstrator_measures_first_and_names_the_truth():
    pool = make_pool()
    expert, truth = DemonstratorPlayer(), pool.hidden()
    answers = expert.answers(pool)
    physical = truth.mode < PHYSICAL_MODES
    assert (answers[:, 1] == A_MODE + truth.mode).all()
    assert np.array_equal(answers[:, 0] >= 0, truth.mode != FALSE_ALARM)
    level = (truth.severity > 0.35).astype(int) + (truth.severity > 0.65)
    assert (answers[physical, 2] == A_SEVERITY + level[physical]).mean() > 0.98
    assert (answers[~physical, 2] == -1).all()
    assert (expert.act(pool).actions < A_MACHINE).mean() > 0.9
    assert (QUESTIONS[A_MACHINE : A_MACHINE + 8] == 0).all()
    assert success(expert, catalog().environments("validation")) > 0.9


# A line imported with fewer physical modes.


@pytest.fixture(params=["cut", "ai4i2020"])
def imported(request):
    return four_mode_profile() if request.param == "cut" else fit_profile(shared_data("pdm/ai4i2020.csv"))


def test_a_line_with_fewer_modes_masks_the_unused_ones_and_can_be_played(imported):
    used = len(imported.modes)
    assert used < PHYSICAL_MODES
    environments = catalog().environments("train")[::20]
    pool, player = make_pool(environments, line=imported), RandomPlayer()
    seen = set()
    for _ in range(100):
        assert not pool.mask[:, A_MODE + used : A_MODE + PHYSICAL_MODES].any()
        seen |= set(np.unique(pool.hidden().mode).tolist())
        pool.step(player.act(pool).actions)
        pool.check_finite()
    assert seen == {*range(used), SENSOR_FAILURE, PLC_OVERLOAD, FALSE_ALARM}
    for rival in (RulesPlayer(imported), OraclePlayer()):
        score = success(rival, environments, line=imported)
        assert score > (0.97 if rival.name == "oracle" else 0.15)


def test_a_templates_unused_mode_becomes_one_that_the_profile_has():
    pool = make_pool(catalog().environments("train"), line=four_mode_profile())
    own, mode = pool._fixed.own_mode, pool.hidden().mode
    unused = (own >= 4) & (own < PHYSICAL_MODES)
    assert (mode[unused] == own[unused] % 4).mean() > 0.7
    assert MODES[4] not in {MODES[slot] for slot in np.unique(mode)}
