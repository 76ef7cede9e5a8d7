"""Versions in a real Redis: whole or not at all, one pointer that never goes back, errors that say what is wrong."""

import contextlib
import threading
import time

import pytest
import redis as client_library
from redis.connection import AbstractConnection

from agentpipe.environments.table import table_from_rows
from agentpipe.environments.table_redis import KeptVersion, RedisTables
from agentpipe.environments.table_redis_client import connect, place_of, redis_errors
from agentpipe.errors import (
    CorruptError,
    RedisServerError,
    SettingsError,
    TableError,
    UnpublishedError,
)
from agentpipe_tests.redis_server import free_port, redis_server
from agentpipe_tests.strategies import project_table

pytestmark = pytest.mark.redis
TABLE = project_table()


def variant(number):
    """The project's table with one value of each cell changed: a torn mixture of two has the digest of neither."""
    return table_from_rows(
        row._replace(values=(0.001 * number, *row.values[1:])) if row.variant == 0 else row for row in TABLE.rows
    )


@pytest.fixture
def redis():
    with redis_server() as server:
        yield server


@pytest.fixture
def tables(redis):
    with RedisTables(redis.url) as opened:
        yield opened


@pytest.fixture
def raw(redis):
    with contextlib.closing(client_library.Redis.from_url(redis.url)) as opened:
        yield opened


def test_what_is_published_is_read_back(tables):
    assert tables.publish(TABLE, 1) == (True, TABLE.version, 1)
    assert tables.current() == tables.load(TABLE.version) == TABLE
    assert tables.current().rows == TABLE.rows
    assert tables.current_version() == TABLE.version


def test_a_late_publisher_never_moves_the_pointer_back_and_a_rollback_does(tables):
    first, second = variant(1), variant(2)
    tables.publish(second, 2)
    assert tables.publish(first, 1) == (False, second.version, 2)
    assert tables.current() == second
    assert tables.load(first.version) == first
    assert tables.publish(first, 3) == (True, first.version, 3)
    assert tables.publish(second, 2) == (False, first.version, 3)
    assert tables.current() == first
    assert tables.versions() == [KeptVersion(first.version, 3, True), KeptVersion(second.version, 2, False)]


def test_publishing_twice_is_publishing_once(tables, raw):
    tables.publish(TABLE, 1)
    before = {key: raw.dump(key) for key in raw.scan_iter()}
    assert tables.publish(TABLE, 1) == (False, TABLE.version, 1)
    assert {key: raw.dump(key) for key in raw.scan_iter()} == before


def test_another_home_that_publishes_here_is_noticed(tables):
    tables.publish(variant(1), 5)
    with pytest.raises(TableError, match="another home"):
        tables.publish(variant(2), 5)
    with pytest.raises(TableError, match="number"):
        tables.publish(TABLE, 0)


def test_namespaces_do_not_meet(redis, tables):
    tables.publish(TABLE, 1)
    with RedisTables(redis.url, namespace="other") as other:
        assert other.versions() == []
        with pytest.raises(UnpublishedError):
            other.load(TABLE.version)


def test_reading_takes_one_round_trip(tables, monkeypatch):
    tables.publish(TABLE, 1)
    sent = []
    real = AbstractConnection.send_packed_command

    def counted(self, command, check_health=True):
        sent.append(command)
        return real(self, command, check_health)

    monkeypatch.setattr(AbstractConnection, "send_packed_command", counted)
    tables.current()
    assert len(sent) == 1
    tables.load(TABLE.version)
    assert len(sent) == 2


def test_nothing_published_and_unknown_versions_are_said(tables, raw):
    assert tables.current_version() is None
    with pytest.raises(UnpublishedError, match="no disturbance table is published"):
        tables.current()
    with pytest.raises(UnpublishedError, match="version abc is not in Redis"):
        tables.load("abc")
    tables.publish(TABLE, 1)
    raw.delete(f"agentpipe:table:version:{TABLE.version}")
    with pytest.raises(UnpublishedError, match="is not in Redis"):
        tables.current()


