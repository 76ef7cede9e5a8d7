"""A damaged index is said to be damaged by whoever reads or writes it, and takes no rows with it."""

from __future__ import annotations

import contextlib
import datetime as dt
import random
import shutil
import sqlite3

import pytest

from agentpipe.errors import CorruptError, StoreError
from agentpipe.feedback.index import index_path, reading
from agentpipe.feedback.intake import rules_for
from agentpipe.feedback.labelled import read_labelled
from agentpipe.feedback.retry import retry
from agentpipe.feedback.review import Answer, drop_answers, worst_first
from agentpipe.feedback.store import day_state, days, quarantine_counts, quarantined, read_day
from agentpipe_tests.feedback.examples import DAY, NOW, SHAPE, Home, decision, label

RULES = rules_for(now=NOW, shape=SHAPE)
MARCH = [dt.date(2026, 3, day) for day in range(20, 31)]
PAGE = 4096


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """Eight days of decisions and labels, and three reasons of quarantine; copied for each damage."""
    home = Home(tmp_path_factory.mktemp("filled"))
    rows = []
    for number in range(150):
        at = f"2026-03-{20 + number % 8}T01:30:00Z"
        rows.append(decision(f"d{number}", time=at))
        if number % 2:
            rows.append(label(f"l{number}", decision_id=f"d{number}", time=at))
        if number % 5 == 0:
            rows.append(decision(f"q{number}", policy_version="x", time=at))
        if number % 7 == 0:
            rows.append("{broken" + "x" * 200)
    home.drop("a.jsonl", *rows)
    home(versions=["p1"])
    home.drop("b.jsonl", label("last", decision_id="d4"))
    home()
    return home


@pytest.fixture
def home(filled, tmp_path):
    shutil.copytree(filled.store.parent, tmp_path, dirs_exist_ok=True)
    return Home(tmp_path)


def take(home):
    home.drop("c.jsonl", decision("n1"), label("n2", decision_id="d8"), label("l3"), decision("d5"))
    home()


READERS = {
    "days": lambda home: [day_state(home.store, day) for day in days(home.store)],
    "one day": lambda home: day_state(home.store, DAY),
    "quarantine": lambda home: (quarantine_counts(home.store), [row.to_json() for row in quarantined(home.store)]),
    "worst first": lambda home: worst_first(home.store, limit=5),
    "labelled": lambda home: [read_labelled(home.store, day) for day in MARCH],
    "rows": lambda home: [read_day(home.store, day) for day in MARCH],
    "answers": lambda home: drop_answers(home.store, home.inbox, [Answer("d1", "wrong", None, 1.0, "kim", None)], NOW),
}
WRITERS = {"retry": lambda home: retry(home.store, RULES), "take": take}


def flipped(data, rng):
    for _ in range(rng.choice((1, 5, 50))):
        data[rng.randrange(rng.choice((100, len(data))))] ^= 1 << rng.randrange(8)


