"""Distribution of the disturbance table by Redis: immutable versions and one pointer (S3).

Below a namespace::

    <namespace>:table:version:<version>   the bytes of a version, see table_redis_format; written once
    <namespace>:table:current             the pointer: version, and the number of its audit entry
    <namespace>:table:versions            every version by the highest number it was published under
    <namespace>:table:changes             channel of notices; they carry nothing that a reader relies on

The file store of a home stays the truth; Redis holds copies that publishing fills again. A reader gets a version whole,
in one round trip, and verifies it; what it has read it keeps, so it needs Redis no more.
"""

from __future__ import annotations

import contextlib
import re
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from agentpipe.closing import Closing
from agentpipe.environments.table_redis_client import connect, place_of, redis_errors
from agentpipe.environments.table_redis_format import decode_table, encode_table
from agentpipe.environments.table_redis_scripts import CURRENT, PRUNE, PUBLISH, VERSIONS
from agentpipe.errors import CorruptError, RedisServerError, SettingsError, TableError, UnpublishedError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from agentpipe.environments.table import DisturbanceTable

NAMESPACE = "agentpipe"
_PINGS = 11
_LOOK_SECONDS = 5.0
_VERSION = re.compile(rb"[0-9a-f]{64}")
_AGAIN = "materialise disturbance_table, or change the table with agentpipe table set: both publish"


class Published(NamedTuple):
    """What a publishing did: whether it moved the pointer, and the version and audit number where that points now."""

    moved: bool
    current: str
    number: int


class KeptVersion(NamedTuple):
    """One version in Redis, and the highest audit number that it was published under."""

    version: str
    number: int
    current: bool


@dataclass(frozen=True)
class RedisHealth:
    """How Redis does, as gate 1 judges it.

    Attributes:
        round_trip_ms: median of eleven round trips, milliseconds.
        connections: clients that are connected, this one among them.
        most_connections: clients that the server takes; ``None`` where it does not tell.
    """

    round_trip_ms: float
    connections: int
    most_connections: int | None

    @property
    def connection_share(self) -> float | None:
        """Connections over the most; ``None`` where the server does not tell the most."""
        return self.connections / self.most_connections if self.most_connections else None


