"""Parts of a training that do not fit each other are refused before the first step."""

from dataclasses import replace
from threading import Event, Thread
from types import SimpleNamespace

import numpy as np
import pytest

from agentpipe.errors import CheckpointError, LearningError, LockHeldError, NonFiniteError, SimulationError
from agentpipe.learning import checkpoint as checkpoints
from agentpipe.learning import fits
from agentpipe.learning.cloning.demonstrations import Demonstrations
from agentpipe.learning.options import NetworkOptions, PpoOptions
from agentpipe.learning.policy.normalisation import ObservationStatistics
from agentpipe.learning.trainer import train
from agentpipe_tests.learning.test_trainer import run
from agentpipe_tests.learning.tiny import ACTION_NAMES, ACTIONS, NAMES, WIDTH, TinyPool, tiny_options, tiny_statistics


def demonstrated(width=WIDTH, actions=ACTIONS):
    none = np.zeros(2, np.int64)
    return Demonstrations(
        np.zeros((2, width), np.float32), none + actions, np.zeros(2, np.float32), np.ones((2, actions), np.bool_),
        none, np.zeros(2, np.float32), none + 1, np.zeros(2, np.bool_),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"demonstrations": demonstrated(width=WIDTH - 1)}, "demonstrations.observation"),
        ({"demonstrations": demonstrated(actions=ACTIONS + 1)}, "demonstrations.mask"),
        ({"action_names": ACTION_NAMES[:-1]}, "action_names"),
        ({"action_names": (*ACTION_NAMES[:-1], ACTION_NAMES[0])}, "action_names"),
        ({"pool": TinyPool(0)}, "pool"),
    ],
)
def test_a_part_of_another_size_is_refused(tmp_path, changes, field):
    given = {"pool": TinyPool(), "action_names": ACTION_NAMES, **changes}
    with pytest.raises(LearningError) as caught:
        train(statistics=tiny_statistics(), options=tiny_options(), directory=tmp_path / "run", **given)
    assert caught.value.where["field"] == field
    assert not (tmp_path / "run").exists()


def named(names, size=4):
    pool = TinyPool(size)
    pool.names = names
    return pool


@pytest.mark.parametrize(
    "names",
    [("a", "b", "c"), ("a", "b", "c", "d", "e"), ("a", "b", "c", 4), ("a", "b", "c", "\ud800"), ("a\n", *"bcd")],
)
def test_each_environment_has_a_name_that_can_be_shown(tmp_path, names):
    with pytest.raises(LearningError) as caught:
        run(tmp_path / "run", pool=named(names))
    assert caught.value.where == {"field": "names"}
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("odd", ["text", None, 1j, np.datetime64("2026-01-01"), np.longdouble(1)])
def test_a_snapshot_that_no_checkpoint_can_keep_is_refused_before_the_first_step(tmp_path, odd):
    pool = TinyPool()
    whole = pool.snapshot
    pool.snapshot = lambda: {**whole(), "odd": np.array([odd])}
    with pytest.raises(LearningError, match="a checkpoint cannot keep odd") as caught:
        run(tmp_path / "run", pool=pool)
    assert caught.value.where == {"field": "snapshot"}
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("observation", [None, [[1.0]], np.zeros(64, np.float32)])
def test_a_pool_without_a_table_of_observations_is_refused(tmp_path, observation):
    pool = TinyPool()
    pool.observation = observation
    with pytest.raises((LearningError, SimulationError)) as caught:
        run(tmp_path / "run", pool=pool)
    assert caught.value.where["field"] in {"observation", "statistics"}


def test_arrays_are_looked_at_before_the_first_step(tmp_path):
    pool = TinyPool()
    pool.last_action = pool.last_action.astype(np.int32)
    with pytest.raises(SimulationError, match=r"last_action is int32\[64\], expected int64\[64\]"):
        run(tmp_path / "run", pool=pool)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (replace(tiny_options(), ppo=PpoOptions(rollout_steps=1_000_000)), "rollout_steps"),
        (tiny_options(network=NetworkOptions(hidden=(16_384,) * 16)), "hidden"),
    ],
)
def test_a_training_that_memory_cannot_hold_is_refused_before_the_first_step(tmp_path, monkeypatch, options, field):
    given = {"total": 10 * 10**9}
    monkeypatch.setattr(fits.psutil, "virtual_memory", lambda: SimpleNamespace(**given))
    with pytest.raises(LearningError, match=r"takes more than .* GB of memory") as caught:
        run(tmp_path / "run", options, TinyPool(512))
    assert caught.value.where == {"field": field}
    assert not (tmp_path / "run").exists()
    given["total"] = 10**15
    fits.require_room(options, 512, WIDTH, ACTIONS)


