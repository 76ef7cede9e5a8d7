"""Health with hysteresis, the threads that probe, and the disk."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentpipe.errors import DiskFullError, HomeError, ServiceError
from agentpipe.serving.agent.probes import Health, Part, Prober, disk_probe
from agentpipe_tests.serving.agent.waiting import until


def after(events, failures=3, successes=2):
    health = Health(failures, successes)
    ups = []
    for event in events:
        found = "request" if event in "RX" else "probe"
        (health.succeed if event in "+R" else lambda kind: health.fail(kind, "why"))(found)
        ups.append(health.up)
    return ups


@pytest.mark.parametrize(
    ("events", "ups"),
    [
        ("+", [True]),
        ("-", [None]),  # not known to be lost yet
        ("---", [None, None, False]),
        ("+--+--", [True] * 6),
        ("+---++", [True, True, True, False, False, True]),
        ("+---+-++", [True, True, True, False, False, False, False, True]),  # in a row
        ("+XXX", [True, True, True, False]),  # failed requests
        ("+XX-", [True, True, True, False]),  # of both kinds together
        ("+X+X+X", [True, True, True, True, True, False]),  # a good probe says nothing of requests
        ("+XRXRX", [True] * 6),
        ("+---R", [True, True, True, False, False]),  # nobody asks it, so only probes bring it back
    ],
)
def test_three_failures_in_a_row_lose_a_part_and_two_good_probes_bring_it_back(events, ups):
    assert after(events) == ups


@given(st.lists(st.sampled_from("+-RX"), max_size=60), st.integers(1, 4), st.integers(1, 4))
def test_a_part_changes_only_after_as_many_events_as_are_declared(events, failures, successes):
    health, before, since = Health(failures, successes), None, []
    for event in events:
        found = "request" if event in "RX" else "probe"
        changed = health.succeed(found) if event in "+R" else health.fail(found, "why")
        since.append(event)
        assert changed == (health.up is not before)
        if changed:
            if health.up is False:
                assert sum(each in "-X" for each in since) >= failures
            elif before is False:
                assert since[-successes:] == ["+"] * successes or since.count("+") >= successes
            before, since = health.up, []


class Flag:
    def __init__(self):
        self.error, self.count = None, 0

    def __call__(self, timeout):
        self.count += 1
        if self.error is not None:
            raise self.error


@pytest.fixture
def changes():
    return []


def prober(changes, *parts, **options):
    return Prober(
        parts, **{"every": 0.01, "timeout": 5.0, "failures": 3, "successes": 3, "on_change": changes.append, **options}
    )


def test_a_part_is_found_lost_and_back_and_each_is_told_once_with_its_reason(changes):
    flag = Flag()
    running = prober(changes, Part("disk", flag))
    running.start()
    until(lambda: running.up("disk"))
    flag.error = ServiceError("no room")
    until(lambda: running.lost() == {"disk": "no room"})
    flag.error = None
    until(lambda: running.up("disk"))
    running.close()
    assert [(change.part, change.up, change.reason) for change in changes] == [
        ("disk", True, "good probes"),
        ("disk", False, "no room"),
        ("disk", True, "good probes"),
    ]
    assert all(change.time.utcoffset().total_seconds() == 0 for change in changes)


@pytest.mark.parametrize(
    ("error", "reason"), [(OSError(5, "Input/output error"), "Input/output error"), (KeyError("x"), "KeyError: 'x'")]
)
def test_an_error_of_any_kind_is_a_failed_probe_and_the_thread_lives_on(changes, error, reason):
    flag = Flag()
    flag.error = error
    running = prober(changes, Part("part", flag))
    running.start()
    until(lambda: running.lost() == {"part": reason})
    flag.error = None
    until(lambda: running.up("part"))
    running.close()


def test_a_probe_that_hangs_holds_up_no_other(changes):
    gate, flag = threading.Event(), Flag()
    running = prober(changes, Part("stuck", lambda timeout: gate.wait(30) and None), Part("fine", flag))
    running.start()
    until(lambda: flag.count > 3)
    assert running.up("stuck") is None
    gate.set()
    running.close()


def test_a_probe_that_takes_too_long_has_failed(changes):
    running = prober(changes, timeout=0.0)
    assert "0 are allowed" in running.probe_once(Part("slow", lambda timeout: None))


def test_the_disk_is_probed_by_a_page_that_leaves_nothing(tmp_path):
    disk_probe(tmp_path / "new")(1.0)
    assert list((tmp_path / "new").iterdir()) == []


def test_a_disk_without_room_is_lost(tmp_path):
    with pytest.raises(DiskFullError, match="MiB are free"):
        disk_probe(tmp_path, least_free=2**60)(1.0)


def test_a_folder_that_cannot_be_written_is_lost(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(HomeError):
        disk_probe(tmp_path / "file")(1.0)
