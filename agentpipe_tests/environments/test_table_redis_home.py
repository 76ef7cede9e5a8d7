"""A home and its Redis: what pools pin, what an empty server gets back, what does not change when Redis is lost."""

import contextlib

import numpy as np
import pytest
import redis as client_library

from agentpipe.environments.catalog import load_catalog
from agentpipe.environments.health import Effort, cell_health, random_actions
from agentpipe.environments.layout import Purpose
from agentpipe.environments.line_profile import default_profile
from agentpipe.environments.pool import build_pool
from agentpipe.environments.table_redis import RedisHealth, RedisTables
from agentpipe.environments.table_redis_home import KEPT_VERSIONS, pinned_table, publish_current, redis_health
from agentpipe.environments.table_store import TableStore
from agentpipe.errors import RedisServerError, TableError
from agentpipe_tests.redis_server import redis_server
from agentpipe_tests.strategies import project_table

pytestmark = pytest.mark.redis
SIGN = ("ann", "a test")


@pytest.fixture
def redis():
    with redis_server() as server:
        yield server


def home(folder, changes=0):
    store = TableStore(folder)
    store.refresh()
    for number in range(changes):
        store.set("kind = load and intensity = 2", {"load_sigma": 0.01 * (number + 1)}, *SIGN)
    return store


def test_without_a_url_files_are_read_and_nothing_is_published(tmp_path):
    store = home(tmp_path, changes=1)
    first = store.history()[0].after
    assert publish_current(store, None) is None
    assert redis_health(None) is None
    assert pinned_table(store, first, None) == store.load(first)


def test_each_change_of_a_home_is_published_and_pools_read_it_from_redis(tmp_path, redis, monkeypatch):
    store = home(tmp_path)
    assert publish_current(store, redis.url) == (True, store.current().version, 1)
    change = store.set("kind = load", {"load_sigma": 0.2}, *SIGN)
    assert publish_current(store, redis.url) == (True, change.version, 2)
    back = store.rollback(store.history()[0].after, *SIGN)
    assert publish_current(store, redis.url) == (True, back.version, 3)
    expected = store.load(change.version)
    monkeypatch.setattr(TableStore, "load", None)  # a file is not touched
    assert pinned_table(store, change.version, redis.url) == expected


def test_an_empty_server_is_filled_from_the_home_when_a_pool_pins_an_older_version(tmp_path, redis):
    store = home(tmp_path, changes=2)
    publish_current(store, redis.url)
    redis.restart()
    pinned = store.history()[1].after
    assert pinned_table(store, pinned, redis.url) == store.load(pinned)
    with RedisTables(redis.url) as tables:
        assert tables.current() == store.current()
        assert tables.load(pinned) == store.load(pinned)


@pytest.mark.parametrize("damaged", ["current", "versions", "version"])
def test_what_redis_holds_damaged_comes_from_the_home_when_a_pool_pins_it_and_is_healed(tmp_path, redis, damaged):
    store = home(tmp_path, changes=2)
    publish_current(store, redis.url)
    pinned = store.history()[1].after
    key = f"agentpipe:table:version:{pinned}" if damaged == "version" else f"agentpipe:table:{damaged}"
    with contextlib.closing(client_library.Redis.from_url(redis.url)) as raw:
        raw.delete(key)
        raw.set(key, b"\xff")
        assert pinned_table(store, pinned, redis.url) == store.load(pinned)
        assert publish_current(store, redis.url).number == 3
    with RedisTables(redis.url) as tables:
        assert tables.current() == store.current()
        assert tables.load(pinned) == store.load(pinned)
        assert {kept.version for kept in tables.versions()} >= {pinned, store.current().version}


def test_a_version_that_nobody_holds_is_said(tmp_path, redis):
    with pytest.raises(TableError, match="unknown version"):
        pinned_table(home(tmp_path), "f" * 64, redis.url)


def test_a_home_without_a_table_has_nothing_to_publish(tmp_path, redis):
    with pytest.raises(TableError, match="no disturbance table yet"):
        publish_current(TableStore(tmp_path), redis.url)


def test_two_homes_on_one_database_are_noticed(tmp_path, redis):
    publish_current(home(tmp_path / "one", changes=3), redis.url)
    other = home(tmp_path / "other", changes=1)
    other.set("kind = sensor", {"sensor_sigma": 0.3}, *SIGN)
    with pytest.raises(TableError, match=r"another home publishes here.*give each home a database of its own"):
        publish_current(other, redis.url)


