"""Connecting to a Redis server: a small blocking pool with time-outs, and typed errors that never name the password."""

from __future__ import annotations

import contextlib
import math
import re
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

from agentpipe.errors import RedisServerError, SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from redis import Redis

_RETRIES = 2
_TEXT_LIMIT = 200
_DATABASE = re.compile(r"/?[0-9]{0,9}/?")
_TIMES = ("socket_timeout", "socket_connect_timeout")
_OPTIONS = ("db", "client_name", *_TIMES)
_TLS_OPTIONS = ("ssl_cert_reqs", "ssl_check_hostname", "ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile")
"""Of ``rediss://`` only. Options that change what answers look like, the pool or its retries are not taken."""


def connect(url: str, *, size: int = 4, patience: float = 5.0, socket_timeout: float = 2.0) -> Redis:
    """A client with a pool of its own; nothing is sent yet. Close it with ``close()``.

    A command that fails for want of a connection is tried again twice within 0.2 s, so that a server that was restarted
    is found again.

    Args:
        url: ``redis://[[USER]:PASSWORD@]HOST[:PORT][/DB]``, ``rediss://…`` or ``unix://[:PASSWORD@]/SOCKET[?db=DB]``.
            Further options in its query: ``client_name``, ``socket_timeout``, ``socket_connect_timeout``, and those of
            TLS that begin with ``ssl_``.
        size: connections of this pool at most.
        patience: seconds that a thread waits for a free connection.
        socket_timeout: seconds until the server must have taken a connection, and have answered a command.

    Raises:
        SettingsError: a number is not positive.
        RedisServerError: the URL is malformed, or has an option that is not taken.
    """
    from redis import BlockingConnectionPool, Redis, RedisError
    from redis.backoff import ExponentialBackoff
    from redis.retry import Retry

    if size < 1 or patience <= 0 or socket_timeout <= 0:
        message = "size and time-outs of a Redis pool must be positive"
        raise SettingsError(message, size=size, patience=patience, socket_timeout=socket_timeout)
    try:
        _check(url)
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=size,
            timeout=patience,
            socket_timeout=socket_timeout,
            socket_connect_timeout=socket_timeout,
            retry=Retry(ExponentialBackoff(cap=0.1, base=0.05), _RETRIES),
            health_check_interval=0,
        )
        pool.connection_class(**pool.connection_kwargs)  # connects to nothing; refuses values it cannot use
    except (ValueError, TypeError, AttributeError, RedisError):  # UnicodeError is a ValueError
        # what urllib and redis say may hold a part of the password: neither told nor chained
        remedy = (
            "write redis://:PASSWORD@HOST:PORT/DB, with / @ : ? # of the password as %2F %40 %3A %3F %23; "
            f"options: {', '.join(_OPTIONS)}; with rediss:// also {', '.join(_TLS_OPTIONS)}"
        )
        raise RedisServerError("REDIS_URL is malformed", field="redis_url", remedy=remedy) from None
    return Redis.from_pool(pool)


def _check(url: str) -> None:
    """Refuses what redis-py would take for something else, such as ``/abc`` for database 0.

    Raises:
        ValueError: host, database or options are malformed, or an option is not taken. The text holds nothing of them.
    """
    url.encode()
    parts = urlsplit(url)
    (parts.hostname or "").encode("idna")
    if parts.fragment or (parts.scheme != "unix" and not _DATABASE.fullmatch(parts.path)):
        raise ValueError("database")
    options = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    known = (*_OPTIONS, *_TLS_OPTIONS) if parts.scheme == "rediss" else _OPTIONS
    if len({name for name, _ in options}) < len(options):
        raise ValueError("an option given twice")
    for name, value in options:
        if name not in known or not value:
            raise ValueError("option")
        if name == "db" and not re.fullmatch("[0-9]{1,9}", value):
            raise ValueError("database")
        if name in _TIMES and not 0 < float(value) < math.inf:
            raise ValueError("time-out")


def place_of(client: Redis) -> str:
    """Where the server is, for messages: ``HOST:PORT/DB`` or ``SOCKET/DB``, without login."""
    options: dict[str, Any] = client.connection_pool.connection_kwargs
    host = options.get("path") or f"{options.get('host', 'localhost')}:{options.get('port', 6379)}"
    return f"{host}/{options.get('db') or 0}"


@contextlib.contextmanager
def redis_errors(client: Redis) -> Iterator[None]:
    """Turns the errors of ``redis`` into typed ones.

    Raises:
        RedisServerError: away, slow, loading, full, read-only, or of another login.
    """
    import redis

    try:
        yield
    except redis.RedisError as error:
        message, remedy = _explained(error)
        raise RedisServerError(message, server=place_of(client), remedy=remedy) from error


def _explained(error: Exception) -> tuple[str, str]:
    """What is wrong, and what to do about it; the more special classes come first."""
    from redis import exceptions as kinds

    text = " ".join(str(error).split())[:_TEXT_LIMIT]
    login = ("Redis refuses the login", "correct user and password in the Redis URL")
    cases: tuple[tuple[type[Exception], str, str], ...] = (
        (kinds.AuthenticationError, *login),
        (kinds.AuthorizationError, *login),
        (kinds.NoPermissionError, f"Redis does not permit it: {text}", "widen the access list of this user"),
        (kinds.BusyLoadingError, "Redis is still loading its data", "try again when it has started"),
        (kinds.TimeoutError, "Redis does not answer in time", "look at its load and at the network"),
        (kinds.OutOfMemoryError, "Redis is out of memory", "raise its maxmemory, or remove what nobody needs"),
        (kinds.ReadOnlyError, "this Redis takes no writes: it is a replica", "give the URL of the primary"),
    )
    for kind, message, remedy in cases:
        if isinstance(error, kind):
            return message, remedy
    if isinstance(error, kinds.ConnectionError):
        if "No connection available" in text:
            return "every connection of this pool is in use", "use fewer threads, or a larger pool"
        if "max number of clients" in text:
            return "Redis takes no more connections", "close idle clients, or raise its maxclients"
        return f"Redis cannot be reached: {text}", "start it, or correct the Redis URL; unset it to use files only"
    return f"Redis refuses the command: {text}", "look at the server's log and configuration"