def test_a_containers_limit_counts(tmp_path, monkeypatch):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(fits, "_CGROUP", limit)
    fits.require_room(tiny_options(), 64, WIDTH, ACTIONS)
    limit.write_text("max\n")
    fits.require_room(tiny_options(), 64, WIDTH, ACTIONS)
    limit.write_text("1000\n")
    with pytest.raises(LearningError, match=r"this machine has 0\.0 GB"):
        fits.require_room(tiny_options(), 64, WIDTH, ACTIONS)


def test_statistics_of_other_observations_are_refused(tmp_path):
    other = ObservationStatistics.empty(NAMES[:3])
    with pytest.raises(LearningError, match=f"statistics: 3 columns or names, the pool has {WIDTH}"):
        train(TinyPool(), other, tiny_options(), directory=tmp_path, action_names=ACTION_NAMES)


def test_weights_are_not_started_from_under_other_statistics(tmp_path):
    parent = run(tmp_path / "parent", tiny_options(budget_steps=512)).package
    other = tiny_statistics()
    other.mean = other.mean + 1.0
    with pytest.raises(LearningError, match="other observation statistics"):
        train(
            TinyPool(), other, tiny_options(), directory=tmp_path / "child", initial=parent, action_names=ACTION_NAMES
        )


@pytest.mark.parametrize("field", ["environments", "action_names"])
def test_a_run_goes_on_as_the_run_it_was(tmp_path, field):
    run(tmp_path, tiny_options(budget_steps=512))
    found, pool, names = checkpoints.latest(tmp_path / "checkpoints"), TinyPool(), list(ACTION_NAMES)
    if field == "environments":
        pool.names = tuple(reversed(pool.names))
    else:
        names.reverse()
    with pytest.raises(CheckpointError) as caught:
        run(tmp_path, tiny_options(budget_steps=512), pool, resume=found, action_names=names)
    assert caught.value.where["field"] == field


def test_two_trainings_do_not_share_a_directory(tmp_path):
    """The second one is told who is there; the first one ends as it would have, and the directory is free again."""
    begun, go_on, ended = Event(), Event(), []

    def wait(stage, *_):
        if stage == "training":
            begun.set()
            go_on.wait(60)

    first = Thread(target=lambda: ended.append(run(tmp_path, tiny_options(budget_steps=512), progress=wait)))
    first.start()
    try:
        assert begun.wait(60)
        with pytest.raises(LockHeldError, match="held by a training of 512 steps"):
            run(tmp_path, tiny_options(budget_steps=512))
    finally:
        go_on.set()
        first.join()
    again = run(tmp_path, tiny_options(budget_steps=512))
    assert [result.package.digest for result in ended] == [again.package.digest]


@pytest.mark.parametrize("encoder", ["fusion", "mlp"])
def test_a_time_that_is_no_number_is_named_by_every_encoder(tmp_path, encoder):
    class Breaks(TinyPool):
        def step(self, actions):
            super().step(actions)
            if self.episode[0] == 2:
                self.time[5] = np.nan

    options = tiny_options()
    options = replace(options, network=replace(options.network, encoder=encoder))
    with pytest.raises(NonFiniteError) as caught:
        run(tmp_path, options, Breaks())
    assert caught.value.where == {"environment": "tiny-5", "field": "time", "step": 8}


@pytest.mark.parametrize("segment", [-1, 4])
def test_an_unknown_segment_is_named(tmp_path, segment):
    class Breaks(TinyPool):
        def _look(self):
            self.segment[3] = self.segment[4]  # the mask is that of a known one
            super()._look()
            if self.episode[3] == 2:
                self.segment[3] = segment

        def step(self, actions):
            self.segment[3] = self.segment[4]
            super().step(actions)

    with pytest.raises(SimulationError, match=f"unknown segment {segment}") as caught:
        run(tmp_path, pool=Breaks())
    assert caught.value.where == {"environment": "tiny-3", "field": "segment", "step": 8}


@pytest.mark.parametrize(
    "declared",
    [
        SimpleNamespace(n=4),
        SimpleNamespace(low=None, high=1.0),
        SimpleNamespace(low=np.full(WIDTH, np.nan), high=np.ones(WIDTH)),
    ],
)
def test_a_space_without_bounds_is_refused(tmp_path, declared):
    pool = TinyPool()
    pool.observation_space = declared
    with pytest.raises(SimulationError) as caught:
        run(tmp_path, pool=pool)
    assert caught.value.where == {"field": "observation_space"}
