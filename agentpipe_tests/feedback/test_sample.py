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
    now = dt.datetime(2026, 1, 7, tzinfo=dt.UTC)
    report = take_in(inbox, dt.date(2026, 1, 5), tmp_path / "store", now=now, late_days=7)
    assert (report.state.decisions, report.state.labelled, report.intake.quarantined) == (24, 12, {})
    later = take_in(inbox, dt.date(2026, 1, 6), tmp_path / "store", now=now).state
    assert (later.decisions, later.labels, later.orphans, later.trainable) == (0, 12, 0, 12)
    assert later.verdicts["wrong"] >= 6