def test_damaged_content_is_said_and_publishing_again_heals(tables, raw):
    tables.publish(TABLE, 1)
    key = f"agentpipe:table:version:{TABLE.version}"
    raw.setrange(key, raw.strlen(key) - 20, "9")
    with pytest.raises(CorruptError):
        tables.current()
    tables.publish(TABLE, 1)
    assert tables.current() == TABLE


def test_only_old_versions_are_removed_and_never_the_current_or_a_pinned_one(tables, raw):
    kept = [variant(number) for number in range(6)]
    for number, table in enumerate(kept, 1):
        tables.publish(table, number)
    tables.publish(kept[0], 7)
    removed = tables.prune(1, pinned=[kept[2].version])
    assert set(removed) == {kept[index].version for index in (1, 3, 4, 5)}
    assert [version for version, *_ in tables.versions()] == [kept[0].version, kept[2].version]
    assert tables.load(kept[2].version) == kept[2]
    assert raw.dbsize() == 4
    with pytest.raises(SettingsError):
        tables.prune(0)


# ------------------------------------------------------------------------------------------- many at once


def test_sixty_four_readers_and_a_writer_never_see_half_a_version(redis):
    versions = [variant(number) for number in range(1, 41)]
    order = {table.version: index for index, table in enumerate(versions)}
    done, seen, wrong = threading.Event(), [], []

    def read(tables):
        last = 0
        while True:
            finished = done.is_set()
            try:
                found = order[tables.current().version]
            except Exception as error:  # noqa: BLE001 - whatever it is, the test shows it
                wrong.append(repr(error))
                return
            if found < last:
                wrong.append(f"{found} after {last}")
            last = found
            seen.append(found)
            if finished:
                return

    with RedisTables(redis.url) as writer, RedisTables(redis.url, size=64) as tables:
        writer.publish(versions[0], 1)
        readers = [threading.Thread(target=read, args=(tables,)) for _ in range(64)]
        for reader in readers:
            reader.start()
        for number, table in enumerate(versions[1:], 2):
            writer.publish(table, number)
            time.sleep(0.02)
        done.set()
        for reader in readers:
            reader.join()
    assert wrong == []
    assert len(set(seen)) > 5
    assert max(seen) == 39


