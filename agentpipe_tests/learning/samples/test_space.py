"""Observations are held against the space that a pool declares: the first one outside is named."""

from types import SimpleNamespace

import numpy as np
import pytest

from agentpipe.environments.catalog import load_catalog
from agentpipe.environments.datafiles import data_dir
from agentpipe.environments.layout import ACTION_COUNT, OBSERVATION_NAMES, OBSERVATION_SIZE, Purpose
from agentpipe.environments.line_profile import default_profile
from agentpipe.environments.pool import build_pool
from agentpipe.environments.table import load_table
from agentpipe.errors import NonFiniteError, SimulationError
from agentpipe.learning.options import NetworkOptions
from agentpipe.learning.policy.network import PolicyNetwork
from agentpipe.learning.samples.rollout import Rollout, collect
from agentpipe.learning.samples.space import Space, declared_space
from agentpipe.learning.trainer import train
from agentpipe.learning.workers import Workers
from agentpipe_tests.learning.gradient.test_ppo import network
from agentpipe_tests.learning.tiny import ACTION_NAMES, ACTIONS, WIDTH, TinyPool, tiny_options, tiny_statistics

NAMES = ("one", "two")


def space(low=-1.0, high=1.0):
    return Space(np.full(3, low, np.float32), np.full(3, high, np.float32))


def observation(**changes):
    array = np.zeros((2, 3), np.float32)
    for place, value in changes.items():
        array[int(place[1]), int(place[2])] = value
    return array


def test_bounds_belong_to_the_space():
    space().check(observation(p00=-1.0, p12=1.0), 0, NAMES)


@pytest.mark.parametrize(("value", "text"), [(1.5, "1.5 is above 1"), (-1.0001, "-1.0001 is below -1")])
def test_first_value_outside_is_named(value, text):
    with pytest.raises(SimulationError, match=text) as caught:
        space().check(observation(p02=value, p11=9.0), 7, NAMES)
    assert caught.value.where == {"environment": "one", "field": "observation 2", "step": 7}
    assert not isinstance(caught.value, NonFiniteError)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("bound", [1.0, np.inf])
def test_what_is_not_finite_is_outside_every_space(value, bound):
    declared = SimpleNamespace(low=np.full(3, -bound), high=np.full(3, bound))
    found = declared_space(SimpleNamespace(observation=observation(), observation_space=declared))
    with pytest.raises(NonFiniteError) as caught:
        found.check(observation(p11=value), 3, NAMES)
    assert caught.value.where == {"environment": "two", "field": "observation 1", "step": 3}


def test_a_pool_may_declare_nothing():
    assert declared_space(SimpleNamespace(observation=observation())) is None


def test_a_space_of_another_size_is_refused():
    declared = SimpleNamespace(low=np.zeros(4), high=np.ones(4))
    with pytest.raises(SimulationError, match=r"a space of \(4,\) is declared for observations of 3 features"):
        declared_space(SimpleNamespace(observation=observation(), observation_space=declared))


class Declared(TinyPool):
    """A pool that says what it shows, and from the third episode on shows more."""

    def __init__(self, size=64, *, truncating=False):
        self.observation_space = SimpleNamespace(low=np.full(WIDTH, -4.0), high=np.full(WIDTH, 4.0))
        super().__init__(size, truncating=truncating)

    def step(self, actions):
        super().step(actions)
        if self.episode[0] >= 2:
            field = "final_observation" if self.truncating else "observation"
            getattr(self, field)[5, 2] = 4.5


@pytest.mark.parametrize("truncating", [False, True])
def test_collecting_stops_at_the_first_observation_outside(truncating):
    net, rollout = network(), Rollout(12, 8, network().encoded_size, ACTIONS)
    with pytest.raises(SimulationError, match=r"4\.5 is above 4") as caught:
        collect(Declared(8, truncating=truncating), net, rollout, np.random.default_rng(0), Workers(1), step=100)
    where = {"environment": "tiny-5", "field": "observation 2", "step": 107 if truncating else 108}
    assert caught.value.where == where


def test_the_built_in_line_is_held_against_its_own_bounds():
    """Ten minutes more than any order can last, in the third environment."""
    environments = load_catalog().spread("train", 5)
    pool = build_pool(
        environments, load_table(data_dir() / "disturbances.csv"), default_profile(), seed=0, purpose=Purpose.TRAIN
    )
    elapsed = OBSERVATION_NAMES.index("clock.elapsed")
    pool.observation[2, elapsed] = pool.observation_space.high[elapsed] + 10
    net = PolicyNetwork(OBSERVATION_SIZE, ACTION_COUNT, NetworkOptions(hidden=(8,)))
    rollout = Rollout(2, 5, net.encoded_size, ACTION_COUNT)
    with pytest.raises(SimulationError, match="40 is above 30") as caught:
        collect(pool, net, rollout, np.random.default_rng(0), Workers(1))
    name = environments[2].environment_id
    assert caught.value.where == {"environment": name, "field": "observation clock.elapsed", "step": 0}


def test_training_keeps_the_last_good_checkpoint(tmp_path):
    options = tiny_options(budget_steps=10**6, checkpoint_every=1)
    with pytest.raises(SimulationError, match="the last checkpoint is good"):
        train(Declared(), tiny_statistics(), options, directory=tmp_path, action_names=ACTION_NAMES)
    kept = [path.name[:13] for path in (tmp_path / "checkpoints").iterdir() if path.is_dir()]
    assert kept == ["update-000001"]
