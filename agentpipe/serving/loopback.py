"""Connections to servers: on the loopback address without a proxy, and over HTTP with an end to all waiting."""

from __future__ import annotations

import http.client
import ipaddress
import math
import socket
import time
import urllib.request
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

_LARGEST: Final = 2**31 - 1
# What Triton's client sets where it is given no options of its own.
_CLIENT: Final = (
    ("grpc.max_send_message_length", _LARGEST),
    ("grpc.max_receive_message_length", _LARGEST),
    ("grpc.keepalive_time_ms", _LARGEST),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", False),
    ("grpc.http2.max_pings_without_data", 2),
)


def is_loopback(address: str) -> bool:
    """Whether ``host:port`` is this machine by its loopback address: no proxy leads there."""
    host = address.rpartition(":")[0].strip("[]").lower().rstrip(".")
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def channel_options(address: str, own: Sequence[tuple[str, Any]] = ()) -> list[tuple[str, Any]]:
    """Options of a gRPC channel to ``host:port``; ``own`` replaces those of Triton's client."""
    direct = [("grpc.enable_http_proxy", 0)] if is_loopback(address) else []
    return [*({**dict(_CLIENT), **dict(own)}.items()), *direct]


def http_opener(address: str) -> urllib.request.OpenerDirector:
    """Opens ``http://host:port/…`` within the time-out of ``open``, all in all, however slowly bytes drip.

    Environment variables name a proxy, but none to the loopback address. Redirections are errors as others are.
    """
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler({} if is_loopback(address) else None),
        _Handler(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.HTTPDefaultErrorHandler(),
    ):
        opener.add_handler(handler)
    return opener


class _Handler(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_Connection, req)


class _Connection(http.client.HTTPConnection):
    """One whose time-out is that of the whole exchange."""

    def connect(self) -> None:
        end = math.inf if self.timeout is None else time.monotonic() + self.timeout
        super().connect()
        self.sock = _Socket(fileno=self.sock.detach())
        self.sock.end = end
        self.sock.settimeout(self.timeout)


class _Socket(socket.socket):
    """A socket that receives until ``end`` (monotonic)."""

    end = math.inf

    def recv_into(self, *arguments: Any, **options: Any) -> int:  # noqa: ANN401 - as the method that it stands for
        """Receives, or raises TimeoutError."""
        if self.end < math.inf:
            left = self.end - time.monotonic()
            if left <= 0:
                raise TimeoutError("timed out")
            self.settimeout(left)
        return super().recv_into(*arguments, **options)
