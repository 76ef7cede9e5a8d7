"""agentpipe/ProductionLine-v0 as Gymnasium sees it: its own checks, its vector conventions, its spec."""

from __future__ import annotations

import subprocess
import sys
import threading
import warnings

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from agentpipe.environments.gym_env import COPY_STRIDE, ProductionLineEnv, ProductionLineVectorEnv
from agentpipe.environments.layout import (
    A_CLOSE,
    A_MACHINE,
    A_MODE,
    ACTION_COUNT,
    OBSERVATION_NAMES,
    PHYSICAL_MODES,
    REASONS,
    SEGMENTS,
    Purpose,
)
from agentpipe.environments.line_profile import save_profile
from agentpipe.environments.players import OraclePlayer
from agentpipe.environments.registration import ENVIRONMENT_ID, register_environments
from agentpipe.errors import ActionError, CatalogError, NonFiniteError, SimulationError
from agentpipe_tests.environments.line import catalog, four_mode_profile, make_pool, table

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture
def env():
    made = gymnasium.make(ENVIRONMENT_ID, cell="network-4")
    made.action_space.seed(0)
    yield made
    made.close()


@pytest.fixture
def vec():
    made = gymnasium.make_vec(ENVIRONMENT_ID, num_envs=6, cell="sensor-2", vectorization_mode="vector_entry_point")
    made.action_space.seed(0)
    yield made
    made.close()


def same(first, second, path=""):
    """Equal in structure, type, dtype and every bit."""
    assert type(first) is type(second), path
    if isinstance(first, dict):
        assert first.keys() == second.keys(), path
        for key in first:
            same(first[key], second[key], f"{path}.{key}")
    elif isinstance(first, tuple | list) or (isinstance(first, np.ndarray) and first.dtype == object):
        assert len(first) == len(second)
        for index, (one, other) in enumerate(zip(first, second, strict=True)):
            same(one, other, f"{path}[{index}]")
    elif isinstance(first, np.ndarray):
        assert first.dtype == second.dtype, path
        assert np.array_equal(first, second), path
    else:
        assert first == second, path


# Gymnasium's own checks.


@pytest.mark.parametrize("options", [{}, {"cell": "load-5"}, {"split": "validation", "illegal_actions": "replace"}])
def test_gymnasiums_checker_has_nothing_to_say(options):
    env = gymnasium.make(ENVIRONMENT_ID, **options)
    check_env(env.unwrapped)
    env.close()


def test_gymnasiums_passive_checker_watches_a_whole_episode_without_a_warning(env):
    _, info = env.reset(seed=3)
    over = False
    while not over:
        observation, reward, terminated, truncated, info = env.step(env.action_space.sample(mask=info["action_mask"]))
        over = terminated or truncated
        assert observation in env.observation_space
        assert isinstance(reward, float)
    assert info["outcome"]["reason"] in REASONS


def test_box_is_finite_and_has_a_side_for_every_feature(env):
    space = env.observation_space
    assert space.shape == (len(OBSERVATION_NAMES),)
    assert space.is_bounded()
    assert (space.low < space.high).all()
    assert env.action_space.n == ACTION_COUNT


def test_vector_spaces_are_the_batched_single_ones(vec, env):
    assert vec.single_observation_space == env.observation_space
    assert vec.single_action_space == env.action_space
    assert vec.observation_space == gymnasium.vector.utils.batch_space(env.observation_space, 6)
    assert vec.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    observations, infos = vec.reset(seed=1)
    for _ in range(100):
        assert observations in vec.observation_space
        observations, rewards, terminated, truncated, infos = vec.step(
            vec.action_space.sample(mask=tuple(infos["action_mask"]))
        )
        assert (rewards.dtype, terminated.dtype, truncated.dtype) == (np.float64, np.bool_, np.bool_)


def test_gymnasiums_statistics_wrappers_work(vec, env):
    wrapped = gymnasium.wrappers.vector.RecordEpisodeStatistics(vec)
    wrapped.reset(seed=1)
    lengths = []
    for _ in range(80):
        *_, infos = wrapped.step(wrapped.action_space.sample())
        lengths += infos["episode"]["l"][infos["_episode"]].tolist() if "episode" in infos else []
    assert lengths
    assert max(lengths) <= 64
    gymnasium.wrappers.RecordEpisodeStatistics(env).reset(seed=1)


