"""Keys of Redis that hold what agentpipe never writes: said by name, and written anew by publishing."""

import contextlib

import pytest
import redis as client_library

from agentpipe.environments.table_redis import KeptVersion, RedisTables
from agentpipe.errors import CorruptError, UnpublishedError
from agentpipe_tests.redis_server import redis_server
from agentpipe_tests.strategies import project_table

pytestmark = pytest.mark.redis
TABLE = project_table()
POINTER, LIST, CONTENT = (f"agentpipe:table:{name}" for name in ("current", "versions", f"version:{TABLE.version}"))
KINDS = {
    "text": lambda raw, key: raw.set(key, b"\xff x"),
    "list": lambda raw, key: raw.rpush(key, "x"),
    "hash": lambda raw, key: raw.hset(key, "x", "y"),
    "set": lambda raw, key: raw.sadd(key, TABLE.version),
    "sorted set": lambda raw, key: raw.zadd(key, {"x": 1}),
    "stream": lambda raw, key: raw.xadd(key, {"version": "x"}),
}
POINTERS = [
    {"version": b"\xff\xfe", "number": 1},
    {"version": "", "number": 1},
    {"version": TABLE.version[:-1], "number": 1},
    {"version": TABLE.version.upper(), "number": 1},
    {"version": "x" * 100_000, "number": "y" * 100_000},
]
NUMBERS = [b"\xff", "", "x", "1e3", "inf", "nan", "-1", "0", "1.5", "9" * 400]


@pytest.fixture(scope="module")
def server():
    with redis_server() as running:
        yield running


@pytest.fixture
def raw(server):
    with contextlib.closing(client_library.Redis.from_url(server.url)) as opened:
        opened.flushdb()
        yield opened


@pytest.fixture
def tables(server, raw):
    with RedisTables(server.url) as opened:
        yield opened


def read_all(tables):
    """What every reader says: ``None``, or the error that it raises."""
    found = []
    for read in (tables.current, tables.current_version, tables.versions, lambda: tables.load(TABLE.version)):
        try:
            read()
            found.append(None)
        except (CorruptError, UnpublishedError) as error:  # a hash without a version is a pointer to nothing
            found.append(error)
    return found


def is_sound(tables):
    assert tables.current() == tables.load(TABLE.version) == TABLE
    assert tables.current_version() == TABLE.version
    assert tables.versions() == [KeptVersion(TABLE.version, 1, True)]
    assert tables.prune(1) == []
    return True


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("key", [POINTER, LIST, CONTENT])
def test_a_key_of_another_type_is_said_and_publishing_again_heals(tables, raw, key, kind):
    tables.publish(TABLE, 1)
    raw.delete(key)
    KINDS[kind](raw, key)
    errors = [error for error in read_all(tables) if error is not None]
    assert errors
    for error in errors:
        assert error.where.get("key", key) == key
        assert "materialise disturbance_table" in error.remedy
    tables.publish(TABLE, 1)
    assert is_sound(tables)


@pytest.mark.parametrize("pointer", POINTERS)
def test_a_pointer_that_names_no_version_is_said_and_publishing_again_heals(tables, raw, pointer):
    tables.publish(TABLE, 1)
    raw.hset(POINTER, mapping=pointer)
    for read in (tables.current, tables.current_version, lambda: tables.wait_for_change(None, 60)):
        with pytest.raises(CorruptError, match="agentpipe:table:current"):
            read()
    assert tables.publish(TABLE, 1) == (True, TABLE.version, 1)
    assert is_sound(tables)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_pointer_without_a_number_is_healed_by_publishing_again(tables, raw, number):
    tables.publish(TABLE, 1)
    raw.hset(POINTER, "number", number)
    assert tables.current() == TABLE
    assert tables.publish(TABLE, 1) == (True, TABLE.version, 1)
    assert tables.publish(TABLE, 1) == (False, TABLE.version, 1)
    assert is_sound(tables)


@pytest.mark.parametrize("missing", ["version", "number"])
def test_a_pointer_that_lost_a_field_is_healed_by_publishing_again(tables, raw, missing):
    tables.publish(TABLE, 1)
    raw.hdel(POINTER, missing)
    assert tables.publish(TABLE, 1).moved
    assert is_sound(tables)


@pytest.mark.parametrize(("member", "score"), [(b"\xff", 1), ("x", 1), (TABLE.version, float("inf")), ("f" * 64, 1.5)])
def test_a_list_with_something_else_in_it_is_said_and_publishing_again_heals(tables, raw, member, score):
    tables.publish(TABLE, 1)
    raw.zadd(LIST, {member: score})
    with pytest.raises(CorruptError, match="agentpipe:table:versions"):
        tables.versions()
    tables.publish(TABLE, 1)
    assert is_sound(tables)
