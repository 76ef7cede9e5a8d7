"""Writing: all or nothing, counted last, one writer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentpipe.errors import CorruptError, LockHeldError, NonFiniteError, RecordError, StoreError, VersionError
from agentpipe.experience.store import records as rec
from agentpipe.experience.store.live import open_live
from agentpipe.experience.store.writer import ShardWriter
from agentpipe_tests.experience.fakes import header, make_episodes, names, write_shard


@pytest.fixture
def writer(tmp_path):
    with ShardWriter.open(tmp_path / "open", header(), capacity=16) as opened:
        yield opened


def episodes(seed=0, count=6, **options):
    return make_episodes(np.random.default_rng(seed), count, **options)


def refused(writer, batch, kind, **where):
    """Appending ``batch`` fails, and leaves everything as it was."""
    before = writer.steps, writer.episodes, len(writer.recorded)
    with pytest.raises(kind) as caught:
        writer.append(*batch)
    assert {key: caught.value.where.get(key) for key in where} == where
    assert (writer.steps, writer.episodes, len(writer.recorded)) == before
    return caught.value


def test_rows_are_given_in_the_order_of_arrival(writer):
    assert writer.append(*episodes(count=6)) == range(6)
    assert writer.append(*episodes(count=1, first_episode=9)) == range(6, 7)
    assert writer.append(*episodes(count=0)) == range(7, 7)
    assert writer.episodes == 7
    assert writer.recorded["first"].tolist() == [0, *np.cumsum(writer.recorded["steps"])[:-1].tolist()]


def test_what_the_caller_holds_is_not_changed(writer):
    batch = episodes()
    copies = [array.copy() for array in batch]
    writer.append(*batch)
    for array, copy in zip(batch, copies, strict=True):
        assert array.tobytes() == copy.tobytes()


@pytest.mark.parametrize("field", ["time", "log_probability", "value", "reward", "observation"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_number_that_is_not_finite_is_named(writer, field, value):
    batch = episodes()
    record = 4
    batch[0][field][record] = value
    row = np.flatnonzero(np.cumsum(batch[1]["steps"]) > record)[0]
    place = {name: int(batch[1][name][row]) for name in ("environment", "episode")}
    refused(writer, batch, NonFiniteError, field=field, step=int(batch[0]["step"][record]), **place)


def test_the_element_of_an_observation_is_named(writer):
    batch = episodes()
    batch[0]["observation"][0, 2] = np.nan
    assert refused(writer, batch, NonFiniteError, step=0).where["element"] == 2


def test_numbers_that_are_not_finite_in_rows_and_final_records_are_named(writer):
    batch = episodes(cut_share=1)
    batch[1]["elapsed_seconds"][2] = np.nan
    refused(writer, batch, NonFiniteError, field="elapsed_seconds", environment=int(batch[1]["environment"][2]))
    batch = episodes(cut_share=1)
    batch[2]["observation"][3, 1] = np.inf
    refused(writer, batch, NonFiniteError, field="observation", episode=int(batch[2]["episode"][3]))


@pytest.mark.parametrize(
    ("field", "value"), [("environment", 7), ("episode", 7), ("step", 3), ("policy", 2), ("action", 6), ("action", -1)]
)
def test_a_step_that_cannot_be_of_its_episode_is_refused(writer, field, value):
    batch = episodes()
    record = int(np.argmax(batch[0]["step"] == 1))
    batch[0][field][record] = value
    refused(writer, batch, RecordError, field=field, step=1)


def test_lengths_must_add_up(writer):
    batch = episodes()
    refused(writer, (batch[0][:-1], *batch[1:]), RecordError, field="steps")
    refused(writer, (batch[0], batch[1], batch[2], batch[3][:-1]), RecordError, field="parents")
    batch[1]["steps"][0] = 0
    refused(writer, batch, RecordError)


def test_an_episode_longer_than_the_maximum_is_refused(writer):
    count = rec.MAX_EPISODE_STEPS + 1
    rows = np.zeros(1, rec.EPISODE)
    rows["steps"] = count
    steps = np.zeros(count, writer.dtype)
    steps["step"] = np.arange(count)
    assert "4097" in refused(writer, (steps, rows), RecordError, environment=0, episode=0).message
    rows["steps"] = count - 1
    writer.append(steps[:-1], rows)
    assert writer.steps == rec.MAX_EPISODE_STEPS


def test_records_of_another_shape_are_refused(writer):
    refused(writer, episodes(observation_size=5), RecordError, field="steps")
    steps, rows, finals, parents = episodes()
    refused(writer, (steps, steps, finals, parents), RecordError, field="episodes")
    refused(writer, (steps, rows, rows, parents), RecordError, field="finals")
    refused(writer, (steps, rows, finals, parents.astype("<i8")), RecordError, field="parents")


def test_final_records_belong_to_episodes_that_were_cut(writer):
    steps, rows, finals, parents = episodes(cut_share=1)
    refused(writer, (steps, rows, None, parents), RecordError, field="finals")
    refused(writer, (steps, rows, np.concatenate([finals, finals[:1]]), parents), RecordError, field="finals")
    strange = finals.copy()
    strange["episode"][1] = 77
    refused(writer, (steps, rows, strange, parents), RecordError, field="finals", episode=77)
    writer.append(steps, rows, finals[::-1], parents)
    view = writer.view()
    for row in range(len(rows)):
        assert view.final(row)["environment"] == rows["environment"][row]


def test_a_truncated_episode_needs_a_final_record_too(writer):
    batch = episodes(cut_share=0)
    batch[0]["terminated"][-1], batch[0]["truncated"][-1] = 0, 1
    refused(writer, batch, RecordError, field="finals", episode=int(batch[1]["episode"][-1]))


def test_a_graph_in_which_a_step_uses_itself_or_a_later_one_is_refused(writer):
    steps, rows, finals, parents = episodes(count=3, max_steps=9)
    step = int(rows["steps"][0])  # the first word of the second episode, in which nothing may be set
    for bit in (0, 5, 63):
        wrong = parents.copy()
        wrong[step] = np.uint64(1 << bit)
        place = {"environment": int(rows["environment"][1]), "step": 0, "field": "parents"}
        refused(writer, (steps, rows, finals, wrong), RecordError, **place)


@given(st.integers(1, 200), st.integers(0, 199), st.integers(0, 255))
def test_parents_must_come_before_their_children(length, child, parent):
    from agentpipe.experience.store.intake import Layout, copy_graphs, prepare

    child, width = child % length, -(-length // 64)
    parent %= 64 * width
    rows = np.zeros(1, rec.EPISODE)
    rows["steps"] = length
    words = np.zeros((length, width), "<u8")
    words[child, parent // 64] = np.uint64(1) << np.uint64(parent % 64)
    layout = Layout.of(4, 6)
    batch = prepare(layout, np.zeros(length, layout.steps), rows, None, words.reshape(-1))
    target = np.zeros(words.size, "<u8")
    if parent < child:
        copy_graphs(batch, target)
        np.testing.assert_array_equal(target, words.reshape(-1))
    else:
        with pytest.raises(RecordError) as caught:
            copy_graphs(batch, target)
        assert caught.value.where["step"] == child


def test_without_parents_each_step_depends_on_the_one_before(writer):
    steps, rows, finals, _ = episodes(count=1, max_steps=1)
    rows["steps"] = 130
    steps = np.repeat(steps, 130)
    steps["step"] = np.arange(130)
    writer.append(steps, rows, finals)
    bits = np.unpackbits(writer.view().parents(0).view(np.uint8), axis=1, bitorder="little")
    np.testing.assert_array_equal(bits[:, :130], np.eye(130, k=-1))
    assert not bits[:, 130:].any()


def test_the_same_episode_is_not_recorded_twice(writer):
    batch = episodes()
    writer.append(*batch)
    refused(writer, batch, RecordError, environment=int(batch[1]["environment"][0]))
    mixed = episodes(seed=1, count=11)  # six of these are there already, whatever their order
    refused(writer, mixed, RecordError)
    twice = episodes(first_episode=9, count=2, cut_share=0)
    for array in twice[:2]:
        array["environment"], array["episode"] = 100, 50
    refused(writer, twice, RecordError, environment=100, episode=50)
    writer.append(*episodes(first_episode=9))
    assert writer.episodes == 12


def test_policies_are_on_disk_before_a_record_uses_them(writer):
    assert writer.policy("second", "2", 3) == 1
    assert writer.policy("third", "9", 4) == 2
    assert open_live(writer.directory).policies[2] == {"player": "third", "version": "9", "ordinal": 4}
    batch = episodes()
    batch[0]["policy"] = 2
    writer.append(*batch)
    writer.close()
    with ShardWriter.open(writer.directory, header()) as again:
        assert again.policy("third", "9", 4) == 2
        assert len(again.header["policies"]) == 3


def test_a_second_writer_gets_the_name_of_the_first(tmp_path):
    with ShardWriter.open(tmp_path / "open", header(), holder="training line/42"):
        with pytest.raises(LockHeldError) as caught:
            ShardWriter.open(tmp_path / "open", header())
        assert f"training line/42 (process {os.getpid()})" in str(caught.value)
        other = (
            "import sys; from pathlib import Path; from agentpipe.experience.store.lock import WriterLock\n"
            "from agentpipe.errors import LockHeldError\n"
            "try: WriterLock(Path(sys.argv[1]), 'x')\n"
            "except LockHeldError as error: print(error)"
        )
        command = [sys.executable, "-c", other, str(tmp_path / "open")]
        assert "training line/42" in subprocess.run(command, capture_output=True, text=True).stdout
    ShardWriter.open(tmp_path / "open", header()).close()


def test_a_lock_whose_shard_was_moved_away_meanwhile_is_not_taken(tmp_path, monkeypatch):
    import fcntl

    (tmp_path / "open").mkdir()
    real = fcntl.flock

    def moved(descriptor, how):
        (tmp_path / "open" / "lock").unlink()
        real(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", moved)
    with pytest.raises(LockHeldError):
        ShardWriter.open(tmp_path / "open", header())


def test_a_fork_of_the_writer_cannot_write(writer):
    batch = episodes()
    child = os.fork()
    if not child:
        try:
            writer.append(*batch)
        except StoreError as error:
            os._exit(0 if "belongs to process" in str(error) else 2)
        finally:
            writer.close()
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    writer.append(*batch)
    with pytest.raises(LockHeldError):
        ShardWriter.open(writer.directory, header())


def test_a_closed_writer_says_so(writer):
    writer.close()
    writer.close()
    for use in (lambda: writer.append(*episodes()), writer.flush, writer.view, lambda: writer.recorded):
        with pytest.raises(StoreError, match="closed"):
            use()


def test_another_recording_in_the_same_place_is_refused(tmp_path):
    ShardWriter.open(tmp_path / "open", header()).close()
    with pytest.raises(RecordError) as caught:
        ShardWriter.open(tmp_path / "open", header(table_version="t2"))
    assert caught.value.where["field"] == "table_version"
    with pytest.raises(RecordError):
        ShardWriter.open(tmp_path / "open", header(seed=1))
    with pytest.raises(RecordError, match="must hold"):
        ShardWriter.open(tmp_path / "other", {"observation_size": 4, "action_count": 6})


def test_a_sealed_shard_is_not_written_again(tmp_path):
    shard = write_shard(tmp_path / "shard")
    with pytest.raises(RecordError, match="sealed already"):
        ShardWriter.open(shard.path, header())
    shard.check()


def test_an_open_shard_of_another_format_is_refused(tmp_path):
    ShardWriter.open(tmp_path / "open", header()).close()
    file = tmp_path / "open" / "header.json"
    file.write_text(file.read_text().replace('"format": 2', '"format": 3'))
    with pytest.raises(VersionError, match="format 3, this program writes 2"):
        ShardWriter.open(tmp_path / "open", header())
    file.unlink()
    ShardWriter.open(tmp_path / "open", header()).close()


def test_a_header_that_went_missing_is_noticed(writer):
    writer.append(*episodes())
    writer.close()
    (writer.directory / "header.json").unlink()
    with pytest.raises(CorruptError) as caught:
        ShardWriter.open(writer.directory, header())
    assert caught.value.where["file"] == writer.directory / "header.json"


@pytest.mark.parametrize(
    ("name", "record", "dtype", "field"),
    [
        ("records.bin", 3, rec.step_dtype(4, 6), "reward"),
        ("finals.bin", 2, rec.final_dtype(4, 6), "observation"),
        ("episodes.bin", 4, rec.EPISODE, "machine"),
        ("graph.bin", 0, np.dtype([("parents of step 0", "<u8")]), "parents of step 0"),
    ],
)
def test_damage_in_the_latest_group_is_noticed_on_reopening(tmp_path, name, record, dtype, field):
    with ShardWriter.open(tmp_path / "open", header()) as writer:
        writer.append(*episodes(cut_share=1))
    file = tmp_path / "open" / name
    data = bytearray(file.read_bytes())
    data[record * dtype.itemsize + dtype.fields[field][1]] ^= 16
    file.write_bytes(data)
    with pytest.raises(CorruptError) as caught:
        ShardWriter.open(tmp_path / "open", header())
    assert caught.value.where == {"file": file, "record": record, "field": field}


def test_an_open_shard_with_many_groups_looks_at_the_latest_only(tmp_path):
    with ShardWriter.open(tmp_path / "open", header()) as writer:
        for number in range(3):
            writer.append(*episodes(count=200, first_episode=100 * number, cut_share=0.3))
    with ShardWriter.open(tmp_path / "open", header()) as writer:
        assert writer.episodes == 600
        writer.view().check()
    file = tmp_path / "open" / "finals.bin"
    data = bytearray(file.read_bytes())
    last = len(open_live(tmp_path / "open").finals) - 1
    data[last * writer.final_dtype.itemsize + 20] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptError) as caught:
        ShardWriter.open(tmp_path / "open", header())
    assert caught.value.where == {"file": file, "record": last, "field": "episode"}


def test_older_damage_is_noticed_on_reopening_after_the_machine_was_started_anew(tmp_path, monkeypatch):
    with ShardWriter.open(tmp_path / "open", header()) as writer:
        for number in range(3):
            writer.append(*episodes(count=200, first_episode=100 * number))
    file = tmp_path / "open" / "records.bin"
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(data)
    ShardWriter.open(tmp_path / "open", header()).close()
    monkeypatch.setattr("agentpipe.experience.store.header.current_boot", lambda: "another")
    with pytest.raises(CorruptError) as caught:
        ShardWriter.open(tmp_path / "open", header())
    assert caught.value.where["record"] == 1


def test_under_power_episodes_count_in_groups(tmp_path):
    with ShardWriter.open(tmp_path / "open", header(), durability="power", group=8) as writer:
        assert writer.append(*episodes(count=6)) == range(6)
        assert writer.episodes == len(open_live(tmp_path / "open").episodes) == 0
        assert writer.find(100, 0) is None
        refused(writer, episodes(seed=5), RecordError)
        writer.append(*episodes(count=3, first_episode=9))
        assert writer.episodes == len(open_live(tmp_path / "open").episodes) == 9
        writer.append(*episodes(count=1, first_episode=20))
        writer.flush()
        assert writer.episodes == 10
        writer.append(*episodes(count=1, first_episode=21))
    with ShardWriter.open(tmp_path / "open", header()) as writer:
        assert writer.episodes == 11


def test_under_power_data_is_on_disk_before_the_counter_says_so(tmp_path, monkeypatch):
    order = []
    real = os.fdatasync

    def note(descriptor):
        order.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        real(descriptor)

    with ShardWriter.open(tmp_path / "open", header(), durability="power", group=1) as writer:
        monkeypatch.setattr(os, "fdatasync", note)
        writer.append(*episodes())
    assert order == ["records.bin", "finals.bin", "graph.bin", "episodes.bin", "counter.bin"]


@pytest.mark.parametrize("durability", ["process", "power"])
@pytest.mark.parametrize("what", ["put", "move"])
def test_a_commit_that_fails_counts_nothing_and_can_be_tried_again(tmp_path, monkeypatch, durability, what):
    from agentpipe.experience.store.counter import Counter
    from agentpipe.experience.store.index import OpenIndex

    kind = {"put": OpenIndex, "move": Counter}[what]
    with ShardWriter.open(tmp_path / "open", header(), durability=durability, group=1) as writer:
        writer.append(*episodes())

        def fails(*_, **__):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(kind, what, fails)
            with pytest.raises(KeyboardInterrupt):
                writer.append(*episodes(first_episode=9))
        assert writer.episodes == 6
        writer.append(*episodes(seed=4, first_episode=9))
        assert writer.episodes == 12
        shard = writer.seal(tmp_path / "shard", names=names(), reasons=[])
    shard.check()
