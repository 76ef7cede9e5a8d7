import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentpipe.errors import CorruptError
from agentpipe.experience.sampling.draw import SamplingError
from agentpipe.experience.sampling.sets import HIDDEN, SampleSet
from agentpipe.experience.store import records as rec
from agentpipe.experience.store.writer import ShardWriter

from .fakes import ACTIONS, make_shard

several = st.lists(st.lists(st.integers(1, 5), max_size=4), min_size=1, max_size=5)


@settings(deadline=None, max_examples=40)
@given(several, st.data())
def test_what_is_gathered_is_what_was_recorded(lengths, data):
    shards = [make_shard(each, seed=seed) for seed, each in enumerate(lengths)]
    steps = SampleSet(shards)
    records = np.concatenate([shard.records for shard in shards])
    assert steps.size == len(records)
    ids = np.array(
        data.draw(st.lists(st.integers(0, max(steps.size - 1, 0)), max_size=40 * (steps.size > 0))), np.int64
    )
    found = steps.gather(ids)
    assert set(found) == set(records.dtype.names) - HIDDEN
    for name, array in found.items():
        expected = records[name][ids]
        if name == "mask":
            expected = rec.unpack_masks(expected, ACTIONS)
        assert array.dtype == expected.dtype
        assert array.flags.c_contiguous
        np.testing.assert_array_equal(array, expected)


@settings(deadline=None, max_examples=40)
@given(several, st.data())
def test_ids_lead_to_shard_record_and_episode(lengths, data):
    shards = [make_shard(each, seed=seed) for seed, each in enumerate(lengths)]
    steps = SampleSet(shards)
    places = [(s, record) for s, shard in enumerate(shards) for record in range(len(shard.records))]
    rows = [(s, row) for s, each in enumerate(lengths) for row, length in enumerate(each) for _ in range(length)]
    ids = np.arange(steps.size)
    assert list(zip(*(array.tolist() for array in steps.locate(ids)), strict=True)) == places
    assert list(zip(*(array.tolist() for array in steps.episodes(ids)), strict=True)) == rows
    before = np.cumsum([0, *[len(each) for each in lengths]])
    assert steps.episode.tolist() == [before[shard] + row for shard, row in rows]


def test_one_feature_more_than_a_cache_line_and_a_wide_mask():
    shard = make_shard([4, 3], features=97, actions=200)
    found = SampleSet([shard]).gather(np.array([6, 0, 6]))
    np.testing.assert_array_equal(found["observation"], shard.records["observation"][[6, 0, 6]])
    np.testing.assert_array_equal(found["mask"], rec.unpack_masks(shard.records["mask"][[6, 0, 6]], 200))


def test_given_arrays_are_written_to():
    shard = make_shard([5])
    out = {"reward": np.empty(2, np.float32)}
    found = SampleSet([shard]).gather(np.array([1, 4]), ["reward", "action"], out)
    assert found["reward"] is out["reward"]
    assert out["reward"].tolist() == shard.records["reward"][[1, 4]].tolist()
    assert list(found) == ["reward", "action"]


@pytest.mark.parametrize(
    "array",
    [np.empty(3, np.float32), np.empty(2, np.float64), np.empty(4, np.float32)[::2], np.empty((2, 1), np.float32)],
)
def test_an_array_that_does_not_fit_is_refused(array):
    with pytest.raises(SamplingError, match="cannot take"):
        SampleSet([make_shard([5])]).gather(np.array([1, 4]), ["reward"], {"reward": array})


@pytest.mark.parametrize("step", [-1, 5, 2**40])
def test_an_id_out_of_range_is_refused(step):
    with pytest.raises(SamplingError, match="position 1") as caught:
        SampleSet([make_shard([2, 3])]).gather(np.array([0, step]))
    assert str(step) in str(caught.value)


def test_an_unknown_field_is_refused():
    with pytest.raises(SamplingError, match="no field 'state'"):
        SampleSet([make_shard([2])]).gather(np.array([0]), ["state"])


def test_a_file_cut_short_is_an_error_before_it_is_touched():
    def cut():
        raise CorruptError("cut", file="records.bin")

    whole, damaged = make_shard([2]), make_shard([2], seed=1)
    steps = SampleSet([whole, damaged])
    damaged.still_whole = cut
    assert steps.gather(np.array([1]), ["reward"])["reward"].tolist() == [whole.records["reward"][1]]
    with pytest.raises(CorruptError):
        steps.gather(np.array([1, 2]), ["reward"])
    for name in ("rewards", "influence", "key_fault", "idle"):
        with pytest.raises(CorruptError):
            getattr(steps, name)


def test_shards_of_different_shapes_are_refused():
    with pytest.raises(SamplingError, match="shard-1"):
        SampleSet([make_shard([2]), make_shard([2], features=4, seed=1)])


def test_a_set_without_shards_or_steps_has_size_zero():
    for steps in (SampleSet([]), SampleSet([make_shard([])])):
        assert steps.size == 0
        for array in (steps.rewards, steps.influence, steps.dependents, steps.idle, steps.idle_strict, steps.key_fault):
            assert array.shape == (0,)