def test_connections_are_bounded_and_closed(redis, raw):
    with RedisTables(redis.url, size=3, patience=60) as tables:
        tables.publish(TABLE, 1)
        most = 0

        def read():
            for _ in range(5):
                tables.current()

        threads = [threading.Thread(target=read) for _ in range(16)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            most = max(most, raw.info("clients")["connected_clients"])
        assert most <= 1 + 3
    for _ in range(100):  # the server notices a closed socket a little later
        if raw.info("clients")["connected_clients"] == 1:
            break
        time.sleep(0.05)
    assert raw.info("clients")["connected_clients"] == 1


def test_a_pool_in_use_is_waited_for_and_then_said(redis):
    with RedisTables(redis.url, size=2, patience=0.05) as tables:
        pool = tables._client.connection_pool
        held = [pool.get_connection() for _ in range(2)]
        with pytest.raises(RedisServerError, match="every connection of this pool is in use"):
            tables.versions()
        for connection in held:
            pool.release(connection)
        assert tables.versions() == []


# ---------------------------------------------------------------------------------------------- notices


def waiting(tables, known, seconds):
    found = []
    thread = threading.Thread(target=lambda: found.append(tables.wait_for_change(known, seconds)))
    thread.start()
    return thread, found


def subscribed(raw):
    while raw.pubsub_numsub("agentpipe:table:changes")[0][1] == 0:
        time.sleep(0.005)


def test_a_notice_ends_the_wait(tables, raw):
    tables.publish(variant(1), 1)
    thread, found = waiting(tables, variant(1).version, 120)
    subscribed(raw)
    tables.publish(variant(1), 1)
    tables.announce()  # nothing changed: no reason to wake up
    tables.publish(variant(2), 2)
    thread.join(60)
    assert found == [variant(2).version]


def test_what_changed_before_the_wait_is_seen_at_once(tables):
    tables.publish(variant(2), 2)
    assert tables.wait_for_change(variant(1).version, 120) == variant(2).version
    assert tables.wait_for_change(None, 120) == variant(2).version


def test_a_lost_notice_costs_time_and_nothing_else(tables, raw):
    tables.publish(variant(1), 1)
    thread, found = waiting(tables, variant(1).version, 0.5)
    subscribed(raw)
    raw.hset("agentpipe:table:current", mapping={"version": variant(2).version, "number": 2})
    thread.join(60)
    assert found == [variant(2).version]


def test_nothing_changes_in_time(tables):
    assert tables.wait_for_change(None, 0.05) is None
    tables.publish(TABLE, 1)
    assert tables.wait_for_change(TABLE.version, 0.05) is None


def test_a_server_that_goes_away_ends_the_wait():
    failed = []

    def wait(tables):
        try:
            tables.wait_for_change(None, 60)
        except RedisServerError as error:
            failed.append(error)

    with redis_server(own=True) as server, RedisTables(server.url) as tables:
        thread = threading.Thread(target=wait, args=(tables,))
        thread.start()
        with contextlib.closing(client_library.Redis.from_url(server.url)) as raw:
            subscribed(raw)
        server.kill()
        thread.join(30)
    assert "cannot be reached" in str(failed[0])


# ---------------------------------------------------------------------------------------------- failures


def test_a_restarted_server_is_empty_says_so_and_publishing_heals(redis, tables):
    tables.publish(TABLE, 1)
    redis.restart()
    with pytest.raises(UnpublishedError, match="no disturbance table is published"):
        tables.current()
    tables.publish(TABLE, 1)
    assert tables.current() == TABLE


def test_a_server_that_is_away_is_said(redis, tables):
    redis.kill()
    for call in (tables.current, tables.versions, tables.health, lambda: tables.publish(TABLE, 1)):
        with pytest.raises(RedisServerError, match="cannot be reached") as caught:
            call()
        assert caught.value.remedy


def test_a_wrong_port_is_said_without_the_password():
    port = free_port()
    with RedisTables(f"redis://:geheim@127.0.0.1:{port}/3") as tables:
        assert repr(tables) == f"RedisTables(127.0.0.1:{port}/3)"
        with pytest.raises(RedisServerError, match=f"cannot be reached.*127.0.0.1:{port}/3") as caught:
            tables.current()
    assert "geheim" not in str(caught.value)


def test_a_server_that_never_answers_is_given_up():
    import socket

    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}"
        with RedisTables(url, socket_timeout=0.05) as tables, pytest.raises(RedisServerError, match="answer in time"):
            tables.current()


@pytest.mark.parametrize("login", ["", ":geheim2@", "someone:geheim2@"])
def test_a_wrong_password_is_said_and_not_told(login):
    with redis_server(password="right", tcp=True) as server:
        url = f"redis://{login}127.0.0.1:{server.port}"
        with RedisTables(url) as tables, pytest.raises(RedisServerError, match="refuses the login") as caught:
            tables.current()
        assert "geheim" not in str(caught.value) + repr(caught.value.__cause__)
        with RedisTables(server.url) as tables:
            assert tables.publish(TABLE, 1).moved


