"""The parts of the buffer's benchmark that say more than how long something took."""

import json
import subprocess
import sys

import numpy as np
import pytest

from agentpipe.experience.store.live import open_live
from agentpipe.experience.store.writer import ShardWriter
from benchmarks import buffer_report, report
from benchmarks.buffer_crash import append_until_killed, count_wrong, kill_often, killed, pieces, reopen
from benchmarks.buffer_own import CHUNK, chunk, header, numbered, seal, write_all
from benchmarks.buffer_shares import shares
from benchmarks.fetched import fetch
from benchmarks.measure import ROOT


def count_to(last, tell):
    for number in range(1, last + 1):
        tell(number)


def test_a_killed_child_has_told_its_last_number():
    assert killed(count_to, (100,), live=None) == 100
    assert killed(count_to, (1,), live=None) == 1


def test_a_writer_killed_again_and_again_loses_nothing(tmp_path):
    notes = kill_often(tmp_path / "shard", 5).notes
    assert (notes["kills"], notes["counted_samples_lost"], notes["samples_that_differ"]) == (5, 0, 0)
    assert notes["samples_that_counted"] > 0


def test_samples_that_differ_are_found(tmp_path):
    with ShardWriter.open(tmp_path / "shard", header()) as writer:
        for number in range(20):
            writer.append(*pieces(number))
    shard = open_live(tmp_path / "shard")
    assert count_wrong(shard.records, shard.episodes) == 0
    records = shard.records.copy()
    records["observation"][7, 3] += 1
    records["reward"][100] += 1
    assert count_wrong(records, shard.episodes) == 2
    assert count_wrong(shard.records, shard.episodes[:-1]) > 0


def test_a_reopened_shard_has_all_that_was_told(tmp_path):
    figures = reopen(tmp_path, 3 * CHUNK, 1)
    assert [figure.notes["counted_samples_lost"] for figure in figures] == [0, 0]
    assert [figure.steps for figure in figures] == [3 * CHUNK] * 2


def test_appending_goes_on_where_the_last_writer_was_killed(tmp_path):
    first = killed(append_until_killed, (tmp_path / "shard",), 0.0)
    second = killed(append_until_killed, (tmp_path / "shard",), 0.0)
    assert 0 < first < second


def test_shares_have_an_interval_over_shards(tmp_path):
    sealed = []
    for number in range(3):
        with ShardWriter.open(tmp_path / f"open-{number}", header()) as writer:
            writer.append(*numbered(chunk(number), 0))
            sealed.append(seal(writer, tmp_path / f"sealed-{number}"))
    figures = {figure.name: figure.notes for figure in shares(sealed, "a test")}
    assert set(figures) == {
        "Shares: key-fault steps",
        "Shares: idle steps",
        "Shares: strictly idle steps",
        "Coverage",
    }
    assert figures["Coverage"]["uniform_stratified"].startswith("100 % (100")
    assert all(notes["shards"] == 3 for notes in figures.values())
    assert "(" in figures["Shares: key-fault steps"]["causal_over_uniform"]


def test_every_contestant_writes_whole_chunks(tmp_path):
    with write_all(tmp_path / "shard", 2 * CHUNK) as writer:
        assert writer.steps == 2 * CHUNK
        assert np.unique(writer.recorded["episode"]).tolist() == [0, 1]


def test_what_cannot_be_fetched_is_said(tmp_path):
    why = fetch(tmp_path / "none", ("./no-such-folder-here",))
    assert why.startswith("./no-such-folder-here could not be installed: ")
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
def test_a_smoke_run_leaves_results_that_the_page_can_show(tmp_path):
    command = [sys.executable, "-m", "benchmarks.buffer", "--smoke", "--alone", "--out", str(tmp_path)]
    printed = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True).stdout
    content = json.loads((tmp_path / "buffer.json").read_text())
    page = report.results(tmp_path)
    assert printed.strip() in page
    assert {figure["name"].partition(":")[0] for figure in content["figures"]} >= set(buffer_report.GROUPS)
    assert all(figure["name"].partition(": ")[2] in page for figure in content["figures"])
    assert "| stratified draws | 100 %" in page
