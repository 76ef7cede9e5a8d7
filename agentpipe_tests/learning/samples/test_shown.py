"""What a pool shows and an expert says is looked at before compiled code reads it."""

import numpy as np
import pytest

from agentpipe.environments.demonstrator import QUESTION_COUNT
from agentpipe.environments.layout import A_MACHINE, A_MODE, ACTION_COUNT
from agentpipe.errors import ActionError, EmptyMaskError, NonFiniteError, SimulationError
from agentpipe.learning import checkpoint as checkpoints
from agentpipe.learning.aids.options import AidOptions
from agentpipe.learning.options import StreamOptions
from agentpipe.learning.samples.shown import ENDED, NOW, TAKEN, Shown, require_answers, require_decisions, within
from agentpipe.learning.trainer import train
from agentpipe_tests.learning.tiny import (
    ACTION_NAMES,
    ACTIONS,
    WIDTH,
    TinyExpert,
    TinyPool,
    tiny_options,
    tiny_statistics,
    tiny_warm_up,
)

STEP = 9
"""in the second update, after the first checkpoint"""
LAST = 11
"""the first step after it in which episodes end"""


class Spoilt(TinyPool):
    """A pool in which something goes wrong in one step."""

    def __init__(self, spoil, step=STEP):
        super().__init__()
        self.spoil, self.when, self.taken = spoil, step, 0

    def step(self, actions):
        super().step(actions)
        if self.taken == self.when:
            self.spoil(self)
        self.taken += 1


def trained(tmp_path, pool, **changes):
    options = tiny_options(budget_steps=2_048, checkpoint_every=1, **changes.pop("options", {}))
    return train(pool, tiny_statistics(), options, directory=tmp_path, action_names=ACTION_NAMES, **changes)


def refused(tmp_path, pool, kind=SimulationError, **changes):
    with pytest.raises(kind) as caught:
        trained(tmp_path, pool, **changes)
    assert checkpoints.load(checkpoints.latest(tmp_path / "checkpoints")).content["update"] == 1
    return caught.value


def shape(pool, **arrays):
    vars(pool).update(arrays)


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("observation", lambda p: p.observation[:, :3].copy()),
        ("observation", lambda p: p.observation.astype(np.float64)),
        ("observation", lambda p: p.observation.tolist()),
        ("observation", lambda p: np.asfortranarray(p.observation)),
        ("observation", lambda p: np.ascontiguousarray(p.observation[::-1])[::-1]),
        ("mask", lambda p: p.mask[:, :4].copy()),
        ("mask", lambda p: p.mask.astype(np.int8)),
        ("segment", lambda p: p.segment.astype(np.int64) + 256),
        ("last_action", lambda p: p.last_action.astype(np.float64)),
        ("last_action", lambda p: p.last_action.astype(np.int32)),
        ("time", lambda p: p.time[:5].copy()),
        ("reward", lambda p: np.ones(5, np.float32)),
        ("reward", lambda _: None),
        ("terminated", lambda p: p.terminated.astype(float)),
        ("truncated", lambda p: p.truncated[None]),
    ],
)
def test_an_array_of_another_kind_is_named(tmp_path, field, wrong):
    error = refused(tmp_path, Spoilt(lambda pool: shape(pool, **{field: wrong(pool)})))
    assert error.where == {"field": field, "step": STEP}


@pytest.mark.parametrize("field", ["final_observation", "final_mask", "final_last_action", "final_time"])
def test_so_is_one_of_the_last_of_an_episode(tmp_path, field):
    pool = Spoilt(lambda pool: shape(pool, **{field: getattr(pool, field)[:3].copy()}), LAST)
    assert refused(tmp_path, pool).where == {"field": field, "step": LAST}


@pytest.mark.parametrize("value", [-1, ACTIONS + 1, 1_000, 10**6, 10**9, -(10**9)])
@pytest.mark.parametrize("stream", [None, StreamOptions()])
def test_an_unknown_last_action_is_named_and_never_recorded(tmp_path, value, stream):
    def spoil(pool):
        pool.last_action[3] = value

    error = refused(tmp_path, Spoilt(spoil), options={"stream": stream})
    assert error.where == {"environment": "tiny-3", "field": "last_action", "step": STEP + 1}


def test_an_unknown_last_action_at_the_end_of_an_episode_is_named(tmp_path):
    def spoil(pool):
        pool.truncated[:], pool.terminated[:] = pool.terminated, False
        pool.final_last_action[5] = ACTIONS + 1

    assert refused(tmp_path, Spoilt(spoil, LAST)).where == {
        "environment": "tiny-5", "field": "final_last_action", "step": LAST,
    }  # fmt: skip