@pytest.mark.parametrize(
    "url",
    [
        "localhost:6379",
        "http://:geheim@localhost",
        "redis://:gehe/im@localhost:6379",
        "redis://:geheim@localhost:x/0",
        "redis://:geheim@localhost/abc",
        "redis://:geheim@localhost/1/2",
        "redis://:geheim@localhost/-1",
        "redis://:geheim@localhost?db=abc",
        "redis://:12?geheim=3@localhost",
        "redis://:12#geheim@localhost",
        "redis://:geheim@localhost?decode_responses=True",
        "redis://:geheim@localhost?ssl=true",
        "redis://:geheim@localhost?foo=1",
        "redis://:geheim@localhost?retry=5",
        "redis://:geheim@localhost?connection_class=x",
        "redis://:geheim@localhost?max_connections=1",
        "redis://:geheim@localhost?socket_timeout=0",
        "redis://:geheim@localhost?socket_timeout=nan",
        "redis://:geheim@localhost?socket_timeout=2&socket_timeout=3",
        "redis://:geheim@localhost?client_name=",
        "redis://:geheim@localhost?ssl_cert_reqs=none",
        "rediss://:geheim@localhost?ssl_cert_reqs=geheim",
        "unix://:geheim@/socket?decode_responses=1",
        f"redis://:geheim@{'a' * 70}.example",
        "redis://:geheim\udc80@localhost",
    ],
)
def test_a_malformed_url_is_refused_and_not_told(url):
    with pytest.raises(RedisServerError, match="REDIS_URL is malformed") as caught:
        RedisTables(url)
    assert "gehe" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("redis://localhost", "localhost:6379/0"),
        ("redis://:a%2Fb@[::1]:7000/3", "::1:7000/3"),
        ("redis://localhost/?db=4&client_name=line&socket_timeout=1.5", "localhost:6379/4"),
        ("rediss://localhost:1/2?ssl_cert_reqs=none&ssl_check_hostname=false", "localhost:1/2"),
        ("unix://:secret@/run/redis.sock?db=5", "/run/redis.sock/5"),
    ],
)
def test_a_url_may_name_a_database_and_options_of_its_connections(url, place):
    with contextlib.closing(connect(url)) as client:
        assert place_of(client) == place


def test_a_pool_needs_two_connections():
    with pytest.raises(SettingsError, match="two connections"):
        RedisTables("redis://localhost", size=1)
    with pytest.raises(SettingsError, match="positive"):
        RedisTables("redis://localhost", socket_timeout=0)


def test_a_full_server_is_said_and_keeps_what_it_has():
    with redis_server(options=("--maxmemory-policy", "noeviction")) as server, RedisTables(server.url) as tables:
        tables.publish(variant(1), 1)
        with contextlib.closing(client_library.Redis.from_url(server.url)) as raw:
            raw.config_set("maxmemory", "1kb")
        with pytest.raises(RedisServerError, match="out of memory"):
            tables.publish(variant(2), 2)
        assert tables.current() == variant(1)


def test_a_replica_is_said_to_be_read_only():
    with redis_server(own=True) as server, RedisTables(server.url) as tables:
        tables.publish(TABLE, 1)
        with contextlib.closing(client_library.Redis.from_url(server.url)) as raw:
            raw.replicaof("127.0.0.1", str(free_port()))
        with pytest.raises(RedisServerError, match="takes no writes"):
            tables.publish(variant(2), 2)
        assert tables.current() == TABLE


def test_a_server_without_room_for_clients_is_said():
    with redis_server(own=True) as server, contextlib.closing(client_library.Redis.from_url(server.url)) as raw:
        raw.config_set("maxclients", 1)
        # it says why and closes at once: who was just writing sees the closing only
        either = "takes no more connections|cannot be reached"
        with RedisTables(server.url) as tables, pytest.raises(RedisServerError, match=either):
            tables.current()
    refused = client_library.ConnectionError("max number of clients reached")
    said = pytest.raises(RedisServerError, match="takes no more connections")
    with RedisTables(server.url) as tables, said, redis_errors(tables._client):
        raise refused


# ------------------------------------------------------------------------------------------------ health


def test_health_counts_the_connections_of_the_server():
    with redis_server(options=("--maxclients", "40")) as server, RedisTables(server.url) as tables:
        health = tables.health()
        assert (health.connections, health.most_connections, health.connection_share) == (1, 40, 1 / 40)
        assert health.round_trip_ms > 0


def test_an_old_server_tells_the_most_connections_by_its_configuration(tables, monkeypatch):
    monkeypatch.setattr(tables._client, "info", lambda section: {"connected_clients": 5})
    assert tables.health().most_connections == 10_000

    def refused(name):
        raise client_library.ResponseError("unknown command 'CONFIG'")

    monkeypatch.setattr(tables._client, "config_get", refused)
    health = tables.health()
    assert (health.connections, health.most_connections, health.connection_share) == (5, None, None)
