"""Episodes under a compound disturbance: the entry says so, and everything that plays them again uses it."""

from __future__ import annotations

import numpy as np
import pytest

from agentpipe.environments.compound import BACKGROUND, OWN, compound_code, describe_compound
from agentpipe.environments.layout import ACTION_COUNT, OBSERVATION_SIZE, REASONS, SIMULATOR_VERSION, Purpose
from agentpipe.environments.players import RandomPlayer
from agentpipe.errors import CorruptError
from agentpipe.experience.care.check import check_folder
from agentpipe.experience.care.export import export_steps
from agentpipe.experience.care.shrink import regenerate_shard, restore, shrink
from agentpipe.experience.origin import origin
from agentpipe.experience.recorder import Recorded, Recorder
from agentpipe.experience.regenerate import compact_of, regenerate
from agentpipe.experience.show import describe, render
from agentpipe.experience.store import records as rec
from agentpipe.experience.store.checksum import fill, range_checksums
from agentpipe.experience.store.content import word_counts
from agentpipe.experience.store.shard import open_shard
from agentpipe.experience.store.writer import ShardWriter
from agentpipe_tests.environments.line import catalog, make_pool, profile, table

DTYPE = rec.step_dtype(OBSERVATION_SIZE, ACTION_COUNT)
SPECS = catalog().environments("train")[::250]
INDEX = np.array([spec.index for spec in SPECS], np.uint32)
SIZE = len(SPECS)


def random_compounds(generator, size=SIZE):
    """Compounds for ``size`` environments, some of them their own rows'."""
    places = generator.integers(0, 5, (size, 3))
    levels = generator.integers(0, 7, (size, 3))
    codes = np.select([levels == 0, levels == 6], [OWN, BACKGROUND], levels | places << 3).astype(np.uint8)
    codes[generator.random(size) < 0.3] = 0
    return codes