@pytest.mark.parametrize(("fresh", "kept"), [(1, {7}), (3, {5, 7}), (4, {4, 5, 7}), (100, {1, 4, 5, 7})])
def test_a_freshness_window_counts_policy_ordinals_from_the_newest(fresh, kept):
    shards = [
        make_shard([6, 6], seed=1, ordinals=(1, 5)),
        make_shard([6], seed=2, ordinals=(4, 7)),
        make_shard([3], seed=3, ordinals=(1,)),
    ]
    steps = SampleSet(shards, fresh=fresh)
    ordinals = [np.array([p["ordinal"] for p in shard.policies])[shard.records["policy"]] for shard in shards]
    eligible = [np.flatnonzero(np.isin(each, list(kept))) for each in ordinals]
    records = np.concatenate([shard.records[numbers] for shard, numbers in zip(shards, eligible, strict=True)])
    found = steps.gather(np.arange(steps.size), ["reward", "observation"])
    assert found["reward"].tolist() == records["reward"].tolist() == steps.rewards.tolist()
    assert found["observation"].tolist() == records["observation"].tolist()
    assert len(steps.episode) == len(steps.influence) == len(steps.key_fault) == steps.size


def test_a_freshness_window_of_nothing_is_refused():
    with pytest.raises(SamplingError, match="fresh"):
        SampleSet([make_shard([2])], fresh=0)


def test_figures_of_each_step_follow_the_definitions():
    """One episode: 0 -> 1 -> 3, 2 alone. Rewards of what depends on 0 are 1 and 4: influence 2 * 2.25."""
    shard = make_shard(
        [4],
        pairs=[(0, 0, 1), (0, 1, 3)],
        reward=np.array([0.5, 1.0, 0.0, 4.0], np.float32),
        earned=np.array([0, 1, 0, 1]),
        success=[1],
    )
    steps = SampleSet([shard])
    assert steps.dependents.tolist() == [2, 1, 0, 0]
    assert steps.influence.tolist() == [4.5, 0.0, 0.0, 0.0]
    assert steps.idle.tolist() == [False, False, True, False]
    assert steps.idle_strict.tolist() == [False, False, True, False]


def test_influence_of_several_shards_stays_with_its_steps():
    shards = [make_shard([3, 2], seed=seed, pairs=[(0, 0, 1), (0, 0, 2)]) for seed in range(3)]
    steps = SampleSet(shards)
    alone = np.concatenate([SampleSet([shard]).influence for shard in shards])
    assert steps.influence.tolist() == alone.tolist()
    assert sum(steps.influence > 0) == 3


def test_a_record_of_an_unknown_policy_is_an_error_and_not_left_out():
    shard = make_shard([3], ordinals=(0, 1), policy=np.array([1, 2, 0]))
    with pytest.raises(CorruptError, match="policy 2 of 2") as caught:
        SampleSet([shard], fresh=1)
    assert caught.value.where["record"] == 1


@pytest.fixture
def sealed(tmp_path):
    """A shard on disk, of more than one page."""
    source = make_shard([5] * 40, features=60)
    header = {"cell": "c", "observation_size": 60, "action_count": ACTIONS}
    with ShardWriter.open(tmp_path / "open", {**header, "policies": source.policies}) as writer:
        steps, episodes = source.records, source.episodes
        for name in ("time", "log_probability", "value"):
            steps[name] = 0.0
        steps["environment"], steps["episode"] = 0, np.repeat(np.arange(40), 5)
        steps["step"], steps["action"] = np.tile(np.arange(5), 40), 1
        steps["last_action"], steps["segment"] = ACTIONS, 0
        steps["terminated"], steps["truncated"] = steps["step"] == 4, 0
        episodes["episode"], episodes["final"] = np.arange(40), rec.NO_FINAL
        writer.append(steps, episodes)
        return writer.seal(tmp_path / "sealed", names={0: "e"}, reasons=())


def test_a_sealed_shard_is_gathered_from(sealed):
    steps = SampleSet([sealed])
    ids = np.array([0, 199, 7])
    assert steps.gather(ids)["observation"].tolist() == sealed.records["observation"][ids].tolist()
    assert steps.dependents.tolist() == [4, 3, 2, 1, 0] * 40


def test_a_reader_of_a_file_cut_short_gets_an_error_and_not_a_signal(sealed):
    steps = SampleSet([sealed])
    with (sealed.path / rec.RECORDS).open("r+b") as file:
        file.truncate(8_192)
    with pytest.raises(CorruptError, match=r"records\.bin"):
        steps.gather(np.array([199]))
    with pytest.raises(CorruptError, match=r"records\.bin"):
        steps.rewards  # noqa: B018 - computed when it is asked for


def test_a_reader_outlives_the_removal_of_its_shard(sealed):
    steps, expected = SampleSet([sealed]), sealed.records["reward"][150]
    shutil.rmtree(sealed.path)
    assert steps.gather(np.array([150]), ["reward"])["reward"].tolist() == [expected]
