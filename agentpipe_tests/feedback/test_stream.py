"""Feedback from a Redis stream: acknowledged only when durable, and every entry's row in one place."""

from __future__ import annotations

import contextlib
import json
import time

import pytest
import redis as redis_package

from agentpipe.errors import RedisServerError
from agentpipe.feedback import stream as stream_module
from agentpipe.feedback.intake import rules_for
from agentpipe.feedback.retry import retry
from agentpipe.feedback.store import day_state, quarantine_counts, quarantined, read_day
from agentpipe.feedback.stream import FeedbackStream, take_stream, waiting_entries
from agentpipe_tests.feedback.examples import DAY, NOW, SHAPE, decision, label
from agentpipe_tests.redis_server import redis_server

pytestmark = pytest.mark.redis
NAME, GROUP = "feedback", "agentpipe"
RULES = rules_for(now=NOW, shape=SHAPE)


@pytest.fixture(scope="module")
def server():
    with redis_server(own=True) as running:
        yield running


@pytest.fixture
def client(server):
    with contextlib.closing(redis_package.Redis.from_url(server.url)) as connected:
        connected.flushall()
        yield connected


@pytest.fixture
def take(server, home):
    def run(**options):
        rules = options.pop("rules", RULES)
        return take_stream(FeedbackStream(server.url, NAME, GROUP, **options), home.store, rules)

    return run


def send(client, *rows):
    return [client.xadd(NAME, {"row": row if isinstance(row, str | bytes) else json.dumps(row)}) for row in rows]


def pending(client):
    return client.xpending(NAME, GROUP)["pending"]


def test_an_empty_stream_is_made_and_read(client, take):
    assert take().rows_taken == 0
    assert take().rows_taken == 0
    assert client.exists(NAME)


def test_rows_are_taken_in_bounded_batches_and_acknowledged(client, take, home):
    identifiers = send(client, *(decision(f"d{number}") for number in range(25)), label(decision_id="d7"))
    done = take(at_once=10)
    assert (done.rows_taken, done.quarantined, pending(client)) == (26, {}, 0)
    assert take().rows_taken == 0
    state = day_state(home.store, DAY)
    assert (state.decisions, state.labelled) == (25, 1)
    rows = read_day(home.store, DAY)[0].to_pylist()
    assert {row["line"].partition("#")[0] for row in rows} == {identifier.decode() for identifier in identifiers[:25]}
    assert {row["source"] for row in rows} == {"stream:feedback"}


def test_one_call_takes_so_many_at_most_and_the_next_goes_on(client, take):
    send(client, *(decision(f"d{number}") for number in range(9)))
    assert [take(at_once=2, most=4).rows_taken for _ in range(4)] == [4, 4, 1, 0]


def test_poison_is_quarantined_with_its_entry_and_acknowledged(client, take, home):
    identifiers = send(client, "{", b"\xff", decision(mask=[True]), decision("good"))
    identifiers.append(client.xadd(NAME, {"other": "x"}))
    done = take()
    assert (done.rows_taken, pending(client)) == (1, 0)
    assert done.quarantined == {"does_not_fit_policy": 1, "missing_field": 1, "not_json": 1, "not_utf8": 1}
    places = {(row.file, row.line.partition("#")[0]) for row in quarantined(home.store)}
    assert places == {(NAME, identifiers[place].decode()) for place in (0, 1, 2, 4)}


def test_an_entry_without_a_row_keeps_its_reason_when_it_is_judged_again(client, take, home):
    """Whatever its fields are called: they are no row, also where they read like one."""
    client.xadd(NAME, {"other": "x"})
    client.xadd(NAME, {name: json.dumps(value) for name, value in decision().items()})
    client.xadd(NAME, {b"\xff": b"\xfe"})
    assert take().quarantined == {"missing_field": 3}
    before = quarantined(home.store)
    done = retry(home.store, RULES)
    assert (done.rows_taken, done.quarantined) == (0, {"missing_field": 3})
    assert quarantined(home.store) == before