# One against many.


@pytest.mark.parametrize("legal", [True, False], ids=["legal actions", "any actions"])
def test_the_vector_environment_equals_gymnasiums_own_over_single_ones(vec, legal):
    """Observations, rewards, flags, infos, final observations and final infos: every bit, over many episodes."""
    names = vec.unwrapped.environment_ids
    makers = [lambda name=name: gymnasium.make(ENVIRONMENT_ID, environment_id=name) for name in names]
    reference = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)
    ours, theirs = vec.reset(seed=4), reference.reset(seed=[4] * 6)
    same(ours, theirs)
    ended = 0
    for _ in range(200):
        mask = tuple(ours[-1]["action_mask"]) if legal else None
        actions = vec.action_space.sample(mask=mask)
        ours, theirs = vec.step(actions), reference.step(actions)
        same(ours, theirs)
        ended += (ours[2] | ours[3]).sum()
    assert ended > 30
    same(vec.reset(), reference.reset())
    same(vec.reset(options={"episode": 9}), reference.reset(options={"episode": 9}))
    reference.close()


def test_a_row_equals_the_pool_under_the_same_seed(vec):
    observations, infos = vec.reset(seed=12)
    environments = [catalog().environment(name) for name in vec.unwrapped.environment_ids]
    pool = make_pool(environments, seed=12, purpose=Purpose.TRAIN)
    for _ in range(60):
        assert observations.tobytes() == pool.observation.tobytes()
        assert np.array_equal(infos["action_mask"].astype(bool), pool.mask)
        actions = OraclePlayer().act(pool).actions
        pool.step(actions)
        observations, rewards, *_, infos = vec.step(actions)
        assert np.array_equal(rewards, pool.reward.astype(np.float64))


def test_final_observation_is_a_copy_that_the_next_step_does_not_touch(vec):
    _, infos = vec.reset(seed=0)
    for _ in range(200):
        *_, infos = vec.step(vec.action_space.sample(mask=tuple(infos["action_mask"])))
        if "final_obs" in infos:
            break
    row = int(np.flatnonzero(infos["_final_obs"])[0])
    kept, outcome = infos["final_obs"][row].copy(), dict(infos["final_info"]["outcome"])
    for _ in range(20):
        vec.step(vec.action_space.sample())
    assert np.array_equal(infos["final_obs"][row], kept)
    assert outcome["decisions"][row] >= 1
    assert outcome["reason"][row] in REASONS
    assert [infos["final_obs"][other] is None for other in np.flatnonzero(~infos["_final_obs"])] == [True] * (
        6 - infos["_final_obs"].sum()
    )


def test_sync_and_async_vectorisation_work_too():
    options = {"environment_id": "t0001.load-2", "num_envs": 2}
    for mode, kind in (("sync", SyncVectorEnv), ("async", AsyncVectorEnv)):
        made = gymnasium.make_vec(ENVIRONMENT_ID, vectorization_mode=mode, **options)
        assert isinstance(made, kind)
        made.reset(seed=1)
        made.step(made.action_space.sample())
        made.close()


# Seeds and episodes.


def test_a_seed_begins_episode_zero_and_each_reset_the_next(env):
    first = env.reset(seed=5)[0]
    second = env.reset()[0]
    assert not np.array_equal(first, second)
    assert np.array_equal(env.reset(seed=5)[0], first)
    assert np.array_equal(env.reset()[0], second)
    assert np.array_equal(env.reset(options={"episode": 1})[0], second)
    assert np.array_equal(env.reset(options={"episode": 0})[0], first)
    assert np.array_equal(env.reset()[0], second)
    assert not np.array_equal(env.reset(seed=6)[0], first)


def test_without_a_seed_two_environments_differ_and_huge_seeds_work():
    first, second = (ProductionLineEnv("t0001.load-2") for _ in range(2))
    assert not np.array_equal(first.reset()[0], second.reset()[0])
    assert np.array_equal(first.reset(seed=2**70 + 3)[0], second.reset(seed=2**70 + 3)[0])


