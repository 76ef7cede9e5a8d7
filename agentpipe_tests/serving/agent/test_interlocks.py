"""Declared limits stand outside the policy: what they forbid is neither offered nor done."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentpipe.environments.layout import A_EXPEDITE, A_START, ACTION_COUNT
from agentpipe.serving.agent.interlocks import MOST_ORDERS, Interlock, InterlockError, Interlocks, read_interlocks
from agentpipe.serving.agent.vocabulary import BUILT_IN, Vocabulary
from agentpipe_tests.serving.agent.questions import frame, line_frame


def written(tmp_path, text, name="limits.toml"):
    path = tmp_path / name
    path.write_text(text)
    return path


def read(tmp_path, text, vocabulary=BUILT_IN, count=ACTION_COUNT):
    return read_interlocks(written(tmp_path, text), vocabulary, count)


def forbidden(interlocks, question):
    mask, _ = interlocks.narrow(question)
    return set(np.flatnonzero(question.mask & ~mask).tolist())


def test_an_action_forbidden_by_name_is_taken_out_of_the_mask_where_the_interlock_is_in_force(tmp_path):
    limits = read(
        tmp_path,
        '[[interlock]]\nname = "no start before dispatch"\nactions = ["start"]\nsegments = ["identify", "assess"]\n',
    )
    assert forbidden(limits, line_frame("identify")) == {A_START}
    assert forbidden(limits, line_frame("execute")) == set()
    assert limits.refuses(line_frame("assess"), A_START) == "no start before dispatch"
    mask, notes = limits.narrow(line_frame("identify"))
    assert notes == ("interlock no start before dispatch: start",)
    assert not mask[A_START]


def test_at_most_so_many_of_an_order_counts_each_order_anew(tmp_path):
    limits = read(tmp_path, '[[interlock]]\nname = "expedites"\nactions = ["expedite"]\nat_most = 2\nper = "order"\n')
    for _ in range(2):
        assert forbidden(limits, line_frame("dispatch")) == set()
        limits.done("l1", "o1", A_EXPEDITE, 0.0)
    assert forbidden(limits, line_frame("dispatch")) == {A_EXPEDITE}
    assert forbidden(limits, line_frame("dispatch", line="l2")) == set()
    assert forbidden(limits, line_frame("dispatch", order="o2")) == set()


def test_each_open_order_of_a_line_is_counted_whatever_comes_between(tmp_path):
    limits = read(tmp_path, '[[interlock]]\nname = "expedites"\nactions = ["expedite"]\nat_most = 2\nper = "order"\n')
    for order in ("o1", "o2", "o1", "o3"):
        limits.done("l1", order, A_EXPEDITE, 0.0)
        limits.done("l1", order, A_START, 0.0)
    closed = {order for order in ("o1", "o2", "o3") if forbidden(limits, line_frame("dispatch", order=order))}
    assert closed == {"o1"}
    limits.done("l1", "o2", A_EXPEDITE, 0.0)
    assert forbidden(limits, line_frame("dispatch", order="o2")) == {A_EXPEDITE}
    for number in range(MOST_ORDERS + 1):
        limits.done("l1", f"many-{number}", A_EXPEDITE, 0.0)
    assert len(limits._of_order) == MOST_ORDERS


@given(
    times=st.lists(st.integers(0, 200), max_size=30).map(sorted),
    at_most=st.integers(1, 4),
    asked=st.integers(0, 300),
)
def test_a_window_counts_what_a_list_of_all_times_says(times, at_most, asked):
    limit = Interlock("x", frozenset({1}), at_most=at_most, per="minute")
    limits = Interlocks([limit], Vocabulary())
    times = [each for each in times if each <= asked]
    for each in times:
        limits.done("l1", "o1", 1, float(each))
    naive = sum(1 for each in times if each > asked - 60) >= at_most
    assert (limits.refuses(frame(received=float(asked)), 1) is not None) == naive


@pytest.mark.parametrize("per", ["minute", "hour", "day"])
@pytest.mark.parametrize("days", [-2, 2])
def test_a_wall_clock_that_jumps_and_comes_back_opens_no_window(tmp_path, per, days):
    limits = read(tmp_path, f'[[interlock]]\nname = "r"\nactions = [0]\nat_most = 1\nper = "{per}"\n', Vocabulary(), 4)
    real = dt.datetime.now(dt.UTC)
    limits.done("l1", "o1", 0, time.monotonic())
    for wall in (real, real + dt.timedelta(days=days), real):
        assert forbidden(limits, frame(time=wall)) == {0}
        limits.done("l1", "o1", 1, time.monotonic())


def test_lines_whose_windows_are_over_are_forgotten_and_no_other():
    limits = Interlocks([Interlock("x", frozenset({1}), at_most=1, per="minute")], Vocabulary())
    for number in range(3 * MOST_ORDERS):
        limits.done(f"l{number}", "o1", 1, 100.0 if number < MOST_ORDERS else 200.0)
    assert len(limits._recent) == 2 * MOST_ORDERS
    assert limits.refuses(frame(line=f"l{MOST_ORDERS}", received=201.0), 1) == "x"


def test_hours_are_forbidden_where_either_clock_says_so(tmp_path):
    text = '[[interlock]]\nname = "day"\nactions = [0]\nallowed_hours = "06:00-22:00"\n'
    limits = read(tmp_path, text, Vocabulary(), 4)
    noon, night = (dt.datetime(2026, 1, 1, hour, tzinfo=dt.UTC) for hour in (12, 2))
    found = {}
    for steady in (noon, night):
        limits.steady = lambda steady=steady: steady
        found.update({(steady.hour, wall.hour): forbidden(limits, frame(time=wall)) for wall in (noon, night)})
    assert found == {(12, 12): set(), (12, 2): {0}, (2, 12): {0}, (2, 2): {0}}


@pytest.mark.parametrize(
    "text",
    [
        '{"interlock": [{"name": "a", "actions": [0]}], "interlock": [{"name": "b", "actions": [1]}]}',
        '{"interlock": [{"name": "a", "actions": [0], "actions": [1]}]}',
        '{"interlock": [{"name": "a", "name": "a", "actions": [0]}]}',
    ],
)
def test_a_key_that_occurs_twice_is_refused(tmp_path, text):
    with pytest.raises(InterlockError, match="occurs twice"):
        read_interlocks(written(tmp_path, text, "limits.json"), Vocabulary(), 4)


def test_lines_that_are_not_there_are_known(tmp_path):
    limits = read(tmp_path, '[[interlock]]\nname = "a"\nactions = [0]\nlines = ["l", "L"]\n', Vocabulary(), 4)
    assert limits.absent_lines(["L", "M"]) == ("l",)
    assert limits.absent_lines(["l", "L"]) == ()


def test_a_rate_is_a_sliding_window_of_the_monotonic_clock(tmp_path):
    limits = read(
        tmp_path, '[[interlock]]\nname = "rate"\nactions = [1, 2]\nat_most = 2\nper = "minute"\n', Vocabulary(), 4
    )
    limits.done("l1", "o1", 1, 1_000.0)
    limits.done("l1", "o2", 2, 970.0)

    def at(seconds):
        return forbidden(limits, frame(received=1_000.0 + seconds))

    assert (at(0), at(59), at(60), at(90)) == ({1, 2}, {1, 2}, set(), set())


@pytest.mark.parametrize(
    ("moment", "allowed"),
    [
        ("2026-03-29T03:59:00+00:00", False),  # 05:59 in Berlin, an hour after the clocks went forward
        ("2026-03-29T04:00:00+00:00", True),
        ("2026-03-29T19:59:00+00:00", True),
        ("2026-03-29T20:00:00+00:00", False),
        ("2026-10-25T04:59:00+00:00", False),  # 05:59, after they went back
        ("2026-10-25T05:00:00+00:00", True),
    ],
)
def test_allowed_hours_are_those_of_the_zone(tmp_path, moment, allowed):
    limits = read(
        tmp_path,
        '[[interlock]]\nname = "day"\nactions = [0]\nallowed_hours = "06:00-22:00"\ntimezone = "Europe/Berlin"\n',
        Vocabulary(),
        4,
    )
    question = frame(time=dt.datetime.fromisoformat(moment))
    assert forbidden(limits, question) == (set() if allowed else {0})


def test_hours_over_midnight(tmp_path):
    limits = read(
        tmp_path, '[[interlock]]\nname = "night"\nactions = [0]\nallowed_hours = "22:00-06:00"\n', Vocabulary(), 4
    )
    hours = [
        hour for hour in range(24) if not forbidden(limits, frame(time=dt.datetime(2026, 1, 1, hour, tzinfo=dt.UTC)))
    ]
    assert hours == [0, 1, 2, 3, 4, 5, 22, 23]


def test_json_says_the_same_as_toml(tmp_path):
    entries = {"interlock": [{"name": "x", "actions": [3], "lines": ["l9"]}]}
    limits = read_interlocks(written(tmp_path, json.dumps(entries), "limits.json"), Vocabulary(), 4)
    assert forbidden(limits, frame(line="l9")) == {3}
    assert forbidden(limits, frame()) == set()


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("interlock = 3", "interlock"),
        ('title = "x"\n[[interlock]]\nname = "a"\nactions = ["start"]', "interlock"),
        ('[[interlock]]\nactions = ["start"]', "interlock 1, name"),
        ('[[interlock]]\nname = "a\\nb"\nactions = ["start"]', "interlock 1, name"),
        ('[[interlock]]\nname = "a"\nactions = ["start"]\nat_most = 100001\nper = "day"', "interlock 1, at_most"),
        ('[[interlock]]\nname = "a"', "interlock 1, actions"),
        ('[[interlock]]\nname = "a"\nactions = []', "interlock 1, actions"),
        ('[[interlock]]\nname = "a"\nactions = ["strat"]', "interlock 1, actions"),
        ('[[interlock]]\nname = "a"\nactions = [999]', "interlock 1, actions"),
        ('[[interlock]]\nname = "a"\nactions = [-1]', "interlock 1, actions"),
        ('[[interlock]]\nname = "a"\nactions = [true]', "interlock 1, actions"),
        ('[[interlock]]\nname = "a"\nactions = ["start"]\nsegment = "x"', "interlock 1, segment"),
        ('[[interlock]]\nname = "a"\nactions = ["start"]\nsegments = ["x"]', "interlock 1, segments"),
        ('[[interlock]]\nname = "a"\nactions = ["start"]\nat_most = 2', "interlock 1, per"),
        ('[[interlock]]\nname = "a"\nactions = ["start"]\nat_most = 0\nper = "order"', "interlock 1, at_most"),
        ('[[interlock]]\nname = "a"\nactions = ["start"]\nat_most = 2\nper = "week"', "interlock 1, per"),
        ('[[interlock]]\nname = "a"\nactions = ["start"]\nallowed_hours = "6-22"', "interlock 1, allowed_hours"),
        ('[[interlock]]\nname = "a"\nactions = ["start"]\ntimezone = "UTC"', "interlock 1, timezone"),
        (
            '[[interlock]]\nname = "a"\nactions = ["start"]\nallowed_hours = "06:00-07:00"\ntimezone = "Mars/X"',
            "interlock 1, timezone",
        ),
        ('[[interlock]]\nname = "a"\nactions = ["start"]\nlines = [1]', "interlock 1, lines"),
        ('[[interlock]]\nname = "a"\nactions=[0]\n[[interlock]]\nname = "a"\nactions=[1]', "interlock 2, name"),
    ],
)
def test_a_malformed_file_is_refused_with_file_and_field(tmp_path, text, field):
    with pytest.raises(InterlockError) as caught:
        read(tmp_path, text)
    assert caught.value.where["field"] == field
    assert str(caught.value.where["file"]).endswith("limits.toml")


@pytest.mark.parametrize("data", [b"", b"[[", b"\xff\xfe", b"[" * 100_000])
@pytest.mark.parametrize("suffix", ["toml", "json"])
def test_what_is_no_list_of_limits_is_refused(tmp_path, data, suffix):
    path = tmp_path / f"limits.{suffix}"
    path.write_bytes(data)
    with pytest.raises(InterlockError):
        read_interlocks(path, BUILT_IN, ACTION_COUNT)
    with pytest.raises(InterlockError, match="cannot be read"):
        read_interlocks(tmp_path / "none", BUILT_IN, ACTION_COUNT)


VALUES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9)


@given(st.dictionaries(st.sampled_from(["name", "actions", "at_most", "per", "lines"]), VALUES | st.lists(VALUES)))
def test_whatever_a_file_says_it_is_read_or_refused(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("limits") / "limits.json"
    path.write_text(json.dumps({"interlock": [content]}))
    with contextlib.suppress(InterlockError):
        assert read_interlocks(path, BUILT_IN, ACTION_COUNT).interlocks[0].actions


def test_without_interlocks_everything_is_allowed():
    none = Interlocks((), BUILT_IN)
    question = line_frame("identify")
    assert none.narrow(question)[0].tolist() == question.mask.tolist()
    assert none.refuses(question, 0) is None
