"""``agentpipe ui``: Dagster's webserver and daemon over a home, on the loopback address."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from agentpipe.cli.options import Home, Json
from agentpipe.cli.output import print_json, reporting, say
from agentpipe.errors import ServiceError

HOST = "127.0.0.1"
START_SECONDS = 120.0
STOP_SECONDS = 20.0
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy leads to the loopback address
WORKSPACE = """\
load_from:
  - python_module:
      module_name: agentpipe.definitions
      location_name: agentpipe
"""


def ui(
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="Port on 127.0.0.1; 0 takes a free one.")
    ] = 3000,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Opens the Dagster UI of a home: webserver and daemon, until Ctrl-C.

    Runs launched there use the settings of the home's last `agentpipe run`.
    """
    from agentpipe.settings import load_settings

    with reporting(as_json):
        folder = load_settings(home=home).home.resolve()
        chosen = free_port(port)
        with serving(folder, chosen) as process:
            url = f"http://{HOST}:{chosen}"
            if as_json:
                print_json({"ok": True, "url": url, "home": str(folder), "process": process.pid})
                sys.stdout.flush()
            else:
                typer.echo(f"{url}  (home {folder}; Ctrl-C ends it)")
            code = 0
            with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C is how it ends
                code = process.wait()
            if code not in (0, -signal.SIGINT, -signal.SIGTERM):
                raise ServiceError("the UI ended by itself", exit_code=code, remedy="its last lines above say why")


def free_port(port: int) -> int:
    """``port`` where nothing listens on it; for 0 one that is free.

    Raises:
        ServiceError: something listens there already.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            remedy = "end what listens there, or choose another with --port"
            raise ServiceError(f"port {port} cannot be used: {error.strerror}", port=port, remedy=remedy) from error
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def serving(home: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Webserver and daemon in a session of their own, up when the body starts; all of it ended afterwards.

    Raises:
        ServiceError: it does not come up.
    """
    from agentpipe.storage import prepare_home, write_bytes

    prepare_home(home)
    environment = _environment(home)
    workspace = home / "dagster" / "workspace.yaml"
    write_bytes(workspace, WORKSPACE.encode())
    command = [sys.executable, "-m", "dagster", "dev", "-w", str(workspace), "-h", HOST, "-p", str(port)]
    command += ["--log-level", "warning"]
    # A background job of a shell has SIGINT ignored, and what it starts inherits that: undone before anything starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(  # noqa: S603 - our own interpreter
        command, env=environment, cwd=home, stdin=subprocess.DEVNULL, stdout=sys.stderr, start_new_session=True
    )
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        _await(process, port)
        yield process
    finally:
        signal.signal(signal.SIGTERM, previous)
        stop(process)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _environment(home: Path) -> dict[str, str]:
    from agentpipe.defs.instance import dagster_home
    from agentpipe.defs.partitions import keep_start

    keep_start(home)
    dagster_home(home)
    environment = {**os.environ, "AGENTPIPE_HOME": str(home), "DAGSTER_HOME": str(home / "dagster")}
    environment.setdefault("PYTHONWARNINGS", "ignore")  # Dagster's own, about its commands
    last = home / "last_run.json"
    if last.exists():
        for name, value in json.loads(last.read_text()).items():
            if name != "home":
                environment[f"AGENTPIPE_{name.upper()}"] = str(value)
    return environment


def _await(process: subprocess.Popen[bytes], port: int) -> None:
    say(f"Starting the UI on http://{HOST}:{port} …")
    give_up = time.monotonic() + START_SECONDS
    while time.monotonic() < give_up:
        if process.poll() is not None:
            remedy = "its last lines above say why"
            raise ServiceError("the UI ended before it was up", exit_code=process.returncode, remedy=remedy)
        if _answers(f"http://{HOST}:{port}/server_info"):
            return
        time.sleep(0.3)
    raise ServiceError(f"the UI is not up after {START_SECONDS:.0f} s", port=port, remedy="look at the machine's load")


def _answers(url: str) -> bool:
    try:
        with _DIRECT.open(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:  # refused, reset, timed out: not up yet
        return False


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends the process and everything it started: politely, then its whole group."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5)