def test_a_part_of_the_rows_can_be_reset(vec):
    observations, infos = vec.reset(seed=2)
    for _ in range(3):
        observations, *_, infos = vec.step(vec.action_space.sample(mask=tuple(infos["action_mask"])))
    chosen = np.array([True, False] * 3)
    after, infos = vec.reset(options={"reset_mask": chosen, "episode": 40})
    assert np.array_equal(after[~chosen], observations[~chosen])
    assert np.array_equal(after[chosen], vec.reset(options={"episode": 40})[0][chosen])


def test_copies_of_one_environment_play_other_episodes():
    vec = ProductionLineVectorEnv(3, "t0001.load-2", threads=2)
    single = ProductionLineEnv("t0001.load-2")
    observations, _ = vec.reset(seed=8)
    for row in range(3):
        expected, _ = single.reset(seed=8, options={"episode": row * COPY_STRIDE})
        assert np.array_equal(observations[row], expected)
    vec.close()


def test_environments_are_spread_over_cell_and_split():
    vec = ProductionLineVectorEnv(10, cell="network-1", split="validation")
    chosen = [catalog().environment(name) for name in vec.environment_ids]
    assert {(e.cell, e.split) for e in chosen} == {("network-1", "validation")}
    assert len({e.template for e in chosen}) == 10
    assert vec.single_observation_space.shape == (len(OBSERVATION_NAMES),)


def test_table_profile_purpose_and_off_reach_the_line(tmp_path):
    name = "t0001.load-2"
    plain = ProductionLineEnv(name).reset(seed=1)[0]
    given = ProductionLineEnv(name, table=table(), purpose="TRAIN").reset(seed=1)[0]
    assert np.array_equal(plain, given)
    save_profile(four_mode_profile(), tmp_path / "profile.json")
    for options in ({"purpose": "report"}, {"off": ("sensor", "load")}):
        assert not np.array_equal(plain, ProductionLineEnv(name, **options).reset(seed=1)[0])
    for given in (four_mode_profile(), tmp_path / "profile.json", str(tmp_path / "profile.json")):
        env = ProductionLineEnv(name, profile=given)
        env.reset(seed=1)
        mask = env.step(A_MACHINE)[-1]["action_mask"]
        assert mask[A_MODE : A_MODE + PHYSICAL_MODES].tolist() == [1, 1, 1, 1, 0, 0, 0]


# Infos.


def test_infos_name_mask_segment_last_action_and_time(env):
    _, info = env.reset(seed=1)
    assert set(info) == {"action_mask", "segment", "last_action", "time", "illegal_action"}
    assert info["action_mask"].dtype == np.int8
    assert (SEGMENTS[info["segment"]], info["last_action"], info["time"]) == ("identify", ACTION_COUNT, 0.0)
    *_, info = env.step(2)
    assert info["last_action"] == 2
    assert 0 < info["time"] < 1
    assert info["illegal_action"] is False


def test_an_illegal_action_is_replaced_by_the_lowest_allowed_one_and_said_so():
    usual, strict = ProductionLineEnv("t0001.load-2"), ProductionLineEnv("t0001.load-2", illegal_actions="raise")
    for env in (usual, strict):
        env.reset(seed=1)
    observation, *_, info = usual.step(A_CLOSE)
    assert info["illegal_action"] is True
    assert info["last_action"] == 0
    with pytest.raises(ActionError, match=r"close.*not allowed"):
        strict.step(A_CLOSE)
    same(observation, strict.step(0)[0])  # nothing had changed


@pytest.mark.parametrize("action", [-1, ACTION_COUNT, 1.0, None])
def test_what_is_no_action_at_all_is_refused(env, action):
    env.reset(seed=1)
    with pytest.raises(ActionError):
        env.unwrapped.step(action)


@pytest.mark.parametrize("actions", [np.zeros(5, np.int64), np.zeros(6), np.full(6, -1)])
def test_vector_actions_of_another_shape_type_or_range_are_refused(vec, actions):
    vec.reset(seed=1)
    with pytest.raises(ActionError):
        vec.step(actions)


def test_a_number_that_is_not_finite_is_named(vec, monkeypatch):
    vec.reset(seed=1)
    pool = vec.unwrapped._line.pool
    real = pool.step
    monkeypatch.setattr(pool, "step", lambda actions: (real(actions), pool.observation.__setitem__((2, 0), np.nan)))
    with pytest.raises(NonFiniteError, match=r"reading\.0\.0") as caught:
        vec.step(np.zeros(6, np.int64))
    assert caught.value.where["environment"] == vec.unwrapped.environment_ids[2]


