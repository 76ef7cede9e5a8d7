"""The store against a naive model: the figures of every day, however rows were split into files and intakes."""

from __future__ import annotations

import datetime as dt
import itertools
import tempfile
from collections import Counter
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from agentpipe.feedback.labelled import read_labelled
from agentpipe.feedback.store import day_state, days, quarantine_counts, read_day
from agentpipe_tests.feedback.examples import Home, decision, label

DAYS = [dt.date(2026, 3, 27), dt.date(2026, 3, 28), dt.date(2026, 3, 29)]
times = st.builds(lambda day, hour: f"{day}T{hour:02d}:00:00+00:00", st.sampled_from(DAYS), st.integers(0, 23))
decisions = st.builds(lambda name, time: decision(name, time=time), st.sampled_from("abcd"), times)
labels = st.builds(
    lambda name, of, time, verdict: label(name, decision_id=of, time=time, verdict=verdict),
    st.sampled_from("pqrstu"),
    st.sampled_from("abcd"),
    times,
    st.sampled_from(["correct", "wrong", "needs_improvement"]),
)


class Model:
    """Rows in the order in which they come: of one id the first counts."""

    def __init__(self, rows):
        self.rows = {"decision": {}, "label": {}}
        self.duplicates = 0
        for row in rows:
            known, key = self.rows[row["kind"]], row[f"{row['kind']}_id"]
            self.duplicates += key in known
            known.setdefault(key, row)

    def of_day(self, day):
        mine = {
            kind: [row for row in known.values() if row["time"].startswith(str(day))]
            for kind, known in self.rows.items()
        }
        every = self.rows["label"].values()
        latest = {}
        for row in sorted(every, key=lambda row: (row["time"], row["label_id"])):
            latest[row["decision_id"]] = row["label_id"]
        joined = [row for row in mine["label"] if row["decision_id"] in self.rows["decision"]]
        trainable = sorted(row["label_id"] for row in joined if latest[row["decision_id"]] == row["label_id"])
        return {
            "decisions": len(mine["decision"]),
            "labels": len(mine["label"]),
            "labelled": sum(row["decision_id"] in latest for row in mine["decision"]),
            "orphans": len(mine["label"]) - len(joined),
            "superseded": len(joined) - len(trainable),
            "verdicts": dict(Counter(row["verdict"] for row in mine["label"])),
            "trainable": trainable,
        }


def taken_in(rows, cuts, folder):
    """Rows in pieces: each cut begins another file, every second one another intake."""
    home = Home(folder)
    places = [0, *sorted(cuts), len(rows)]
    for number, (start, end) in enumerate(itertools.pairwise(places)):
        if start < end:
            home.drop(f"{number:03d}.jsonl", *rows[start:end])
        if number % 2:
            home()
    home()
    return home


@settings(max_examples=12, deadline=None)
@given(st.lists(st.one_of(decisions, labels), max_size=14), st.lists(st.integers(0, 14), max_size=4))
def test_figures_of_every_day_are_those_of_a_naive_model(rows, cuts):
    model = Model(rows)
    with tempfile.TemporaryDirectory() as name:
        home = taken_in(rows, [min(cut, len(rows)) for cut in cuts], Path(name) / "split")
        whole = taken_in(rows, [], Path(name) / "whole")
        for day in DAYS:
            state, expected = day_state(home.store, day), model.of_day(day)
            assert read_labelled(home.store, day).label_id == tuple(expected["trainable"])
            assert state.trainable == len(expected.pop("trainable"))
            assert {key: getattr(state, key) for key in expected} == expected
            assert state.digest == day_state(whole.store, day).digest
            assert [table.num_rows for table in read_day(home.store, day)] == [state.decisions, state.labels]
        assert days(home.store) == [
            day for day in DAYS if day_state(home.store, day).decisions + model.of_day(day)["labels"]
        ]
        # the same bytes twice are one file, whose rows are known; else what comes again is a duplicate
        assert quarantine_counts(home.store).get("duplicate", 0) <= model.duplicates
        assert quarantine_counts(whole.store).get("duplicate", 0) == model.duplicates
