"""Rows of feedback for a policy with three features and two actions, and how they are dropped and taken in."""

from __future__ import annotations

import datetime as dt
import json

import pytest

from agentpipe.feedback.intake import take_in
from agentpipe.feedback.schema import FeedbackShape

SHAPE = FeedbackShape(3, 2)
DAY = dt.date(2026, 3, 29)
NOW = dt.datetime(2026, 4, 1, tzinfo=dt.UTC)


def decision(identifier="d1", **changes):
    return {
        "kind": "decision",
        "decision_id": identifier,
        "time": "2026-03-29T01:30:00Z",
        "line_id": "L1",
        "policy_version": "p1",
        "observation": [0.5, -1, 2e3],
        "last_action": 2,
        "elapsed_minutes": 1.5,
        "mask": [True, True],
        "probabilities": [0.25, 0.75],
        "action": 1,
        "result": "done",
        **changes,
    }


def label(identifier="l1", **changes):
    return {
        "kind": "label",
        "label_id": identifier,
        "decision_id": "d1",
        "time": "2026-03-29T09:00:00+02:00",
        "verdict": "wrong",
        "error_type": "planning",
        "confidence": 0.8,
        "annotator": "kim",
        "corrected_action": 0,
        **changes,
    }


def drop(folder, name, rows, end="\n"):
    folder.mkdir(parents=True, exist_ok=True)
    text = "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + end
    (folder / name).write_text(text)


class Home:
    """An inbox and a store; called, it takes in what lies in the inbox and returns the report as a dictionary."""

    def __init__(self, folder):
        self.inbox, self.store = folder / "inbox", folder / "store"

    def __call__(self, day=DAY, **rules):
        report = take_in(self.inbox, day, self.store, **{"now": NOW, "shape": SHAPE, **rules})
        return report.to_json()

    def drop(self, name, *rows, end="\n"):
        drop(self.inbox, name, rows, end)

    def put(self, name, data):
        self.inbox.mkdir(parents=True, exist_ok=True)
        (self.inbox / name).write_bytes(data)

    def names(self, below=""):
        folder = self.inbox / below
        return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


@pytest.fixture
def home(tmp_path):
    return Home(tmp_path)
