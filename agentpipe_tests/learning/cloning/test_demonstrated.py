"""Cloning recorded episodes: it learns, judges by what it did not learn from, and stops in time."""

import numpy as np
import pytest
import torch

from agentpipe.errors import LearningError, NonFiniteError
from agentpipe.learning.aids.options import DemonstrationOptions
from agentpipe.learning.cloning.demonstrated import _batch, _Loss, _split, clone_demonstrations
from agentpipe.learning.cloning.demonstrations import Demonstrations
from agentpipe.learning.gates import warm_up_gate
from agentpipe.learning.gradient.rewards import accumulated
from agentpipe.learning.options import GateOptions, NetworkOptions
from agentpipe.learning.policy.package import PolicyPackage
from agentpipe.learning.state import TrainingState
from agentpipe.learning.trainer import train
from agentpipe.learning.workers import Workers, single_threaded_torch
from agentpipe_tests.learning.recorded import tiny_shard
from agentpipe_tests.learning.tiny import (
    ACTION_NAMES,
    ACTIONS,
    NAMES,
    SEGMENTS,
    TinyExpert,
    TinyPool,
    tiny_options,
    tiny_score,
    tiny_statistics,
)

OPTIONS = DemonstrationOptions(epochs=40, minibatch=32, learning_rate=3e-3)


def demonstrations(episodes=60, player=None, paid=True, **changes):
    """Episodes of four steps in the tiny pool, by its expert unless another player is given."""
    shard = tiny_shard(1, episodes, player=player or TinyExpert())
    records = shard.records
    columns = {
        "observation": records["observation"].copy(),
        "last_action": records["last_action"].astype(np.int64),
        "time": records["time"].copy(),
        "mask": shard.unpack_masks(records["mask"]),
        "action": records["action"].astype(np.int64),
        "reward": records["reward"].copy(),
        "length": np.full(episodes, SEGMENTS),
        "paid": np.broadcast_to(np.asarray(paid), (episodes,)).copy(),
    }
    return Demonstrations(**{**columns, **changes})


def state_of(**network):
    options = tiny_options(network=NetworkOptions((16, 16), 4, 2, activation="tanh", **network))
    return TrainingState(tiny_statistics(), ACTIONS, 8, options)


def clone(found, options=OPTIONS, state=None, threads=1):
    state = state or state_of()
    with single_threaded_torch(), Workers(threads) as workers:
        return clone_demonstrations(found, state, options, state.options.ppo, workers), state


def score(state):
    return tiny_score(PolicyPackage(state.network, state.statistics, NAMES, ACTION_NAMES))


def test_sixty_episodes_of_the_expert_are_enough_for_the_tiny_pool():
    figures, state = clone(demonstrations())
    assert score(state) > 0.85
    assert figures.accuracy > 0.8
    assert figures.episodes == 60
    assert figures.samples % (54 * SEGMENTS) == 0
    assert figures.expert.startswith("demonstrations ")


def test_nothing_is_learned_from_decisions_at_random():
    """Negative control: the same episodes with actions that have nothing to do with what was seen."""
    found = demonstrations()
    generator = np.random.default_rng(0)
    random = found.action // 3 * 3 + generator.integers(0, 3, len(found.action))
    _, state = clone(demonstrations(action=random))
    assert score(state) < 0.6


def test_the_critic_learns_the_scaled_returns():
    """Every step of the expert earns 1: G is 1, 1.9, 2.71, 3.439 backwards, over the deviation of the returns."""
    state = state_of()
    found = demonstrations()
    batch, paid = _batch(found, state, 0.9)
    assert paid.all()
    seen = np.array([1.0, 1.9, 2.71, 3.439])
    np.testing.assert_allclose(batch.returns[:4].numpy(), seen[::-1] / seen.std(), rtol=1e-5)
    figures, _ = clone(found)
    assert figures.critic_mae < 0.3


