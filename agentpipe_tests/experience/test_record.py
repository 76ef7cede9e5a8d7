"""Recording: every step of exactly the wanted episodes, as it was, whatever becomes of the process."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from agentpipe.environments.layout import ACCUMULATING, ACTION_COUNT, OBSERVATION_SIZE
from agentpipe.environments.players import Decision
from agentpipe.errors import EmptyMaskError, LockHeldError, NonFiniteError, SettingsError, SimulationError
from agentpipe.experience.behaviour import epsilon_player
from agentpipe.experience.store.live import open_live
from agentpipe.experience.store.shard import open_shard
from agentpipe.experience.store.writer import ShardWriter

from .conftest import record
from .fakes import CountingPool, SecondAction


def test_each_environment_gives_exactly_the_wanted_episodes(sealed):
    found = sorted((int(row["environment"]), int(row["episode"]), int(row["steps"])) for row in sealed.episodes)
    assert found == [(100, 0, 1), (100, 1, 1), (101, 0, 2), (101, 1, 2), (102, 0, 3), (102, 1, 3)]
    assert len(sealed.records) == 12
    assert sealed.names == {100: "line-0", 101: "line-1", 102: "line-2"}


def test_the_steps_of_an_episode_are_contiguous_and_hold_what_was_seen_and_done(sealed):
    steps = sealed.steps(sealed.find(102, 1))
    assert steps["step"].tolist() == [0, 1, 2]
    assert steps["observation"][:, 0].tolist() == [2010.0, 2011.0, 2012.0]
    assert steps["observation"].shape == (3, OBSERVATION_SIZE)
    assert steps["reward"].tolist() == [-1.0, 0.0, 1.0]
    assert steps["last_action"].tolist() == [ACTION_COUNT, 1, 1]
    assert steps["action"].tolist() == [1, 1, 1]
    assert steps["time"].tolist() == [0.0, 1.0, 2.0]
    np.testing.assert_allclose(np.exp(steps["log_probability"]), 0.5)
    assert steps["value"].tolist() == [0.0, 0.0, 0.0]
    assert steps["terminated"].tolist() == [0, 0, 1]
    assert steps["truncated"].tolist() == [0, 0, 0]
    assert steps["fingerprint"].tolist() == [2, 2, 2]
    assert sealed.unpack_masks(steps["mask"]).tolist() == [[True] * 3 + [False] * (ACTION_COUNT - 3)] * 3
    assert (np.diff(steps["time_ns"]) >= 0).all()
    assert sealed.parents(sealed.find(102, 1)).tolist() == [[0], [0b001], [0b010]]


def test_truncation_and_outcome_are_recorded_with_what_would_have_been_seen_next(sealed):
    odd = sealed.episodes[sealed.episodes["environment"] == 101]
    assert odd["success"].tolist() == [0, 0]
    assert odd["reason"].tolist() == [7, 7]
    assert odd["cut"].tolist() == [0, 0]
    ends = sealed.records[sealed.records["environment"] == 101]
    assert ends["truncated"].tolist() == [0, 1, 0, 1]
    assert len(sealed.finals) == 2
    final = sealed.final(sealed.find(101, 1))
    assert (final["environment"], final["episode"], final["time"], final["last_action"]) == (101, 1, 2.0, 1)
    assert set(final["observation"].tolist()) == {1012.0}
    assert sealed.final(sealed.find(102, 1)) is None


def test_the_values_of_a_player_that_has_any_are_recorded(tmp_path):
    class Critic(SecondAction):
        def act(self, pool):
            return Decision(*super().act(pool)[:2], pool.observation[:, 0] / 2)

    shard = record(tmp_path / "shard", player=Critic())
    np.testing.assert_array_equal(shard.records["value"], shard.records["observation"][:, 0] / 2)


def test_the_manifest_says_whose_episodes_these_are_and_what_playing_them_again_needs(tmp_path):
    origin = {"seed": 5, "purpose": "COLLECT", "line_profile": "d" * 64}
    shard = record(tmp_path / "shard", origin=origin, policy_ordinal=3)
    policy = {"player": "second", "version": "1.0", "ordinal": 3}
    assert shard.policies == [policy]
    manifest = shard.manifest
    assert (manifest["cell"], manifest["table_version"], manifest["simulator_version"]) == ("sensor-1", "t1", "1.0.0")
    assert (manifest["origin"], manifest["accumulating"]) == (origin, ACCUMULATING)
    assert "origin" not in record(tmp_path / "other").manifest
    assert manifest["quality"]["episodes"] == 6
    figures = record(tmp_path / "figures", quality=lambda shard: {"rows": len(shard.episodes)})
    assert figures.quality == {"rows": 6}


def test_the_same_episodes_have_the_same_digest_and_others_another(sealed, tmp_path):
    assert record(tmp_path / "again", durability="process").digest == sealed.digest
    assert record(tmp_path / "more", episodes_per_env=3).digest != sealed.digest
    assert record(tmp_path / "other", policy_version="2.0").digest != sealed.digest


def test_durations_are_kept_apart_from_the_content(sealed):
    assert "seconds" not in str(sealed.manifest["quality"])
    assert sealed.measurements["steps_per_second"] > 0
    assert sealed.measurements["write_bytes_per_second"] > 0
    assert sealed.measurements["steps_taken_up"] == 0


def test_progress_ends_at_the_number_of_episodes(tmp_path):
    seen = []
    record(tmp_path / "shard", progress=lambda *what: seen.append(what))
    assert seen[-1] == ("trajectories sensor-1", 6, 6)


class Broken(CountingPool):
    """Environment 2 shows a NaN in its second episode."""

    def _show(self):
        super()._show()
        self.observation[(self.rows == 2) & (self.episode == 1), 7] = np.nan


def test_a_number_that_is_none_stops_the_recording_and_leaves_the_old_shard_and_what_was_whole(tmp_path):
    old = record(tmp_path / "shard")
    with pytest.raises(NonFiniteError) as caught:
        record(tmp_path / "shard", episodes_per_env=4, build=lambda chosen: Broken([one.index - 100 for one in chosen]))
    where = caught.value.where
    assert (where["environment"], where["episode"], where["step"], where["field"]) == (102, 1, 0, "observation")
    assert open_shard(tmp_path / "shard").digest == old.digest
    assert sorted(path.name for path in tmp_path.iterdir()) == ["shard", "shard.open"]
    assert 4 < len(open_live(tmp_path / "shard.open").episodes) < 12
    assert len(record(tmp_path / "shard", episodes_per_env=4).episodes) == 12
    assert [path.name for path in tmp_path.iterdir()] == ["shard"]


def test_an_impossible_action_has_no_finite_log_probability(tmp_path):
    class Liar(SecondAction):
        def act(self, pool):
            return Decision(np.ones(pool.size, dtype=np.int64), np.zeros(pool.size, dtype=np.float32))

    with pytest.raises(NonFiniteError, match="log_probability"):
        record(tmp_path / "shard", player=Liar())


def test_an_episode_without_end_and_a_pool_that_does_not_fit_are_refused(tmp_path):
    with pytest.raises(SimulationError, match="outlasts 64 steps"):
        record(tmp_path / "shard", size=70)
    with pytest.raises(SimulationError, match="a pool of 2 over 3 environments"):
        record(tmp_path / "shard", build=lambda _: CountingPool(2))
    with pytest.raises(SimulationError, match="at the start of episode 4"):
        record(tmp_path / "shard", first_episode=4)
    with pytest.raises(SimulationError, match="0 episodes of each"):
        record(tmp_path / "shard", episodes_per_env=0)
    assert not (tmp_path / "shard").exists()


# What becomes of a recording that was ended by force.


class Ended(Exception):  # noqa: N818 - stands for the end of the process
    """The process ends here."""


def interrupted(path, after, **changes):
    def progress(_stage, done, _total, _note=""):
        if done >= after:
            raise Ended

    with pytest.raises(Ended):
        record(path, size=6, progress=progress, **changes)


@pytest.mark.parametrize("durability", ["process", "power"])
@pytest.mark.parametrize("after", [1, 5, 14, 17])
def test_a_recording_goes_on_where_its_counter_stands(tmp_path, after, durability):
    whole = record(tmp_path / "whole", size=6, episodes_per_env=3)
    interrupted(tmp_path / "shard", after, episodes_per_env=3, durability=durability)
    counted = len(open_live(tmp_path / "shard.open").episodes)
    assert counted >= after
    asked = []

    def build(chosen):
        asked.extend(one.index for one in chosen)
        return CountingPool([one.index - 100 for one in chosen])

    seen = []
    shard = record(
        tmp_path / "shard", size=6, episodes_per_env=3, build=build, progress=lambda *what: seen.append(what[1])
    )
    assert seen[0] == counted
    assert shard.digest == whole.digest
    assert len(shard.episodes) == 18
    assert shard.measurements["steps_taken_up"] > 0
    missing = 18 - counted
    assert len(asked) <= missing
    assert not (tmp_path / "shard.open").exists()


def test_what_only_has_to_be_sealed_is_sealed_without_a_pool(tmp_path):
    whole = record(tmp_path / "whole", size=6)
    interrupted(tmp_path / "shard", 12)
    assert record(tmp_path / "shard", size=6, build=None).digest == whole.digest


@pytest.mark.parametrize(
    "changes", [{"policy_version": "2.0"}, {"policy_ordinal": 1}, {"episodes_per_env": 3}, {"cell": "sensor-2"}]
)
def test_what_another_recording_left_is_discarded(tmp_path, changes):
    interrupted(tmp_path / "shard", 5)
    seen = []
    shard = record(tmp_path / "shard", size=6, progress=lambda *what: seen.append(what[1]), **changes)
    assert seen[0] == 0
    assert shard.digest == record(tmp_path / "whole", size=6, **changes).digest


def test_what_is_damaged_is_discarded(tmp_path):
    interrupted(tmp_path / "shard", 5)
    (tmp_path / "shard.open" / "header.json").write_text("{")
    assert record(tmp_path / "shard", size=6).digest == record(tmp_path / "whole", size=6).digest


def test_a_second_recorder_of_the_same_shard_is_told_who_records(tmp_path):
    def progress(*_):
        with pytest.raises(LockHeldError, match="trajectories sensor-1"):
            ShardWriter.open(tmp_path / "shard.open", {}, holder="second")
        raise Ended

    with pytest.raises(Ended):
        record(tmp_path / "shard", progress=progress)


SCRIPT = """
import os, signal, sys
from pathlib import Path
from agentpipe_tests.experience.conftest import record

def progress(_stage, done, _total, _note=""):
    if done >= int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)

record(Path(sys.argv[1]), size=9, episodes_per_env=40, progress=progress, durability=sys.argv[3])
"""


@pytest.mark.parametrize("durability", ["process", "power"])
def test_kill_9_loses_nothing_that_counted_and_the_sealed_shard_is_the_same(tmp_path, durability):
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "shard"), "200", durability]
    killed = subprocess.run(command, cwd=root, capture_output=True, timeout=300)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    counted = len(open_live(tmp_path / "shard.open").episodes)
    assert counted >= 200
    seen = []
    shard = record(tmp_path / "shard", size=9, episodes_per_env=40, progress=lambda *what: seen.append(what[1]))
    assert seen[0] == counted
    assert shard.digest == record(tmp_path / "whole", size=9, episodes_per_env=40).digest
    shard.check()


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