def test_a_later_entry_of_the_same_home_is_no_other_home(tmp_path, redis, monkeypatch):
    store = home(tmp_path, changes=2)
    publish_current(store, redis.url)
    whole = store.history()
    answers = [whole[:2], whole]
    monkeypatch.setattr(store, "history", lambda: answers.pop(0))  # read before the last change was made
    assert publish_current(store, redis.url) == (False, whole[2].after, 3)


def test_old_versions_leave_redis_and_pinned_ones_stay(tmp_path, redis, monkeypatch):
    monkeypatch.setattr("agentpipe.environments.table_redis_home.KEPT_VERSIONS", 1)
    assert KEPT_VERSIONS == 200
    store = home(tmp_path, changes=0)
    publish_current(store, redis.url)
    versions = [store.current().version]
    for sigma in (0.1, 0.2):
        versions.append(store.set("kind = load", {"load_sigma": sigma}, *SIGN).version)
        publish_current(store, redis.url, pinned=[versions[0]])
    with RedisTables(redis.url) as tables:
        assert [kept.version for kept in tables.versions()] == [versions[2], versions[0]]


# ---------------------------------------------------------------------------- Redis is lost during a rollout


def rollout(table, steps, during=lambda step: None):
    """Every byte that a player sees in ``steps`` steps."""
    environments = load_catalog().environments("train")[:60]
    pool = build_pool(environments, table, default_profile(), seed=3, purpose=Purpose.COLLECT)
    seen = []
    for step in range(steps):
        during(step)
        pool.step(random_actions(pool))
        seen += [pool.observation.copy(), pool.reward.copy(), pool.mask.copy(), pool.terminated.copy()]
    pool.close()
    return [array.tobytes() for array in seen], pool.fingerprints.copy()


def test_losing_redis_in_mid_rollout_changes_no_byte_and_a_new_pool_says_what_is_wrong(tmp_path, redis):
    store = home(tmp_path, changes=1)
    publish_current(store, redis.url)
    version = store.current().version

    def disturb(step):
        if step == 5:
            store.set("intensity >= 1", {"load_sigma": 0.3}, *SIGN)
            publish_current(store, redis.url)
        if step == 10:
            redis.kill()

    undisturbed, fingerprints = rollout(store.load(version), 40)
    disturbed, same = rollout(pinned_table(store, version, redis.url), 40, disturb)
    assert disturbed == undisturbed
    assert np.array_equal(same, fingerprints)
    with pytest.raises(RedisServerError, match=r"cannot be reached.*start it"):
        pinned_table(store, version, redis.url)
    with pytest.raises(RedisServerError):
        redis_health(redis.url)


def test_nothing_that_a_home_does_leaves_a_connection_open(tmp_path, redis):
    store = home(tmp_path)
    publish_current(store, redis.url)
    for _ in range(20):
        pinned_table(store, store.current().version, redis.url)
        redis_health(redis.url)
    with contextlib.closing(client_library.Redis.from_url(redis.url)) as raw:
        assert raw.info("clients")["connected_clients"] <= 2  # the last one may not have been noticed yet


# ------------------------------------------------------------------------------------------ health of a pool


def health(redis=None):
    environments = load_catalog().environments("train", "load-1")[:4]
    effort = Effort(resets=1, samples=1, steps=1)
    return cell_health(environments, project_table(), default_profile(), seed=0, effort=effort, redis=redis)


def test_redis_is_measured_beside_the_pool_and_is_no_content_of_it():
    alone, beside = health(), health(RedisHealth(3.5, 17, 20))
    assert alone.redis_figures == {"redis_round_trip_ms": None, "redis_connection_share": None}
    assert {name for name in alone.not_applicable if "redis" in name} == set(alone.redis_figures)
    assert beside.redis_figures == {"redis_round_trip_ms": 3.5, "redis_connection_share": 0.85}
    assert beside.to_json()["measured"]["redis_connection_share"] == 0.85
    assert not any("redis" in name for name in beside.to_json()["not_applicable"])
    assert beside.digest == alone.digest


def test_a_server_that_tells_no_maxclients_leaves_the_share_unjudged():
    told = health(RedisHealth(3.5, 17, None))
    assert "maxclients" in told.not_applicable["redis_connection_share"]
    assert "redis_round_trip_ms" not in told.not_applicable
    assert "redis_connection_share" not in told.to_json()["measured"]