def test_a_crash_after_the_commit_and_before_the_acknowledgement_doubles_nothing(client, take, home, monkeypatch):
    send(client, decision(), "{", decision("d2", policy_version="new"))
    strict = rules_for(now=NOW, shape=SHAPE, versions=["p1"])
    original = stream_module._Reader.acknowledge

    def crash(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(stream_module._Reader, "acknowledge", crash)
    with pytest.raises(KeyboardInterrupt):
        take(rules=strict)
    assert pending(client) == 3
    monkeypatch.setattr(stream_module._Reader, "acknowledge", original)
    before = day_state(home.store, DAY)
    done = take()
    assert (done.rows_taken, done.rows_already, done.quarantined, pending(client)) == (0, 3, {}, 0)
    assert day_state(home.store, DAY) == before
    assert quarantine_counts(home.store) == {"not_json": 1, "unknown_policy_version": 1}
    assert retry(home.store, RULES).rows_taken == 1


def test_a_crash_before_the_commit_loses_nothing(client, take, home, monkeypatch):
    send(client, decision())

    def crash(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(stream_module, "_add", crash)
    with pytest.raises(KeyboardInterrupt):
        take()
    monkeypatch.undo()
    send(client, decision("d2"))
    assert take().rows_taken == 2


def test_what_a_dead_consumer_left_is_taken_after_a_while(client, take, home):
    send(client, decision(), decision("d2"))
    client.xgroup_create(NAME, GROUP, id="0")
    client.xreadgroup(GROUP, "dead", {NAME: ">"}, count=1)
    assert take().rows_taken == 1
    assert pending(client) == 1
    time.sleep(0.02)
    assert take(dead_after_s=0.01).rows_taken == 1
    assert (pending(client), day_state(home.store, DAY).decisions) == (0, 2)


def test_an_entry_that_was_deleted_while_it_was_pending_is_let_go(client, take, monkeypatch):
    (identifier,) = send(client, decision())
    client.xgroup_create(NAME, GROUP, id="0")
    client.xreadgroup(GROUP, "me", {NAME: ">"})
    client.xdel(NAME, identifier)
    assert take(consumer="me").rows_taken == 0
    assert pending(client) == 0


def test_the_same_row_in_two_entries_is_a_duplicate(client, take):
    send(client, decision(), decision())
    assert take().quarantined == {"duplicate": 1}


def test_a_key_of_another_kind_is_a_typed_error(client, take):
    client.set(NAME, "no stream")
    with pytest.raises(RedisServerError, match="refuses"):
        take()


def test_a_server_that_is_away_is_a_typed_error(home):
    with redis_server(own=True) as running:
        url = running.url
    with pytest.raises(RedisServerError, match="cannot be reached"):
        take_stream(FeedbackStream(url, NAME, GROUP), home.store, RULES)
    assert not home.store.exists()


def test_what_waits_is_seen_until_it_is_acknowledged(server, client, home):
    source = FeedbackStream(server.url, NAME, GROUP)
    assert waiting_entries(source) == ""
    first = client.xadd(NAME, {"row": b"{}"}).decode()
    assert waiting_entries(source).startswith(f"{first}:1:")
    take_stream(source, home.store, RULES)
    assert waiting_entries(source) == ""
    second = client.xadd(NAME, {"row": b"{}"}).decode()
    client.xreadgroup(GROUP, "another", {NAME: ">"})  # delivered to one that died
    assert waiting_entries(source).startswith(f"{second}:1:")


# ------------------------------------------------------------------------------------- ids that come a second time

EMPTIED = {
    "emptied": lambda client: client.flushall(),
    "stream removed": lambda client: client.delete(NAME),
    "group made anew": lambda client: client.xgroup_destroy(NAME, GROUP) and client.delete(NAME),
}
"""what gives ids a second time, as a new server does"""
WRONG = {"other": "x"}


def place(client, *entries):
    """Entries under ids of the sender's own: 1-1, 1-2, …"""
    for number, entry in enumerate(entries, 1):
        fields = {"row": json.dumps(entry)} if "kind" in entry else entry
        client.xadd(NAME, fields, id=f"1-{number}")


@pytest.mark.parametrize("emptied", EMPTIED)
def test_entries_whose_ids_were_taken_before_are_lost_to_none_of_their_rows(client, take, home, emptied):
    """Whatever stood under an id before, valid or not: another row under it lands once."""
    valid = [decision(f"d{number}") for number in range(3)]
    place(client, valid[0], WRONG, {"row": "{"}, valid[1], decision("d5", policy_version="x"))
    strict = rules_for(now=NOW, shape=SHAPE, versions=["p1"])
    first = take(rules=strict)
    assert (first.rows_taken, sum(first.quarantined.values())) == (2, 3)
    EMPTIED[emptied](client)
    other = {"row": "[", "sent": "later"}
    place(client, WRONG, valid[2], other, decision("d6", policy_version="y"), label(decision_id="d0"), {"more": "x"})
    second = take(rules=strict)
    assert (second.rows_taken, second.rows_already, pending(client)) == (2, 0, 0)
    assert second.quarantined == {"missing_field": 2, "not_json": 1, "unknown_policy_version": 1}
    state = day_state(home.store, DAY)
    assert (state.decisions, state.labels) == (3, 1)
    kept = [(row.line.partition("#")[0], row.reason) for row in quarantined(home.store)]
    assert sorted(kept) == [
        ("1-1", "missing_field"),
        ("1-2", "missing_field"),
        ("1-3", "not_json"),
        ("1-3", "not_json"),
        ("1-4", "unknown_policy_version"),
        ("1-5", "unknown_policy_version"),
        ("1-6", "missing_field"),
    ]


def test_another_row_of_the_same_id_and_decision_is_a_duplicate_that_is_kept(client, take, home):
    place(client, decision("d1", action=1))
    take()
    client.flushall()
    place(client, decision("d1", action=0))
    assert take().quarantined == {"duplicate": 1}
    assert json.loads(quarantined(home.store)[0].raw)["action"] == 0


def test_the_same_entries_once_more_are_known(client, take, home):
    for again in range(2):
        place(client, decision(), WRONG, {"row": "{"}, label())
        done = take()
        assert (done.rows_taken, done.rows_already) == ((0, 4) if again else (2, 0))
        client.flushall()
    assert quarantine_counts(home.store) == {"missing_field": 1, "not_json": 1}


def test_what_waits_under_ids_that_were_taken_before_is_another_thing_that_waits(server, client, take):
    source, seen = FeedbackStream(server.url, NAME, GROUP), []
    for rows in ([decision("a")], [decision("b")], [decision("c"), decision("a")], [decision("d"), decision("a")]):
        client.flushall()
        place(client, *rows)
        seen.append(waiting_entries(source))
        take()
        assert waiting_entries(source) == ""
    assert len(set(seen)) == 4
