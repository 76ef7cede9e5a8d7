"""Lambda moves by its rules, within its limits; the reach of credit against its definition."""

import numpy as np
import pytest
import torch

from agentpipe.learning.aids.base import Knobs
from agentpipe.learning.aids.dynamic_lambda import DynamicLambda, reach
from agentpipe.learning.aids.options import AidOptions
from agentpipe.learning.gradient.advantages import generalised_advantages
from agentpipe.learning.options import PpoOptions
from agentpipe_tests.learning.aids.told import CALM, copied, rollout_of, warning


def naive_reach(rollout, discount, lambda_):
    """Every delta of every step, one at a time, from the rewards that give these returns."""
    steps, size = rollout.steps, rollout.size
    advantage = rollout.batch.returns.numpy().reshape(steps, size) - rollout.value.numpy()
    done, segment = rollout.done, rollout.segment
    decay = discount * lambda_
    late = own = 0.0
    for n in range(size):
        delta = [
            advantage[t, n] - (0.0 if done[t, n] or t + 1 == steps else decay * advantage[t + 1, n])
            for t in range(steps)
        ]
        for t in range(steps):
            if segment[t, n] == segment.max():
                continue
            parts, beyond = [0.0, 0.0], False
            for k in range(t, steps):
                beyond = beyond or bool(segment[k, n] != segment[t, n])
                parts[beyond] += decay ** (k - t) * delta[k]
                if done[k, n]:
                    break
            own, late = own + abs(parts[0]), late + abs(parts[1])
    return late / (late + own)


@pytest.mark.parametrize("seed", range(4))
def test_reach_is_the_share_of_later_segments_errors(seed):
    """Segments never come back within an episode here, so that "another segment" is "a later one"."""
    rollout = rollout_of(12, 7, seed=seed)
    rollout.segment[:] = np.sort(rollout.segment, axis=0)
    assert reach(rollout, 0.9 * 0.95) == pytest.approx(naive_reach(rollout, 0.9, 0.95), rel=1e-4)


def test_reach_without_lambda_is_nothing_and_without_later_segments_everything():
    rollout = rollout_of(6, 5)
    assert reach(rollout, 0.0) == 0.0
    rollout.segment[:] = 2
    assert reach(rollout, 0.9) == 1.0


def test_larger_lambda_reaches_farther():
    """Reward 1 a step and a critic that knows nothing: two steps of an early segment, ten of a late one."""
    reaches = []
    for lambda_ in (0.5, 0.92, 0.97):
        rollout = rollout_of(12, 1)
        rollout.segment[:] = (np.arange(12) >= 2)[:, None]
        reward = np.ones((12, 1), np.float32)
        rollout.terminated[:], rollout.value[:] = False, 0.0
        nothing = (np.zeros((12, 1), np.float32), np.zeros(1, np.float32))
        flags = (rollout.terminated, rollout.terminated, nothing[0])
        _, returns = generalised_advantages(reward, *nothing, *flags, 0.99, lambda_)
        rollout.batch.returns[:] = torch.from_numpy(returns.reshape(-1))
        reaches.append(reach(rollout, 0.99 * lambda_))
    assert reaches == sorted(reaches)
    assert reaches[0] < 0.5 < reaches[2]


def told(aid, advantage, reached, updates=1, warnings=()):
    """What the aid does with an update of these two figures."""
    values = []
    for _ in range(updates):
        aid.collected(rollout_of(3, 4), None)
        before = aid._reaches
        aid.updated({**CALM, "losses/advantage_mean": advantage}, warnings)
        aid._reaches = [*before, reached][-aid.options.lambda_updates :]
        knobs = Knobs(1.0, 0.0, 0.5)
        aid.before(knobs, None)
        values.append(knobs.gae_lambda)
    return values


def always(**changes):
    options = AidOptions(dynamic_lambda="always", lambda_updates=3, **changes)
    return DynamicLambda(options, PpoOptions(gae_lambda=0.95))


def test_goes_down_while_advantages_stay_negative_and_stops_at_the_limit():
    aid = always()
    values = told(aid, -0.2, 0.9, updates=20)
    assert values[:2] == [0.95, 0.95]
    assert sorted(set(values), reverse=True) == [0.95, 0.94, 0.93, 0.92]
    assert values[-1] == 0.92
    notes = aid.take_notes()
    assert notes[0] == ("lambda down", "advantages negative in each of 3 updates, mean -0.200 of their deviation", 0.94)


def test_rests_between_two_moves():
    values = told(always(), -0.2, 0.9, updates=9)
    assert values == [0.95, 0.95, 0.94, 0.94, 0.94, 0.93, 0.93, 0.93, 0.92]


def test_goes_up_where_credit_does_not_reach_back():
    aid = always()
    told(aid, 0.1, 0.2, updates=3)
    values = told(aid, 0.1, 0.2, updates=12)
    assert values[-1] == 0.97
    assert {action for action, _, _ in aid.take_notes()} == {"lambda up"}


@pytest.mark.parametrize(("advantage", "reached"), [(-0.2, 0.2), (0.1, 0.9), (-0.01, 0.9)])
def test_stays_where_no_rule_or_both_hold(advantage, reached):
    aid = always()
    told(aid, advantage, reached, updates=3)
    assert set(told(aid, advantage, reached, updates=12)) == {0.95}


def test_one_positive_update_breaks_the_rule():
    aid = always()
    for _ in range(8):
        told(aid, -0.5, 0.9, updates=2)
        told(aid, 0.01, 0.9)
    assert aid.value == 0.95


def test_a_run_of_its_own_lambda_beyond_the_limits_starts_within_them():
    aid = DynamicLambda(AidOptions(patience=1), PpoOptions(gae_lambda=0.8))
    assert aid.value == 0.8
    told(aid, 0.0, 0.9, warnings=[warning("advantage mean", 0.9, 0.5)])
    assert aid.active
    assert aid.value == 0.92


def test_returns_to_the_runs_own_when_the_remedy_ends():
    options = AidOptions(patience=1, calm=2, lambda_updates=2)
    aid = DynamicLambda(options, PpoOptions(gae_lambda=0.95))
    told(aid, -0.9, 0.9, updates=6, warnings=[warning("advantage mean", 0.9, 0.5)])
    assert aid.value < 0.94
    values = told(aid, 0.1, 0.9, updates=8)
    assert values[-1] == 0.95
    assert not aid.active
    actions = [action for action, _, _ in aid.take_notes()]
    assert actions[0] == "start"
    assert "end" in actions
    assert actions[-1] == "lambda up"


def test_a_critic_that_the_warm_up_left_poor_starts_it():
    aid = DynamicLambda(AidOptions(), PpoOptions())
    aid.warmed_up([warning("critic mean absolute error", 0.45, 0.32, gate="2")])
    assert aid.active
    assert aid.take_notes() == [("start", "gate 2: critic mean absolute error 0.45 above 0.32", 1.0)]


def test_state_goes_on_where_it_was():
    aid = always()
    told(aid, -0.2, 0.9, updates=4)
    again = copied(aid, always())
    assert again.state() == aid.state()
    assert told(again, -0.2, 0.9, updates=6) == told(aid, -0.2, 0.9, updates=6)
