"""Recording: every step of exactly the wanted episodes, as it was."""

from __future__ import annotations

import numpy as np
import pytest

from agentpipe.environments.layout import ACTION_COUNT, OBSERVATION_SIZE
from agentpipe.environments.players import Decision
from agentpipe.errors import EmptyMaskError, NonFiniteError, SettingsError, SimulationError
from agentpipe.experience.behaviour import epsilon_player
from agentpipe.experience.shard import open_shard

from .conftest import record
from .fakes import CountingPool, SecondAction


def test_each_environment_gives_exactly_the_wanted_episodes(sealed):
    found = sorted((int(row["environment"]), int(row["episode"]), int(row["steps"])) for row in sealed.episodes)
    assert found == [(100, 0, 1), (100, 1, 1), (101, 0, 2), (101, 1, 2), (102, 0, 3), (102, 1, 3)]
    assert len(sealed.records) == 12


def test_the_steps_of_an_episode_are_contiguous_and_hold_what_was_seen_and_done(sealed):
    number = next(i for i, row in enumerate(sealed.episodes) if row["environment"] == 102 and row["episode"] == 1)
    steps = sealed.steps(number)
    assert steps["step"].tolist() == [0, 1, 2]
    assert steps["observation"][:, 0].tolist() == [2010.0, 2011.0, 2012.0]
    assert steps["observation"].shape == (3, OBSERVATION_SIZE)
    assert steps["reward"].tolist() == [-1.0, 0.0, 1.0]
    assert steps["last_action"].tolist() == [ACTION_COUNT, 1, 1]
    assert steps["action"].tolist() == [1, 1, 1]
    assert steps["time"].tolist() == [0.0, 1.0, 2.0]
    np.testing.assert_allclose(np.exp(steps["log_probability"]), 0.5)
    assert steps["terminated"].tolist() == [0, 0, 1]
    assert steps["truncated"].tolist() == [0, 0, 0]
    assert steps["fingerprint"].tolist() == [2, 2, 2]
    assert sealed.unpack_masks(steps["mask"]).tolist() == [[True] * 3 + [False] * (ACTION_COUNT - 3)] * 3


def test_truncation_and_outcome_are_recorded(sealed):
    odd = sealed.episodes[sealed.episodes["environment"] == 101]
    assert odd["success"].tolist() == [0, 0]
    assert odd["reason"].tolist() == [7, 7]
    ends = sealed.records[sealed.records["environment"] == 101]
    assert ends["truncated"].tolist() == [0, 1, 0, 1]


def test_quality_figures_are_those_of_the_records(sealed):
    quality = sealed.quality
    assert (quality.episodes, quality.steps) == (6, 12)
    assert quality.success_share == pytest.approx(4 / 6)
    assert quality.mean_steps == 2.0
    assert quality.reward_mean == pytest.approx((-6 + 0 + 2) / 12)
    assert (quality.reward_min, quality.reward_max) == (-1.0, 1.0)
    assert quality.zero_reward_share == pytest.approx(4 / 12)
    assert quality.sign_ratio == pytest.approx(2 / 6)
    assert quality.reward_within_10_share == 1.0
    assert quality.idle_share is None
    assert sum(quality.reward_histogram["counts"]) == 12
    assert quality.reasons == {"success": 4, "step_limit": 2}
    assert quality.bytes == sum((sealed.path / name).stat().st_size for name in ("records.bin", "episodes.bin"))


def test_the_same_episodes_have_the_same_digest_and_others_another(sealed, tmp_path):
    assert record(tmp_path / "again").digest == sealed.digest
    assert record(tmp_path / "more", episodes_per_env=3).digest != sealed.digest
    assert record(tmp_path / "other", policy_version="2.0").digest != sealed.digest


def test_durations_are_kept_apart_from_the_content(sealed):
    assert "seconds" not in str(sealed.manifest["quality"])
    assert sealed.measurements["steps_per_second"] > 0
    assert sealed.measurements["write_bytes_per_second"] > 0


def test_progress_ends_at_the_number_of_episodes(tmp_path):
    seen = []
    record(tmp_path / "shard", progress=lambda *what: seen.append(what))
    assert seen[-1] == ("trajectories sensor-1", 6, 6)


def test_a_number_that_is_none_stops_the_recording_and_leaves_the_old_shard(tmp_path):
    old = record(tmp_path / "shard")
    pool = CountingPool(3)
    show = pool._show

    def break_one():
        show()
        if pool.episode[2] == 1:
            pool.observation[2, 7] = np.nan

    pool._show = break_one
    with pytest.raises(NonFiniteError) as caught:
        record(tmp_path / "shard", pool=pool)
    assert caught.value.where == {"field": "observation", "environment": 102, "episode": 1, "step": 0}
    assert open_shard(tmp_path / "shard").digest == old.digest
    assert [path.name for path in tmp_path.iterdir()] == ["shard"]


def test_an_impossible_action_has_no_finite_log_probability(tmp_path):
    class Liar(SecondAction):
        def act(self, pool):
            return Decision(np.ones(pool.size, dtype=np.int64), np.zeros(pool.size, dtype=np.float32))

    with pytest.raises(NonFiniteError, match="log_probability"):
        record(tmp_path / "shard", player=Liar())


def test_an_episode_without_end_and_a_pool_of_another_size_are_refused(tmp_path):
    with pytest.raises(SimulationError, match="outlasts 64 steps"):
        record(tmp_path / "shard", size=70)
    with pytest.raises(SimulationError, match="a pool of 2 over 3 environments"):
        record(tmp_path / "shard", pool=CountingPool(2))
    assert not (tmp_path / "shard").exists()


class TestEpsilonPlayer:
    def test_probabilities_are_exact(self):
        pool = CountingPool(4_000)
        decision = epsilon_player(SecondAction(), 0.3).act(pool)
        expected = np.where(decision.actions == 1, 0.7 + 0.1, 0.1)
        np.testing.assert_allclose(decision.probabilities, expected, rtol=1e-6)
        shares = np.bincount(decision.actions, minlength=3) / pool.size
        np.testing.assert_allclose(shares, [0.1, 0.8, 0.1], atol=0.03)

    def test_another_seed_explores_elsewhere_and_the_same_seed_again(self):
        pool = CountingPool(500)
        first, again, other = (epsilon_player(SecondAction(), 1.0, seed).act(pool).actions for seed in (0, 0, 1))
        np.testing.assert_array_equal(first, again)
        assert (first != other).any()

    def test_without_exploration_it_is_its_base(self):
        decision = epsilon_player(SecondAction(), 0.0).act(CountingPool(50))
        assert set(decision.actions) == {1}
        assert set(decision.probabilities) == {1.0}

    def test_only_legal_actions_are_drawn(self):
        pool = CountingPool(500)
        pool.mask[:] = False
        pool.mask[:, [1, 20, ACTION_COUNT - 1]] = True
        assert set(epsilon_player(SecondAction(), 1.0).act(pool).actions) == {1, 20, ACTION_COUNT - 1}

    def test_an_empty_mask_and_a_senseless_epsilon_are_refused(self):
        pool = CountingPool(3)
        pool.mask[1] = False
        with pytest.raises(EmptyMaskError) as caught:
            epsilon_player(SecondAction()).act(pool)
        assert caught.value.where["environment"] == 1
        with pytest.raises(SettingsError):
            epsilon_player(SecondAction(), 1.5)