@pytest.mark.parametrize("aids", [AidOptions(), AidOptions(curiosity="off", dynamic_lambda="off", layer_rates="off")])
@pytest.mark.parametrize("field", ["result_return", "result_decision_seconds"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_an_outcome_that_is_not_finite_is_named_in_its_step(tmp_path, field, value, aids):
    def spoil(pool):
        getattr(pool, field)[3] = value

    error = refused(tmp_path, Spoilt(spoil, LAST), NonFiniteError, options={"aids": aids})
    assert error.where == {"environment": "tiny-3", "field": field, "step": LAST}


@pytest.mark.parametrize("value", [-1, 10, 127])
def test_an_unknown_reason_is_named(tmp_path, value):
    def spoil(pool):
        pool.result_reason[7] = value

    assert refused(tmp_path, Spoilt(spoil, LAST)).where["environment"] == "tiny-7"


def test_an_outcome_of_another_kind_is_named(tmp_path):
    pool = Spoilt(lambda pool: shape(pool, result_success=np.ones(64)), LAST)
    assert refused(tmp_path, pool).where == {"field": "result_success", "step": LAST}


def test_outcomes_are_looked_at_where_an_episode_ended_alone():
    pool = TinyPool(4)
    pool.result_return[0] = np.nan
    Shown(4, WIDTH, ACTIONS).require_results(pool, np.array([1, 2]), 0)
    with pytest.raises(NonFiniteError):
        Shown(4, WIDTH, ACTIONS).require_results(pool, np.array([0, 2]), 0)


def test_a_pool_as_it_should_be_passes():
    Shown(64, WIDTH, ACTIONS).require(TinyPool(), NOW | TAKEN | ENDED, 0)


def test_ends_of_a_range_belong_to_it():
    within(np.array([0, 12]), 0, 12, "f", 0, ("a", "b"))
    within(np.zeros(0, np.int64), 0, 12, "f", 0, ())
    for row, values in enumerate(([-1, 0], [0, 13])):
        with pytest.raises(SimulationError) as caught:
            within(np.array(values), 0, 12, "f", 2, ("a", "b"))
        assert caught.value.where == {"environment": "ab"[row], "field": "f", "step": 2}


# -- experts -------------------------------------------------------------------------------------------------------


class Saying(TinyExpert):
    """An expert that says something else."""

    def __init__(self, answers=None, actions=None):
        self.said, self.done = answers, actions

    def answers(self, pool):
        return super().answers(pool) if self.said is None else self.said(super().answers(pool))

    def act(self, pool):
        decided = super().act(pool)
        if self.done is not None:
            decided.actions = self.done(decided.actions)
        return decided


def at(row, value):
    def changed(array):
        array = array.copy()
        array[row] = value
        return array

    return changed


@pytest.mark.parametrize("weight", [0.0, 1.0])
@pytest.mark.parametrize(
    "expert",
    [
        *(Saying(answers=at((2, 0), value)) for value in (-2, 0, ACTIONS, 1_000, 10**6)),
        Saying(answers=lambda a: a[:, :2]),
        Saying(answers=lambda a: a.astype(np.int32)),
        Saying(answers=lambda a: a.tolist()),
        *(Saying(actions=at(2, value)) for value in (-1, ACTIONS - 1, ACTIONS, 10**6)),
        Saying(actions=lambda a: a[:5]),
        Saying(actions=lambda a: a.tolist()),
        Saying(actions=lambda a: a.astype(float)),
    ],
)
def test_an_expert_that_says_what_cannot_be_is_refused(tmp_path, expert, weight):
    options = {"warm_up": tiny_warm_up(episodes=40, answer_weight=weight)}
    with pytest.raises(ActionError) as caught:
        trained(tmp_path, TinyPool(), options=options, expert=expert)
    assert caught.value.where["step"] == 0
    assert caught.value.where["field"] in {"answers", "action"}
    assert caught.value.where.get("environment", "tiny-2") == "tiny-2"


def test_answers_to_their_questions_pass():
    said = np.full((2, QUESTION_COUNT), -1)
    said[0, 0], said[1, 1] = A_MACHINE, A_MODE
    require_answers(said, ACTION_COUNT, 0, ("a", "b"))
    with pytest.raises(ActionError, match=f"answer {A_MODE} does not answer question 0"):
        require_answers(said[::-1, ::-1].copy()[:, [1, 0, 2]], ACTION_COUNT, 0, ("a", "b"))


def test_more_actions_than_the_line_has_answer_nothing():
    with pytest.raises(ActionError):
        require_answers(np.full((1, QUESTION_COUNT), A_MACHINE), ACTION_COUNT + 1, 0, ("a",))


def test_an_empty_mask_is_the_pools_fault(tmp_path):
    pool, none = TinyPool(2), np.zeros((2, ACTIONS), np.bool_)
    require_decisions(np.zeros(2, np.int64), none, 0, pool.names)

    class Stuck(TinyPool):
        def reset(self, episode=0):
            super().reset(episode)
            self.mask[4] = False

    with pytest.raises(EmptyMaskError) as caught:
        trained(tmp_path, Stuck(), options={"warm_up": tiny_warm_up()}, expert=TinyExpert())
    assert caught.value.where["environment"] == "tiny-4"
