"""A home and its Redis: publishing the current version of the file store, and the table that a pool pins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import SecretStr

from agentpipe.environments.table_redis import Published, RedisHealth, RedisTables
from agentpipe.errors import CorruptError, TableError, UnpublishedError

if TYPE_CHECKING:
    from collections.abc import Collection

    from agentpipe.environments.table import DisturbanceTable
    from agentpipe.environments.table_store import TableStore

Url = SecretStr | str | None
"""Of the settings, or plain; ``None`` for files only."""
KEPT_VERSIONS = 200
"""Versions that publishing leaves in Redis; any other is filled in from the home when a pool pins it."""


def publish_current(store: TableStore, redis_url: Url, pinned: Collection[str] = ()) -> Published | None:
    """Publishes the current version of a home; without a URL nothing is done.

    Args:
        store: the home's versions.
        redis_url: the server; ``None`` for files only.
        pinned: versions that are never removed from Redis, however old.

    Raises:
        TableError: the home has no version yet, or another home publishes there.
        RedisServerError: the server is away, slow, full, read-only or of another login; the home is as it was.
    """
    if redis_url is None:
        return None
    with RedisTables(_plain(redis_url)) as tables:
        published = _publish(tables, store)
        tables.prune(KEPT_VERSIONS, pinned)
        return published


def pinned_table(store: TableStore, version: str, redis_url: Url) -> DisturbanceTable:
    """The version that a pool pins: of Redis in one round trip, without a URL of the home.

    Where Redis lost the version (it was restarted, or removed it), or holds it damaged, the home's copy is published
    again.

    Args:
        store: the home's versions.
        version: full name.
        redis_url: the server; ``None`` for files only.

    Raises:
        TableError: neither Redis nor the home holds the version.
        CorruptError: the home's copy is damaged as well.
        VersionError: what is held is of another agentpipe.
        RedisServerError: the server is away, slow, full, read-only or of another login. No pool starts then on files.
    """
    if redis_url is None:
        return store.load(version)
    with RedisTables(_plain(redis_url)) as tables:
        try:
            return tables.load(version)
        except (UnpublishedError, CorruptError):
            table = store.load(version)
            _publish(tables, store)  # first, so that the pointer never names an older version
            numbers = [entry.number for entry in store.history() if entry.after == version]
            if numbers:
                tables.publish(table, numbers[-1])
            return table


def published_version(redis_url: Url) -> str | None:
    """The version that the server's pointer names; ``None`` before the first, and without a URL.

    Raises:
        CorruptError: the pointer is damaged.
        RedisServerError: the server is away, slow or of another login.
    """
    if redis_url is None:
        return None
    with RedisTables(_plain(redis_url)) as tables:
        return tables.current_version()


def wait_for_change(redis_url: SecretStr | str, known_version: str | None, seconds: float) -> bool:
    """Waits until the pointer names another version than ``known_version``; False where it does not in time.

    Raises:
        CorruptError: the pointer is damaged.
        RedisServerError: the server is away, slow or of another login.
    """
    with RedisTables(_plain(redis_url)) as tables:
        return tables.wait_for_change(known_version, seconds) is not None


def redis_health(redis_url: Url) -> RedisHealth | None:
    """Round trip and connections of the server; ``None`` without a URL.

    Raises:
        RedisServerError: the server is away, slow or of another login.
    """
    if redis_url is None:
        return None
    with RedisTables(_plain(redis_url)) as tables:
        return tables.health()


def _plain(redis_url: SecretStr | str) -> str:
    return redis_url.get_secret_value() if isinstance(redis_url, SecretStr) else redis_url


def _publish(tables: RedisTables, store: TableStore) -> Published:
    entries = store.history()
    if not entries:
        raise TableError("there is no disturbance table yet", file=store.folder, remedy="run: agentpipe table show")
    newest = entries[-1]
    published = tables.publish(store.load(newest.after), newest.number)
    if published.current != newest.after:  # a later entry of this home, made meanwhile, or another home
        known = [(entry.number, entry.after) for entry in store.history()]
        if (published.number, published.current) not in known:
            message = f"another home publishes here: entry {published.number}, version {published.current[:12]}"
            remedy = "give each home a database of its own, such as redis://HOST/1, or empty this one"
            raise TableError(message, server=tables.place, remedy=remedy)
    return published