def play(steps=90, every=13, *, seed=3):
    """Random play with other compounds every few steps; the end is cut. Also what was played, by (index, episode)."""
    pool, generator = make_pool(SPECS, seed=11), np.random.Generator(np.random.Philox(seed))
    recorder, player, parts, played = Recorder(pool, DTYPE, INDEX), RandomPlayer(), [], {}
    for stamp in range(steps):
        if stamp % every == 0:
            rows = generator.choice(SIZE, SIZE // 2, replace=False)
            pool.override(rows, random_compounds(generator, len(rows)))
        now = zip(
            INDEX.tolist(), pool.episode.tolist(), pool.compound.tolist(), pool.fingerprints.tolist(), strict=True
        )
        played |= {(index, episode): (tuple(codes), crc) for index, episode, codes, crc in now}
        recorder.before()
        decision = player.act(pool)
        pool.step(decision.actions)
        logarithms = np.log(decision.probabilities)
        parts.append(recorder.take(recorder.after(decision.actions, logarithms, None, 0, 1_000 + stamp)))
    return stored([*parts, recorder.cut()]), played


def stored(parts):
    lengths = np.concatenate([part.episodes["steps"] for part in parts])
    words = word_counts(lengths)
    merged = Recorded(
        np.concatenate([part.steps for part in parts]),
        np.concatenate([part.episodes for part in parts]),
        np.concatenate([part.finals for part in parts if part.finals is not None]),
        np.concatenate([part.parents for part in parts]),
    )
    fill(merged.steps)
    fill(merged.finals)
    merged.episodes["graph_checksum"] = range_checksums(merged.parents, np.cumsum(words) - words, words)
    return merged


@pytest.fixture(scope="module")
def recording():
    return play()


@pytest.fixture(scope="module")
def recorded(recording):
    return recording[0]


def pool_for(manifest, names, **options):
    specs = [catalog().environment(names[index]) for index in sorted(names)]
    purpose = Purpose[manifest["origin"]["purpose"]]
    return make_pool(specs, seed=manifest["origin"]["seed"], purpose=purpose, **options)


def write(path, recorded, purpose="TRAIN"):
    header = {
        "cell": "training",
        "observation_size": OBSERVATION_SIZE,
        "action_count": ACTION_COUNT,
        "simulator_version": SIMULATOR_VERSION,
        "table_version": table().version,
        "origin": origin(11, purpose, profile().digest),
        "policies": [{"player": "random", "version": "1", "ordinal": 0}],
        "accumulating": 0,
    }
    names = {spec.index: spec.environment_id for spec in SPECS}
    with ShardWriter.open(path, header) as writer:
        writer.append(recorded.steps, recorded.episodes, recorded.finals, recorded.parents)
        return writer.seal(path, names=names, reasons=REASONS)


def test_an_entry_holds_the_compound_and_the_steps_its_fingerprint(recording):
    recorded, played = recording
    assert len(np.unique(recorded.episodes["compound"], axis=0)) > 50
    at = 0
    for episode in recorded.episodes:
        codes, crc = played[int(episode["environment"]), int(episode["episode"])]
        assert tuple(episode["compound"].tolist()) == codes
        assert (recorded.steps["fingerprint"][at : at + episode["steps"]] == crc).all()
        at += int(episode["steps"])


@pytest.mark.parametrize("threads", [1, 2])
def test_everything_comes_back_byte_for_byte(recorded, threads):
    pool = make_pool(SPECS, seed=11, threads=threads)
    found = regenerate(pool, INDEX, recorded.episodes, compact_of(recorded.steps))
    for one, other in zip(found, recorded, strict=True):
        assert one.tobytes() == other.tobytes()
    pool.close()


def test_any_episodes_in_any_order_come_back_also_from_a_pool_that_stood_otherwise(recorded):
    chosen = np.random.default_rng(0).permutation(len(recorded.episodes))[:70]
    ends = np.cumsum(recorded.episodes["steps"].astype(np.int64))
    steps = np.split(recorded.steps, ends[:-1])
    pool = make_pool(SPECS, seed=11)
    pool.override(np.arange(SIZE), np.array([compound_code(5)] * 3, np.uint8))
    pool.reset(40)
    expected = np.concatenate([steps[row] for row in chosen])
    found = regenerate(pool, INDEX, recorded.episodes[chosen], compact_of(expected))
    assert found.steps.tobytes() == expected.tobytes()


def test_without_its_compound_an_episode_plays_otherwise(recorded):
    """The negative control: the bytes do depend on it, in every episode."""
    others = 0
    for row in np.flatnonzero(recorded.episodes["compound"].any(axis=1))[:40]:
        episode, first = recorded.episodes[row : row + 1].copy(), int(recorded.episodes["steps"][:row].sum())
        steps = recorded.steps[first : first + int(episode["steps"][0])]
        assert (
            regenerate(make_pool(SPECS, seed=11), INDEX, episode, compact_of(steps)).steps.tobytes() == steps.tobytes()
        )
        episode["compound"] = 0
        try:
            found = regenerate(make_pool(SPECS, seed=11), INDEX, episode, compact_of(steps)).steps
        except CorruptError:
            others += 1
        else:
            others += found.tobytes() != steps.tobytes()
    assert others == 40


def test_a_compound_that_the_table_does_not_have_is_refused_by_name(recorded):
    episodes = recorded.episodes.copy()
    episodes["compound"][7] = [7, 0, 0]
    with pytest.raises(CorruptError, match="the table has no compound sensor-7 network-own load-own") as caught:
        regenerate(make_pool(SPECS, seed=11), INDEX, episodes, compact_of(recorded.steps))
    named = int(episodes["environment"][7]), int(episodes["episode"][7])
    assert (caught.value.where["environment"], caught.value.where["episode"]) == named


def test_a_pool_that_is_not_for_training_cannot_play_them(recorded):
    with pytest.raises(CorruptError, match="only pools for training"):
        regenerate(
            make_pool(SPECS, seed=11, purpose=Purpose.COLLECT), INDEX, recorded.episodes, compact_of(recorded.steps)
        )


def test_shards_shrink_and_come_back_and_say_that_older_programs_cannot(tmp_path, recorded):
    shard = write(tmp_path / "shard", recorded)
    assert shard.manifest["format"] == 3
    assert check_folder(shard.path).ok
    bytes_of = {name: (shard.path / name).read_bytes() for name in (rec.RECORDS, rec.EPISODES, rec.FINALS, rec.GRAPH)}
    assert shrink(shard.path, pool_for) > 0
    assert check_folder(shard.path).ok
    assert regenerate_shard(shard.path, pool_for).digest == shard.digest
    assert restore(shard.path, pool_for).digest == shard.digest
    assert {name: (shard.path / name).read_bytes() for name in bytes_of} == bytes_of


def test_shards_without_one_keep_their_format_and_layout(tmp_path):
    assert rec.EPISODE.itemsize == 80
    assert rec.EPISODE.fields["compound"][1] == rec.EPISODE.fields["cut"][1] + 1 == 77
    recorded, _ = play(steps=30, every=1_000)
    plain = recorded.episodes["compound"].any(axis=1)
    assert write(tmp_path / "some", recorded).manifest["format"] == 3
    assert plain.any()
    pool = make_pool(SPECS, seed=11)
    recorder, player, parts = Recorder(pool, DTYPE, INDEX), RandomPlayer(), []
    for stamp in range(30):
        recorder.before()
        decision = player.act(pool)
        pool.step(decision.actions)
        logarithms = np.log(decision.probabilities)
        parts.append(recorder.take(recorder.after(decision.actions, logarithms, None, 0, stamp)))
    assert write(tmp_path / "none", stored([*parts, recorder.cut()])).manifest["format"] == 2
    assert open_shard(tmp_path / "none").manifest["format"] == 2


def test_what_is_shown_and_exported_names_it(tmp_path, recorded):
    import pyarrow.parquet as pq

    shard = write(tmp_path / "shard", recorded)
    row = int(np.flatnonzero(recorded.episodes["compound"].any(axis=1))[0])
    text = describe_compound(recorded.episodes["compound"][row])
    assert describe(shard, row)["episode"]["compound"] == text
    assert f"({text})" in render(shard, row)
    own = int(np.flatnonzero(~recorded.episodes["compound"].any(axis=1))[0])
    assert describe(shard, own)["episode"]["compound"] == ""
    export_steps([shard], tmp_path / "steps.parquet")
    column = pq.ParquetFile(tmp_path / "steps.parquet").read(use_threads=False, columns=["compound"])["compound"]
    expected = np.repeat([describe_compound(codes) for codes in shard.episodes["compound"]], shard.episodes["steps"])
    assert column.to_pylist() == expected.tolist()


@pytest.mark.parametrize("cut_at", [1, 12, 40])
def test_running_episodes_survive_a_checkpoint_under_their_compounds(cut_at):
    def begin(threads=1):
        pool = make_pool(SPECS, seed=11, threads=threads)
        return pool, Recorder(pool, DTYPE, INDEX)

    def go_on(pool, recorder, steps, first):
        out = []
        for stamp in range(first, first + steps):
            recorder.before()
            decision = RandomPlayer().act(pool)
            pool.step(decision.actions)
            out.append(recorder.take(recorder.after(decision.actions, np.log(decision.probabilities), None, 0, stamp)))
        return out

    pool, recorder = begin()
    generator = np.random.Generator(np.random.Philox(9))
    pool.override(np.arange(SIZE), random_compounds(generator))
    go_on(pool, recorder, cut_at, 0)
    pool.override(np.arange(SIZE), random_compounds(generator))
    partial, snapshot = recorder.partial(), pool.snapshot()
    expected = [*go_on(pool, recorder, 30, cut_at), recorder.cut()]
    other, again = begin(threads=2)
    again.restore(partial)
    other.restore(snapshot)
    found = [*go_on(other, again, 30, cut_at), again.cut()]
    for one, two in zip(found, expected, strict=True):
        assert all(a.tobytes() == b.tobytes() for a, b in zip(one, two, strict=True) if b is not None)
    plain = Recorder(make_pool(SPECS, seed=11, purpose=Purpose.COLLECT), DTYPE, INDEX)
    with pytest.raises(CorruptError, match="do not fit the pool"):
        plain.restore({**partial, "compound": partial["compound"] | np.uint8(1)})
    other.close()
