"""Starting a real Triton on this machine's loopback address."""

from __future__ import annotations

import errno
import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Final, Literal, Self

from agentpipe.errors import ServiceError
from agentpipe.serving.loopback import http_opener
from agentpipe.serving.scratch import Scratch
from agentpipe.serving.triton_install import (
    TritonInstallation,
    find_triton,
    install_triton,
    stub_environment,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from types import TracebackType

__all__ = ["TritonInstallation", "TritonServer", "find_triton", "install_triton"]

HOST: Final = "127.0.0.1"
# prctl(PR_SET_PDEATHSIG, SIGKILL) survives exec; the second look is for a parent that has died before it.
_WITH_PARENT: Final = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""
Control = Literal["none", "poll", "explicit"]


class TritonServer:
    """A Triton over one model repository, as a context manager; stopped on leaving.

    On Linux it ends with the thread that started it, also where that is killed; what such a process left in the folder
    of temporary files and in shared memory is removed at the next start.

    Args:
        repository: The model repository, for example a bundle.
        installation: The server.
        control: ``none`` loads everything once and fails when a model does not load; ``poll`` follows the repository;
            ``explicit`` loads on demand.
        poll_seconds: How often ``poll`` looks.
        http_port: 0 takes a free one.
        grpc_port: 0 takes a free one.
        start_timeout: Seconds until it must be ready.

    Raises:
        ServiceError: a port is in use, or the server does not become ready; the message holds the end of its log.
    """

    def __init__(
        self,
        repository: Path,
        installation: TritonInstallation,
        *,
        control: Control = "none",
        poll_seconds: int = 1,
        http_port: int = 0,
        grpc_port: int = 0,
        start_timeout: float = 60.0,
    ) -> None:
        ports = _ports(http_port, grpc_port)
        self.http, self.grpc = (f"{HOST}:{port}" for port in ports)
        shared_memory = f"agentpipe_{os.getpid()}_{ports[0]}"
        self._scratch = Scratch(shared_memory)
        self.log_path = self._scratch.path / "server.log"
        command = [
            str(installation.binary),
            f"--model-repository={repository}",
            f"--backend-directory={installation.backends}",
            f"--cache-directory={installation.root / 'caches'}",
            f"--model-control-mode={control}",
            *([f"--repository-poll-secs={poll_seconds}"] if control == "poll" else []),
            f"--http-address={HOST}",
            f"--http-port={ports[0]}",
            f"--grpc-address={HOST}",
            f"--grpc-port={ports[1]}",
            "--allow-metrics=false",
            "--disable-auto-complete-config",  # a configuration must be complete, not completed
            "--exit-timeout-secs=10",
            f"--backend-config=python,shm-region-prefix-name={shared_memory}",
        ]
        started = time.monotonic()
        try:
            self._process = _start(command, installation, self.log_path)
        except BaseException:
            self._scratch.remove()
            raise
        try:
            self._wait(started + start_timeout)
        except BaseException:
            self.stop()
            raise
        self.start_seconds = time.monotonic() - started

    def _wait(self, deadline: float) -> None:
        opener = http_opener(self.http)
        while time.monotonic() < deadline:
            code = self._process.poll()
            if code is not None:
                raise ServiceError(f"Triton ended with {code}: {self._log_end()}", remedy="see the log above")
            try:
                with opener.open(f"http://{self.http}/v2/health/ready", timeout=1) as answer:
                    if answer.status == 200:
                        return
            except (OSError, http.client.HTTPException):
                pass
            time.sleep(0.05)
        raise ServiceError(f"Triton is not ready in time: {self._log_end()}", remedy="give it more time")

    def _log_end(self) -> str:
        """What the log says of errors: those lines, else its last ones."""
        lines = self.log_path.read_text(errors="replace").splitlines()
        errors = [line for line in lines if line.startswith(("E", "error:")) or "UNAVAILABLE" in line]
        return "\n".join(errors or lines[-20:])[-3_000:].strip()

    def wait(self) -> None:
        """Waits as long as the server runs, until an exception such as KeyboardInterrupt.

        Raises:
            ServiceError: it has ended by itself; the message holds the end of its log.
        """
        code = self._process.wait()
        raise ServiceError(f"Triton ended with {code}: {self._log_end()}", remedy="see the log above")

    def stop(self) -> None:
        """Stops the server and removes what it left in shared memory; a second call does nothing."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        self._scratch.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _start(command: Sequence[str], installation: TritonInstallation, log: Path) -> subprocess.Popen[bytes]:
    try:
        with log.open("wb") as file:
            if not os.access(command[0], os.X_OK):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), command[0])
            return subprocess.Popen(  # noqa: S603 - our own installation
                [sys.executable, "-I", "-S", "-c", _WITH_PARENT, str(os.getpid()), *command],
                env=stub_environment(installation),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that stub and server can be ended together
            )
    except OSError as error:
        remedy = "install it again: agentpipe bundle install-triton"
        raise ServiceError(f"Triton cannot be started: {error}", file=installation.binary, remedy=remedy) from error


def _ports(*wanted: int) -> list[int]:
    """The wanted ports, free ones for zeros, all free at this moment.

    Raises:
        ServiceError: one is in use, or wanted twice.
    """
    twice = next((port for port in wanted if port and wanted.count(port) > 1), None)
    if twice is not None:
        raise ServiceError(f"port {twice} is wanted twice", port=twice, remedy="choose two, or 0 for free ones")
    held = []
    try:
        for port in wanted:
            listener = socket.socket()
            held.append(listener)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((HOST, port))
            except OSError as error:
                remedy = "choose another, or 0 for a free one"
                raise ServiceError(f"port {port} cannot be used: {error.strerror}", port=port, remedy=remedy) from error
        return [listener.getsockname()[1] for listener in held]
    finally:
        for listener in held:
            listener.close()