def overwritten(data, rng):
    start, length = rng.randrange(len(data) // PAGE) * PAGE, rng.choice((64, PAGE))
    data[start : start + length] = rng.choice((bytes(length), rng.randbytes(length)))


def swapped(data, rng):
    one, other = (slice(page * PAGE, (page + 1) * PAGE) for page in rng.sample(range(len(data) // PAGE), 2))
    data[one], data[other] = data[other], data[one]


def truncated(data, rng):
    del data[rng.randrange(len(data)) :]


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("spoil", [flipped, overwritten, swapped, truncated])
def test_whatever_is_damaged_everybody_answers_or_says_so_and_no_part_is_removed(home, spoil, seed):
    path = index_path(home.store)
    data, rng = bytearray(path.read_bytes()), random.Random(f"{spoil.__name__}-{seed}")
    spoil(data, rng)
    before = {part: part.read_bytes() for part in home.store.glob("*/*.parquet")}
    for act in (*READERS.values(), *WRITERS.values()):
        for beside in ("-wal", "-shm"):
            path.with_name(path.name + beside).unlink(missing_ok=True)
        path.write_bytes(data)
        with contextlib.suppress(StoreError):
            act(home)
    assert {part: part.read_bytes() for part in before} == before


FIGURES = [
    "", "{", "null", "[]", "{}", "garbage", '{"digest": 1}', b"\xff\xfe", 7, "1e999",
    '{"current": 1, "digest": "x", "error_types": {}, "labels": 1, "orphans": 0, "superseded": 0, "verdicts": {}}',
]  # fmt: skip


def change(home, statement, *values):
    with contextlib.closing(sqlite3.connect(index_path(home.store))) as connection, connection:
        assert connection.execute(statement, values).rowcount


@pytest.mark.parametrize("figures", FIGURES)
def test_figures_of_a_day_that_make_no_sense_are_said_with_the_day(home, figures):
    change(home, "UPDATE days SET figures = ? WHERE day = (SELECT max(day) FROM days)", figures)
    last = days(home.store)[-1]
    with pytest.raises(CorruptError, match=f"figures of a day are damaged.*index.sqlite3.*{last}") as caught:
        day_state(home.store, last)
    assert "restore" in caught.value.remedy
    assert day_state(home.store, days(home.store)[0]).decisions


@pytest.mark.parametrize(
    ("column", "value"),
    [("digest", "0"), ("labels", -1), ("labels", 1.5), ("orphans", "1"), ("verdicts", {"nice": 1}), ("more", 1)],
)
def test_one_figure_that_makes_no_sense_is_enough(home, column, value):
    import json

    with contextlib.closing(sqlite3.connect(index_path(home.store))) as connection:
        (text,) = connection.execute("SELECT figures FROM days ORDER BY day").fetchone()
    figures = json.dumps({**json.loads(text), column: value})
    change(home, "UPDATE days SET figures = ? WHERE day = (SELECT min(day) FROM days)", figures)
    with pytest.raises(CorruptError, match="figures of a day"):
        READERS["days"](home)


@pytest.mark.parametrize(
    ("column", "value"), [("decisions", "x"), ("labelled", -1), ("labelled", 10_000), ("day", 2**40)]
)
def test_counts_and_days_that_make_no_sense_are_said(home, column, value):
    change(home, f"UPDATE days SET {column} = ? WHERE day = (SELECT min(day) FROM days)", value)
    with pytest.raises(CorruptError):
        READERS["days"](home)


@pytest.mark.parametrize("raw", [b"", b"no zlib", "text"])
def test_a_row_of_quarantine_that_cannot_be_unpacked_is_said(home, raw):
    change(home, "UPDATE quarantine SET raw = ? WHERE number = 3", raw)
    assert quarantine_counts(home.store)
    for act in (READERS["quarantine"], WRITERS["retry"]):
        with pytest.raises(CorruptError, match=r"row in quarantine is damaged.*entry 3"):
            act(home)


@pytest.mark.parametrize(
    ("column", "value"),
    [("verdict", 77), ("verdict", "x"), ("error", -2), ("confidence", 0), ("confidence", 9.0), ("corrected", -7)],
)
def test_a_label_that_makes_no_sense_trains_nothing(home, column, value):
    change(home, f"UPDATE labels SET {column} = ? WHERE id = 'l1'", value)
    with pytest.raises(CorruptError, match="labels of a day are damaged"):
        READERS["labelled"](home)


@pytest.mark.parametrize("statement", ["DELETE FROM parts", "DELETE FROM parts WHERE kind = 'label'"])
def test_parts_that_the_index_should_name_are_not_swept_away(home, statement):
    before = sorted(home.store.glob("*/*.parquet"))
    change(home, statement)
    for act in WRITERS.values():
        with pytest.raises(CorruptError, match="the index is damaged: parts"):
            act(home)
    assert sorted(home.store.glob("*/*.parquet")) == before


def test_an_error_over_a_sound_index_is_not_called_damage(home):
    with pytest.raises(ValueError, match="a fault of the program"), reading(home.store) as connection:  # noqa: PT012
        assert connection is not None
        raise ValueError("a fault of the program")