# Ends and errors.


def test_stepping_before_a_reset_after_the_end_or_after_closing_is_refused():
    env, vec = ProductionLineEnv("t0001.load-2"), ProductionLineVectorEnv(2)
    with pytest.raises(SimulationError, match="reset"):
        env.step(0)
    with pytest.raises(SimulationError, match="reset"):
        vec.step(np.zeros(2, np.int64))
    env.reset(seed=1)
    over = False
    while not over:
        _, _, terminated, truncated, _ = env.step(0)
        over = terminated or truncated
    with pytest.raises(SimulationError, match="no episode is running"):
        env.step(0)
    env.reset()
    vec.reset()
    for each, action in ((env, 0), (vec, np.zeros(2, np.int64))):
        each.close()
        each.close()
        with pytest.raises(SimulationError, match="reset"):
            each.step(action)


def test_closing_ends_the_threads():
    def running():
        return sum(thread.name.startswith("pool") for thread in threading.enumerate())

    before = running()
    vec = gymnasium.make_vec(ENVIRONMENT_ID, num_envs=600, threads=2)
    vec.reset(seed=1)
    vec.step(vec.action_space.sample())
    vec.reset(seed=2)
    vec.step(vec.action_space.sample())
    assert running() > before
    vec.close()
    assert running() == before


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        ({"environment_id": "t9999.load-2"}, CatalogError, "t9999.load-2"),
        ({"cell": "load-9"}, CatalogError, "load-9"),
        ({"split": "test"}, CatalogError, "test"),
        ({"purpose": "play"}, SimulationError, "purpose"),
        ({"off": ("weather",)}, SimulationError, "weather"),
        ({"illegal_actions": "ignore"}, SimulationError, "illegal_actions"),
        ({"render_mode": "movie"}, SimulationError, "render_mode"),
        ({"weather": 1}, TypeError, "weather"),
    ],
)
def test_what_does_not_exist_is_named(options, error, named):
    with pytest.raises(error, match=named):
        ProductionLineEnv(**options)
    with pytest.raises(error, match=named):
        ProductionLineVectorEnv(2, **options)


def test_bad_options_of_a_reset_change_nothing(vec):
    before = vec.reset(seed=1)[0]
    actions = np.zeros(6, np.int64)
    bad = [
        {"options": {"episodes": 1}},
        {"options": {"episode": -1}},
        {"options": {"reset_mask": np.ones(5, bool)}},
        {"options": {"reset_mask": np.array([True] + [False] * 5)}, "seed": 2},
        {"seed": [1] * 6},
        {"seed": 2, "options": {"episode": -1}},
    ]
    for arguments in bad:
        with pytest.raises(SimulationError):
            vec.reset(**arguments)
    stepped = vec.step(actions)[0]
    assert np.array_equal(vec.reset(seed=1)[0], before)
    assert np.array_equal(vec.step(actions)[0], stepped)
    with pytest.raises(SimulationError, match="at least one"):
        ProductionLineVectorEnv(0)
    with pytest.raises(SimulationError, match="no environment"):
        ProductionLineVectorEnv(2, [])


# Registration.


def test_registering_twice_changes_nothing():
    before = gymnasium.spec(ENVIRONMENT_ID)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        register_environments()
    assert gymnasium.spec(ENVIRONMENT_ID) is before


def test_spec_goes_through_json(env):
    again = gymnasium.make(gymnasium.envs.registration.EnvSpec.from_json(env.spec.to_json()))
    assert again.unwrapped.environment_id == env.unwrapped.environment_id
    again.close()


def test_registration_is_light_and_works_by_module_prefix():
    """No kernel, catalogue or torch before the first environment is made."""
    code = (
        "import sys, agentpipe, agentpipe.environments.registration as r\n"
        "assert not {'numba', 'torch', 'pandas', 'agentpipe.environments.kernel'} & set(sys.modules)\n"
        "import gymnasium\n"
        "env = gymnasium.make('agentpipe.environments.registration:agentpipe/ProductionLine-v0')\n"
        "env.reset(seed=1); print(env.unwrapped.environment_id)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == catalog().environments("train")[0].environment_id
