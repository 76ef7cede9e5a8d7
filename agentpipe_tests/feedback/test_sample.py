"""The feedback sample that comes with the project is valid feedback for the built-in line."""

from __future__ import annotations

import datetime as dt
import shutil

from agentpipe.environments.datafiles import data_dir
from agentpipe.feedback.intake import take_in

SAMPLE = "feedback_sample.jsonl"


def test_the_sample_is_taken_whole(tmp_path):
    inbox = tmp_path / "inbox"
    inbox.mkdir()
    shutil.copy(data_dir() / SAMPLE, inbox)
    report = take_in(inbox, dt.date(2026, 1, 5), tmp_path / "store", now=dt.datetime(2026, 1, 7, tzinfo=dt.UTC))
    assert (report.decisions, report.labelled_decisions, report.quarantined) == (24, 12, {})
    later = take_in(inbox, dt.date(2026, 1, 6), tmp_path / "store", now=dt.datetime(2026, 1, 7, tzinfo=dt.UTC))
    assert (later.decisions, later.labels, later.orphan_labels) == (0, 12, 0)
    assert later.verdicts["wrong"] >= 6