@pytest.mark.parametrize("memory", [0, 5])
def test_gradient_of_paid_and_unpaid_steps_together_is_that_of_one_mean(memory):
    """Against autograd, for a minibatch in which some steps have no return."""
    state, paid = state_of(memory=memory), np.arange(60) % 3 > 0
    batch, known = _batch(demonstrations(paid=paid), state, 0.9)
    rows = torch.arange(0, 240, 5)
    net = state.network
    with Workers(1) as workers:
        _Loss(net, 0.5, known, workers)(batch, rows)
    fused = {name: parameter.grad.clone() for name, parameter in net.policy_parameters()}
    net.zero_grad()
    logits, value = net.heads(batch.encoded[rows], batch.last_action[rows], batch.mask[rows])
    decided = torch.nn.functional.cross_entropy(logits, batch.action[rows])
    error = (value - batch.returns[rows]) * known[rows]
    (decided + 0.5 * 0.5 * error.square().mean()).backward()
    for name, parameter in net.policy_parameters():
        torch.testing.assert_close(fused[name], parameter.grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("paid", [False, np.arange(60) % 2 == 0])
def test_decisions_without_rewards_teach_the_actor(paid):
    figures, state = clone(demonstrations(paid=paid))
    assert score(state) > 0.85
    gate = [figure.name for figure in warm_up_gate(figures, GateOptions())]
    if paid is False:  # nothing was there to learn a value from: that is no pass
        assert figures.critic_mae is None
        assert gate == ["actor loss", "gradient norm median"]
    else:
        assert np.isfinite(figures.critic_mae)
        assert gate == ["actor loss", "critic mean absolute error", "gradient norm median"]


def test_episodes_are_held_out_whole():
    learned, held = _split(demonstrations(57), 0.1, torch.Generator().manual_seed(0))
    assert len(learned) + len(held) == 57 * SEGMENTS
    assert set((learned // SEGMENTS).tolist()).isdisjoint((held // SEGMENTS).tolist())
    assert len(held) == 6 * SEGMENTS


def test_what_is_held_out_is_never_learned():
    """The decisions of the held-out episodes are turned round: not a bit of what is learned changes."""
    weights = []
    for turned in (False, True):
        state, found = state_of(), demonstrations()
        held = _split(found, 0.1, torch.Generator().manual_seed(0))[1].numpy()
        if turned:
            found.action[held] = found.action[held] // 3 * 3 + (found.action[held] + 1) % 3
        state.generator = torch.Generator().manual_seed(0)
        learned = []
        options = DemonstrationOptions(epochs=2, patience=9, minibatch=32, learning_rate=3e-3)
        with single_threaded_torch(), Workers(1) as workers:
            clone_demonstrations(
                found,
                state,
                options,
                state.options.ppo,
                workers,
                lambda *_: learned.append(state.version()),  # noqa: B023 - called before the next turn
            )
        weights.append(learned)
    assert weights[0] == weights[1]


def test_stops_in_time_and_keeps_the_best_epoch():
    """Four decisions in ten are at random: learning those by heart makes the held-out loss worse from some epoch on."""
    found, generator, told = demonstrations(), np.random.default_rng(0), []
    random = found.action // 3 * 3 + generator.integers(0, 3, len(found.action))
    random = np.where(generator.random(len(random)) < 0.4, random, found.action)
    state = state_of()
    options = DemonstrationOptions(epochs=200, patience=3, minibatch=16, learning_rate=1e-2)
    with single_threaded_torch(), Workers(1) as workers:
        figures = clone_demonstrations(
            demonstrations(action=random),
            state,
            options,
            state.options.ppo,
            workers,
            lambda _, done, total, note: told.append((done, total, float(note.split()[2].rstrip(",")))),
        )
    losses = [loss for _, _, loss in told]
    best = int(np.argmin(losses))
    assert best > 0
    assert len(told) == best + 1 + 3 < 200
    assert figures.actor_loss == pytest.approx(min(losses), abs=5e-4)


@pytest.mark.parametrize("network", [{}, {"memory": 5}, {"perception": 4}, {"encoder": "mlp", "actor_head": "unit"}])
def test_every_network_can_be_taught_on_any_number_of_threads(network):
    options = DemonstrationOptions(epochs=3, minibatch=32)
    (one, state), (two, other) = (clone(demonstrations(), options, state_of(**network), n) for n in (1, 2))
    assert one == two
    assert state.version() == other.version()
    assert one.actor_loss < np.log(3)


def test_weights_stay_where_no_epoch_is_better():
    """Decisions at random, learned at once by heart: the held-out loss is never lower than before."""
    found, state = demonstrations(), state_of()
    before = state.version()
    random = found.action // 3 * 3 + np.random.default_rng(0).integers(0, 3, len(found.action))
    options = DemonstrationOptions(epochs=9, patience=2, minibatch=4, learning_rate=0.1)
    clone(demonstrations(action=random), options, state)
    assert state.version() == before


def test_accumulated_is_the_discounted_sum_so_far():
    values, length = np.array([1.0, 2.0, 4.0, 8.0, 16.0]), np.array([3, 2])
    assert accumulated(values, length, 0.5).tolist() == [1.0, 2.5, 5.25, 8.0, 20.0]


def test_one_episode_is_refused_and_two_are_not():
    with pytest.raises(LearningError, match="one episode"):
        clone(demonstrations(1))
    clone(demonstrations(2), DemonstrationOptions(epochs=1, minibatch=64))


def test_a_value_that_is_not_finite_stops_before_the_step():
    found = demonstrations()
    found.reward[:] = np.float32(3e38)
    state = state_of()
    state.network.actor_head.bias.data[0] = np.nan
    with pytest.raises(NonFiniteError):
        clone(found, state=state)


# -- in a training -------------------------------------------------------------------------------------------------


def trained(folder, found=None, budget=512, **changes):
    options = tiny_options(budget_steps=budget, checkpoint_every=2, demonstrations=OPTIONS)
    given = {"demonstrations": found or demonstrations(), **changes}
    return train(TinyPool(), tiny_statistics(), options, directory=folder, action_names=ACTION_NAMES, **given)


def test_a_training_begins_with_the_demonstrations_it_is_given(tmp_path):
    result = trained(tmp_path, validate=tiny_score)
    assert result.warm_up.episodes == 60
    assert result.warm_up.expert == f"demonstrations {demonstrations().digest[:12]}"
    assert result.validations[0][0] == 0
    assert result.validations[0][1] > 0.85  # before the first update
    assert {figure.gate for figure in result.gates} >= {"2", "4"}


def test_demonstrations_come_before_an_expert_and_after_an_initial_policy(tmp_path):
    class NeverAsked:
        name = "never asked"

    first = trained(tmp_path / "first", expert=NeverAsked())
    other = trained(tmp_path / "other", initial=first.package)
    assert other.warm_up is None


def test_a_training_that_began_with_demonstrations_goes_on_bit_for_bit(tmp_path):
    whole = trained(tmp_path / "whole", budget=512 * 4)
    asked = iter([False, True])
    part = trained(tmp_path / "part", budget=512 * 4, stop=lambda: next(asked))
    assert part.updates == 1
    again = trained(tmp_path / "part", budget=512 * 4, resume=part.checkpoint)
    assert again.package.digest == whole.package.digest
    assert again.warm_up == whole.warm_up