class RedisTables(Closing):
    """The versions in one Redis; to be closed. Any number of threads may use it, each process needs its own.

    Args:
        url: see :func:`~agentpipe.environments.table_redis_client.connect`.
        namespace: beginning of every key. One home publishes under one namespace of one database.
        size: connections at most; two or more, since :meth:`wait_for_change` holds one while it looks with another.
        patience: seconds that a thread waits for a free connection.
        socket_timeout: seconds until the server must have answered.

    Raises:
        SettingsError: a number is out of range.
        RedisServerError: the URL is malformed. Nothing is sent yet.

    Every method raises ``RedisServerError`` where the server is away, slow, full, read-only or of another login. Those
    that read raise ``CorruptError`` where a key holds what agentpipe never writes; publishing writes it anew.
    """

    def __init__(
        self,
        url: str,
        *,
        namespace: str = NAMESPACE,
        size: int = 4,
        patience: float = 5.0,
        socket_timeout: float = 2.0,
    ) -> None:
        if size < 2:
            raise SettingsError("a pool of two connections or more is needed", size=size, remedy="give size=2 or more")
        self._client = connect(url, size=size, patience=patience, socket_timeout=socket_timeout)
        self.place = place_of(self._client)
        self._pointer, self._versions, self._channel, self._prefix = (
            f"{namespace}:table:{name}" for name in ("current", "versions", "changes", "version:")
        )

    def __repr__(self) -> str:
        return f"RedisTables({self.place})"

    def close(self) -> None:
        """Closes every connection; a second call does nothing."""
        self._client.close()

    # ------------------------------------------------------------------------------------------- reading

    def current(self) -> DisturbanceTable:
        """The version that the pointer names, in one round trip.

        Raises:
            UnpublishedError: there is none.
            CorruptError, VersionError: damaged, or of another agentpipe.
        """
        pointer, kind, data = [*self._run(CURRENT, (self._pointer,), self._prefix), None, None, None][:3]
        if pointer is None:
            raise UnpublishedError("no disturbance table is published in Redis", server=self.place, remedy=_AGAIN)
        version = self._named(pointer, self._pointer)
        if kind not in (b"string", b"none"):
            raise self._damaged(self._prefix + version)
        return self._decoded(data, version)

    def load(self, version: str) -> DisturbanceTable:
        """The version of that full name, in one round trip.

        Raises:
            UnpublishedError: Redis does not hold it.
            CorruptError, VersionError: damaged, or of another agentpipe.
        """
        with self._typed_errors(version):
            data = cast("bytes | None", self._client.get(self._prefix + version))
        return self._decoded(data, version)

    def current_version(self) -> str | None:
        """The version that the pointer names, ``None`` before the first; its content is not read.

        Raises:
            CorruptError: the pointer is damaged.
        """
        with self._typed_errors():
            version = cast("bytes | None", self._client.hget(self._pointer, "version"))
        return self._named(version, self._pointer) if version is not None else None

    def versions(self) -> list[KeptVersion]:
        """What Redis holds, the newest first, in one round trip.

        Raises:
            CorruptError: pointer or list are damaged.
        """
        current, flat = self._run(VERSIONS, (self._pointer, self._versions))
        found = []
        for name, number in zip(flat[::2], flat[1::2], strict=True):
            if not number.isdigit():
                raise self._damaged(self._versions)
            found.append(KeptVersion(self._named(name, self._versions), int(number), name == current))
        return found

    def wait_for_change(self, known_version: str | None, seconds: float) -> str | None:
        """Waits until the pointer names another version than ``known_version``; ``None`` where it does not in time.

        A notice only ends the wait early: the pointer is looked at after subscribing, after each notice, every five
        seconds and at the end, so a lost one costs time and nothing else.
        """
        deadline = time.monotonic() + seconds
        subscription = self._client.pubsub()  # type: ignore[no-untyped-call]
        with contextlib.closing(subscription) as notices, redis_errors(self._client):
            notices.subscribe(self._channel)
            while True:
                found = self.current_version()
                if found not in (None, known_version):
                    return found
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                notices.get_message(timeout=min(left, _LOOK_SECONDS))

    def health(self) -> RedisHealth:
        """Round trip and connections, measured now."""
        times = []
        with redis_errors(self._client):
            self._client.ping()
            for _ in range(_PINGS):
                began = time.perf_counter()
                self._client.ping()
                times.append(time.perf_counter() - began)
            clients = self._client.info("clients")
            most = self._most(clients)
        return RedisHealth(1e3 * statistics.median(times), int(clients["connected_clients"]), most)

    # ------------------------------------------------------------------------------------------- writing

    def publish(self, table: DisturbanceTable, number: int) -> Published:
        """Publishes a version under the number of its audit entry; again and again is once.

        The pointer moves to it where ``number`` is higher than the one that it holds, so a publisher that comes late
        never moves it back, and a rollback, which is an entry of its own, does. A damaged or lost copy, pointer or list
        is replaced.

        Raises:
            TableError: the pointer holds the same number and another version: another home publishes here.
        """
        if number < 1:
            raise TableError(f"not the number of an audit entry: {number}", field="number")
        keys = (self._pointer, self._versions, self._prefix + table.version)
        moved, current, at = self._run(PUBLISH, keys, table.version, str(number), encode_table(table))
        published = Published(bool(moved), current.decode(), int(at))
        if published.number == number and published.current != table.version:
            remedy = "give each home a database of its own, such as redis://HOST/1"
            message = f"another home publishes here: entry {number} is version {published.current[:12]} there"
            raise TableError(message, server=self.place, remedy=remedy)
        if published.moved:
            with contextlib.suppress(RedisServerError):  # it stands; a lost notice only costs time
                self.announce()
        return published

    def announce(self) -> int:
        """Tells those who wait to look at the pointer; returns how many were told."""
        with redis_errors(self._client):
            return self._client.publish(self._channel, "changed")

    def prune(self, keep: int, pinned: Collection[str] = ()) -> list[str]:
        """Removes all but the newest ``keep`` versions, the current one and those ``pinned``; returns those removed."""
        if keep < 1:
            raise SettingsError(f"one version at least is kept, not {keep}", field="keep")
        removed = self._run(PRUNE, (self._pointer, self._versions), str(keep), self._prefix, *pinned)
        return [version.decode(errors="backslashreplace") for version in removed]

    # ------------------------------------------------------------------------------------------- inside

    def _run(self, script: str, keys: tuple[str, ...], *arguments: str | bytes) -> list[Any]:
        """One script: sent whole, since a server that was restarted knows no digest of it."""
        with self._typed_errors():
            return cast("list[Any]", self._client.eval(script, len(keys), *keys, *arguments))

    @contextlib.contextmanager
    def _typed_errors(self, version: str | None = None) -> Iterator[None]:
        """Those of ``redis``, and ``CorruptError`` where one of our keys (or a version's) is of another type."""
        try:
            with redis_errors(self._client):
                yield
        except RedisServerError as error:
            if "WRONGTYPE" not in error.message:
                raise
            kinds = {self._pointer: b"hash", self._versions: b"zset"}
            if version is not None:
                kinds[self._prefix + version] = b"string"
            with redis_errors(self._client):
                odd = [key for key, kind in kinds.items() if self._client.type(key) not in (kind, b"none")]
            if odd:
                raise self._damaged(odd[0]) from error
            raise

    def _named(self, version: bytes, key: str) -> str:
        """A version's name, found in ``key``."""
        if not _VERSION.fullmatch(version):
            raise self._damaged(key)
        return version.decode()

    def _damaged(self, key: str) -> CorruptError:
        message = "a key of Redis holds what agentpipe does not write"
        return CorruptError(message, server=self.place, key=key, remedy=f"{_AGAIN}, which replaces it")

    def _decoded(self, data: bytes | None, version: str) -> DisturbanceTable:
        if data is None:
            message = f"version {version[:12]} is not in Redis"
            raise UnpublishedError(message, server=self.place, field="version", remedy=_AGAIN)
        return decode_table(data, version, self.place)

    def _most(self, clients: dict[str, Any]) -> int | None:
        """The most connections, of INFO, or where an old server does not say it there, of CONFIG."""
        from redis.exceptions import ResponseError

        if "maxclients" in clients:
            return int(clients["maxclients"])
        with contextlib.suppress(ResponseError):  # managed servers refuse CONFIG
            told = cast("dict[str, str]", self._client.config_get("maxclients"))
            return int(told["maxclients"]) if told else None
        return None
