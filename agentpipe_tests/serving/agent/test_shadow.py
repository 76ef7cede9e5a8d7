"""A candidate beside the champion: compared, never waited for."""

from __future__ import annotations

import dataclasses
import math
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from agentpipe.errors import BundleError, CorruptError, ServingError
from agentpipe.serving.agent.deciders import PolicyFiles
from agentpipe.serving.agent.shadow import QUEUE, Shadow, read_reports
from agentpipe.serving.agent.types import Answer
from agentpipe.serving.agent.vocabulary import BUILT_IN, Vocabulary
from agentpipe_tests.serving.agent.lines import wait_for
from agentpipe_tests.serving.agent.questions import LINE, SMALL, answer, ended, frame, line_frame

CHAMPION = PolicyFiles(Path("champion"), "policy", 1, "c" * 64, SMALL)
CANDIDATE = dataclasses.replace(CHAMPION, path=Path("candidate"), version="d" * 64)


class Candidate:
    """Says action 1 with probability 0.75; can be held up."""

    name, policy_version = "shadow", "d" * 64

    def __init__(self):
        self.error = None
        self.let_go = threading.Event()
        self.let_go.set()

    def decide(self, asked, timeout):
        self.let_go.wait(60)
        if self.error:
            raise self.error
        probabilities = np.zeros(len(asked.mask), np.float32)
        probabilities[:2] = 0.25, 0.75
        return Answer(1, probabilities, 0.0, "shadow", self.policy_version)

    def probe(self, timeout): ...

    def close(self): ...


def says(action, share, *, count=4, version="c" * 64):
    probabilities = np.zeros(count, np.float32)
    probabilities[action], probabilities[1 - action] = share, 1 - share
    return Answer(action, probabilities, 0.0, "local", version)


NO_NAMES = Vocabulary()


def shadow(tmp_path, decider, vocabulary=NO_NAMES, **options):
    return Shadow(CANDIDATE, CHAMPION, tmp_path, vocabulary, decider=decider, **options)


def test_agreement_divergence_and_disagreements_are_reported(tmp_path):
    made = shadow(tmp_path, Candidate())
    mask = (True, True, False, False)
    made.decided(frame(0, mask=mask), says(1, 0.75), 0.002)
    made.decided(frame(1, mask=mask), says(0, 0.75), 0.004)
    made.decided(frame(2, mask=mask), says(1, 1.0, version="rules-1"), 0.004)
    made.ended(ended())
    made.close()
    (report,) = read_reports(tmp_path)
    assert (report["rows"], report["rows_with_kl"], report["dropped"], report["failed"]) == (3, 2, 0, 0)
    assert report["agreement"] == pytest.approx(2 / 3)
    # KL of (1/4, 3/4) from (3/4, 1/4) is (3/4 - 1/4) ln 3; from itself 0
    assert report["kl_most"] == pytest.approx(0.5 * math.log(3), rel=1e-4)
    assert report["kl_mean"] == pytest.approx(0.25 * math.log(3), rel=1e-4)
    assert report["disagreements"] == [{"champion": "action 0", "candidate": "action 1", "count": 1}]
    assert report["latency_seconds"]["champion"] == {"p50": 0.004, "p99": 0.004}
    assert report["latency_seconds"]["candidate"]["p50"] >= 0
    assert (report["candidate"], report["champion"]) == ("d" * 64, "c" * 64)


def test_segments_are_told_apart(tmp_path):
    made = shadow(tmp_path, Candidate(), BUILT_IN)
    for segment, times in (("identify", 2), ("execute", 1)):
        for number in range(times):
            asked = line_frame(segment, number)
            made.decided(asked, says(number, 1.0, count=len(asked.mask)), 0.001)
    made.close()
    (report,) = read_reports(tmp_path)
    assert {name: group["rows"] for name, group in report["segments"].items()} == {"identify": 2, "execute": 1}
    assert report["segments"]["identify"]["agreement"] == 0.5


def test_a_slow_candidate_costs_the_champion_nothing_and_its_drops_are_counted(tmp_path):
    candidate = Candidate()
    candidate.let_go.clear()
    made = shadow(tmp_path, candidate)
    for number in range(QUEUE + 50):
        made.decided(frame(number), answer(0), 0.001)
    assert 49 <= made.dropped <= 50, "one may be in hand"
    candidate.let_go.set()
    made.close(30.0)
    (report,) = read_reports(tmp_path)
    assert report["rows"] + report["dropped"] == QUEUE + 50


def test_a_candidate_that_fails_is_counted(tmp_path):
    candidate = Candidate()
    candidate.error = ServingError("it is broken")
    made = shadow(tmp_path, candidate)
    made.decided(frame(0), answer(0), 0.001)
    made.close()
    (report,) = read_reports(tmp_path)
    assert (report["rows"], report["failed"], report["last_failure"]) == (0, 1, "it is broken")
    assert report["agreement"] is None


def test_the_report_is_written_while_it_runs(tmp_path):
    made = shadow(tmp_path, Candidate(), every=0.02)
    made.decided(frame(0), answer(0), 0.001)
    wait_for(lambda: [report for report in read_reports(tmp_path) if report["rows"] == 1])
    assert not read_reports(tmp_path)[0]["ended"]
    made.close()
    assert read_reports(tmp_path)[0]["ended"]


def test_the_oldest_reports_go(tmp_path, monkeypatch):
    monkeypatch.setattr("agentpipe.serving.agent.shadow.KEPT", 3)
    for number in (5, 1, 4, 2):
        (tmp_path / f"{number}.json").write_text("{}")
        os.utime(tmp_path / f"{number}.json", (number, number))
    made = shadow(tmp_path, Candidate())
    made.close()
    assert sorted(path.name for path in tmp_path.glob("*.json")) == ["4.json", "5.json", made.path.name]


def test_a_report_that_cannot_be_written_is_said(tmp_path):
    said = []
    (tmp_path / "shadow").touch()
    made = Shadow(CANDIDATE, CHAMPION, tmp_path / "shadow", Vocabulary(), decider=Candidate(), say=said.append)
    made.decided(frame(0), answer(0), 0.001)
    made.close()
    assert "cannot be written" in said[0]


def test_a_candidate_of_another_line_is_refused(tmp_path):
    with pytest.raises(BundleError, match="another line"):
        Shadow(dataclasses.replace(CANDIDATE, signature=LINE), CHAMPION, tmp_path, BUILT_IN, decider=Candidate())


def test_a_damaged_report_is_said_to_be(tmp_path):
    assert read_reports(tmp_path / "none") == []
    (tmp_path / "x.json").write_text('{"format": 9}')
    with pytest.raises(CorruptError, match="not a report"):
        read_reports(tmp_path)
