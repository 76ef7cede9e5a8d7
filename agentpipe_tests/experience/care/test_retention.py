"""Retention: a plan that spares whatever somebody refers to."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentpipe.errors import SettingsError
from agentpipe.experience.care.retention import DAY_NS, Candidate, Rules, plan

NOW = 1_000 * DAY_NS


def shard(name, *, age=0.0, ordinal=0, size=100, shrunk=10, claims=(), **changes):
    fields = {
        "path": Path("/home") / name,
        "state": "sealed",
        "group": "sensor-1",
        "recorded": True,
        "bytes": size,
        "shrunk_bytes": shrunk,
        "sealed_ns": NOW - round(age * DAY_NS),
        "ordinal": ordinal,
        "claims": tuple(claims),
        "current": False,
    }
    return Candidate(**{**fields, **changes})


def verbs(candidates, **rules):
    return {action.candidate.path.name: action.verb for action in plan(candidates, Rules(**rules), now_ns=NOW).actions}


def test_without_rules_everything_stays():
    assert verbs([shard("a", age=900), shard("b", state="open", sealed_ns=None)]) == {"a": "keep", "b": "keep"}


def test_what_is_too_old_is_deleted_unless_somebody_refers_to_it():
    candidates = [
        shard("young", age=2),
        shard("old", age=40),
        shard("claimed", age=40, claims=["update-000045"]),
        shard("foreign", age=40, claims=["update-000045"], shrunk_bytes=None),
        shard("current", age=40, claims=["trajectories[sensor-1]"], current=True),
    ]
    assert verbs(candidates, max_age_days=30) == {
        "young": "keep",
        "old": "delete",
        "claimed": "shrink",
        "foreign": "keep",
        "current": "keep",
    }


def test_a_shard_without_a_seal_time_has_no_age():
    assert verbs([shard("a", sealed_ns=None)], max_age_days=0) == {"a": "keep"}


def test_the_newest_policies_stay_and_only_recorded_trajectories_count():
    candidates = [shard(f"p{ordinal}", ordinal=ordinal) for ordinal in (0, 3, 7)]
    candidates.append(shard("rollouts", ordinal=900, recorded=False, group="2026-01-01_manual"))
    found = verbs(candidates, keep_policies=2)
    assert found == {"p0": "delete", "p3": "keep", "p7": "keep", "rollouts": "keep"}


def test_a_budget_deletes_the_oldest_unclaimed_first_then_shrinks_the_oldest_claimed():
    candidates = [
        shard("a", age=50, claims=["package"]),
        shard("b", age=40),
        shard("c", age=30, claims=["package"]),
        shard("d", age=20),
    ]
    assert verbs(candidates, budget=400) == dict.fromkeys("abcd", "keep")
    assert verbs(candidates, budget=399) == {"a": "keep", "b": "delete", "c": "keep", "d": "keep"}
    assert verbs(candidates, budget=200) == {"a": "keep", "b": "delete", "c": "keep", "d": "delete"}
    assert verbs(candidates, budget=110) == {"a": "shrink", "b": "delete", "c": "keep", "d": "delete"}


def test_the_limit_of_a_group_looks_at_that_group_alone():
    candidates = [shard("a", age=2), shard("b", age=1), shard("c", age=3, group="load-1")]
    assert verbs(candidates, max_bytes=100) == {"a": "delete", "b": "keep", "c": "keep"}


def test_a_limit_that_cannot_be_met_says_by_how_much():
    candidates = [shard("a", claims=["x"]), shard("b", claims=["y"], current=True)]
    found = plan(candidates, Rules(budget=50), now_ns=NOW)
    assert (found.bytes_before, found.bytes_after, found.over) == (200, 110, 60)


def test_a_limit_that_is_missed_never_calls_what_stays_within_the_limits():
    candidates = [
        shard("used", claims=["package of a", "b", "c"], shrunk_bytes=None),
        shard("tiny", claims=["package of a"], state="shrunk", shrunk_bytes=None),
        shard("current", claims=["trajectories[sensor-1]"], current=True),
        shard("elsewhere", claims=["x"], group="load-1", size=1),
    ]
    found = plan(candidates, Rules(max_bytes=50), now_ns=NOW)
    assert {action.candidate.path.name: action.reason for action in found.actions} == {
        "used": "in use by package of a and 2 more, cannot be played again",
        "tiny": "in use by package of a, already shrunk",
        "current": "current: trajectories[sensor-1]",
        "elsewhere": "within the limits",
    }
    assert found.in_use() == [
        {"by": "package of a", "shards": 2, "bytes": 200},
        {"by": "current trajectories", "shards": 1, "bytes": 100},
        {"by": "x", "shards": 1, "bytes": 1},
    ]


def test_an_open_shard_goes_only_when_asked_for_and_nobody_writes_or_refers_to_it():
    candidates = [
        shard("held", state="open", holder="run 7"),
        shard("claimed", state="open", claims=["update-000045"]),
        shard("left", state="open"),
    ]
    assert verbs(candidates, max_age_days=0, budget=0) == dict.fromkeys(("held", "claimed", "left"), "keep")
    assert verbs(candidates, leftovers=True) == {"held": "keep", "claimed": "keep", "left": "delete"}
    reasons = [action.reason for action in plan(candidates, Rules(), now_ns=NOW).actions]
    left = "left over: nobody writes to it or refers to it; --leftovers deletes it"
    assert reasons == ["open, update-000045 refers to it", "held by run 7", left]


def test_shards_of_another_format_are_left_over_too():
    candidates = [shard("old", readable=False, sealed_ns=None), shard("claimed", readable=False, claims=["x"])]
    assert verbs(candidates) == {"old": "keep", "claimed": "keep"}
    assert verbs(candidates, leftovers=True) == {"old": "delete", "claimed": "keep"}


def test_damaged_shards_are_for_the_check():
    assert verbs([shard("a", age=99, state="damaged")], max_age_days=1, budget=0) == {"a": "keep"}


@pytest.mark.parametrize(
    "wrong",
    [{"max_age_days": -1}, {"max_age_days": float("nan")}, {"keep_policies": 0}, {"budget": -5}, {"max_bytes": -1}],
)
def test_senseless_limits_are_refused(wrong):
    with pytest.raises(SettingsError) as caught:
        Rules(**wrong)
    assert caught.value.where["field"] in wrong


CANDIDATES = st.lists(
    st.builds(
        lambda number, age, ordinal, size, shrunk, claimed, current, state: shard(
            str(number),
            age=age,
            ordinal=ordinal,
            size=size,
            shrunk=shrunk,
            claims=["x"] if claimed else [],
            current=current,
            state=state,
        ),
        st.integers(0, 10**6),
        st.floats(0, 100),
        st.integers(0, 9),
        st.integers(1, 1_000),
        st.none() | st.integers(0, 100),
        st.booleans(),
        st.booleans(),
        st.sampled_from(["sealed", "shrunk", "open", "damaged"]),
    ),
    max_size=12,
    unique_by=lambda found: found.path,
)
LIMITS = st.builds(
    Rules,
    max_age_days=st.none() | st.floats(0, 100),
    keep_policies=st.none() | st.integers(1, 9),
    max_bytes=st.none() | st.integers(0, 5_000),
    budget=st.none() | st.integers(0, 5_000),
    leftovers=st.booleans(),
)


@given(CANDIDATES, LIMITS)
def test_nothing_that_somebody_needs_is_ever_deleted_and_every_limit_is_met_or_reported(candidates, rules):
    found = plan(candidates, rules, now_ns=NOW)
    assert sorted(str(action.candidate.path) for action in found.actions) == sorted(str(c.path) for c in candidates)
    for action in found.actions:
        needed = action.candidate
        if needed.claims or needed.current or needed.state == "damaged":
            assert action.verb != "delete"
        if action.verb == "shrink":
            assert needed.shrunk_bytes is not None
            assert not needed.current
        assert action.reason
    if rules.budget is not None:
        assert found.bytes_after <= rules.budget + found.over
