"""The services of our own image as processes of this machine, with the very commands and variables of the files."""

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
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentpipe_tests.docker import files
from agentpipe_tests.redis_server import free_port

if TYPE_CHECKING:
    from agentpipe_tests.docker.postgres_server import PostgresServer

PATIENCE = 300.0
"""Seconds after which something that should happen is taken not to; a laden machine may be slow."""
OWN_NAMES = ("code", "webserver", "daemon", "agent")


def wait_until(predicate: Callable[[], Any], what: str, process: subprocess.Popen[bytes], log: Path) -> Any:
    """What ``predicate`` returns once it is true; fails where ``process`` ends before, with what it wrote."""
    give_up = time.monotonic() + PATIENCE
    while not (found := predicate()):
        assert process.poll() is None, log.read_text(errors="replace")
        assert time.monotonic() < give_up, f"{what}: not after {PATIENCE:.0f} s\n{log.read_text(errors='replace')}"
        time.sleep(0.1)
    return found


# Volumes are bound to themselves, as /tmp is, then the root is made read-only.
_READ_ONLY = """
set -e
while [ "$1" != -- ]; do
    mount --bind "$2" "$2"
    mount -o "remount,bind,$1" "$2"
    shift 2
done
shift
mount --bind /tmp /tmp
mount -o remount,bind,ro /
exec "$@"
"""


@cache
def read_only_is_possible() -> bool:
    """Whether this process may make mounts of its own; as in a container without privileges it may not."""
    return not subprocess.run(
        ["unshare", "--mount", "mount", "-o", "remount,bind,ro", "/"], capture_output=True
    ).returncode


class Deployment:
    """What ``docker compose up`` would start of our own, beside a given Postgres.

    Names of services become 127.0.0.1, ports free ones, folders of the image folders below ``place``; nothing else of a
    command is changed. Where this process may, each runs behind a read-only root with the volumes of the files.

    Args:
        place: A folder of its own, not below /tmp.
        postgres: The running database server, where a service needs one.
        changes: Texts of ``dagster.yaml`` to replace.
        settings: More environment variables, as ``docker/agentpipe.env`` would hold them.
        variables: What ``docker/.env`` would hold beside the passwords.
    """

    def __init__(
        self,
        place: Path,
        postgres: PostgresServer | None,
        *,
        changes: dict[str, str] | None = None,
        settings: dict[str, str] | None = None,
        variables: dict[str, str] | None = None,
    ) -> None:
        self.services = files.compose({**files.GIVEN, **(variables or {})})["services"]
        self.settings = settings or {}
        self.place, self.home = place, place / "home"
        self.home.mkdir(parents=True)
        self.ports = {port: free_port() for port in (3000, 4000, 9464)}
        self.ports[5432] = postgres.port if postgres else free_port()
        self.names = {
            **{f"http://{name}": "http://127.0.0.1" for name in OWN_NAMES},
            **{f"-h {name} ": "-h 127.0.0.1 " for name in OWN_NAMES},
            **{f":{old}/": f":{new}/" for old, new in self.ports.items()},
            **{f"-p {old} ": f"-p {new} " for old, new in self.ports.items()},
            "$(hostname)": "127.0.0.1",
            "triton:8001": f"127.0.0.1:{free_port()}",
            "/home/agentpipe/home": str(self.home),
            "/etc/agentpipe": str(place / "etc"),
        }
        (place / "etc").mkdir()
        for name, by in (
            ("dagster.yaml", changes or {}),
            ("workspace.yaml", {"host: code": "host: 127.0.0.1", "4000": str(self.ports[4000])}),
        ):
            text = (files.DOCKER / name).read_text()
            assert all(old in text for old in by)
            (place / "etc" / name).write_text(files.replaced(text, by))
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.url = f"http://127.0.0.1:{self.ports[3000]}"

    # ------------------------------------------------------------------------------------------------ starting

    def words(self, words: list[str]) -> list[str]:
        """A command of the files as it is run here: paired options and their values are replaced as one text."""
        joined = files.replaced("\0".join(words).replace("\0", " \0") + " ", self.names | self._separate())
        return [word.removesuffix(" ") for word in joined.split("\0")]

    def _separate(self) -> dict[str, str]:
        options = {key: value for key, value in self.names.items() if key.startswith("-")}
        return {key.replace(" ", " \0", 1): value.replace(" ", " \0", 1) for key, value in options.items()}

    def contained(self, service: str, words: list[str]) -> list[str]:
        """A command behind a read-only root with the service's volumes, where such mounts are possible."""
        found = self.words(words)
        if not read_only_is_possible():
            return found
        cache_folder = Path(os.environ.get("AGENTPIPE_CACHE") or Path.home() / ".cache" / "agentpipe")
        cache_folder.mkdir(parents=True, exist_ok=True)
        here = {"home": self.home, "cache": cache_folder}
        mounts = []
        for volume in self.services[service]["volumes"]:
            name, _, mode = volume.split(":") if volume.count(":") == 2 else (*volume.split(":"), "rw")
            mounts += [mode, str(here[name])]
        return ["unshare", "--mount", "sh", "-c", _READ_ONLY, "sh", *mounts, "--", *found]

    def environment(self, service: str) -> dict[str, str]:
        """The variables of the image and the service, over those of this machine."""
        given = {**files.image().environment, **self.services[service]["environment"], **self.settings}
        given.pop("PATH")
        given.pop("AGENTPIPE_CACHE")  # kernels that are compiled already
        given.pop("REDIS_URL", None)  # walked by a test of its own
        given |= {"DAGSTER_POSTGRES_HOST": "127.0.0.1", "DAGSTER_POSTGRES_PORT": str(self.ports[5432])}
        given = {name: files.replaced(str(value), self.names) for name, value in given.items()}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return {**os.environ, **given, "PATH": path, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}

    def start(self, service: str) -> None:
        """Starts a service in a session of its own."""
        with (self.place / f"{service}.log").open("wb") as log:
            self.processes[service] = subprocess.Popen(
                self.contained(service, files.command(self.services[service])),
                env=self.environment(service),
                cwd=self.place,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def finish(self, service: str) -> None:
        """Runs a service that ends by itself."""
        self.start(service)
        assert self.processes.pop(service).wait(PATIENCE) == 0, self.said(service)

    def listens(self, service: str, port: int) -> bool:
        """Whether something takes connections on what was ``port`` in the files; fails where the service has ended."""
        assert self.processes[service].poll() is None, self.said(service)
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", self.ports[port])) == 0

    def healthy(self, service: str) -> bool:
        """Whether the health check of the files passes; seconds of computing, so ask once it may."""
        assert self.processes[service].poll() is None, self.said(service)
        words = self.contained(service, files.health(self.services[service]))
        return not subprocess.run(words, env=self.environment(service), cwd=self.place, capture_output=True).returncode

    def stop(self) -> dict[str, int]:
        """SIGTERM to each, as an engine sends it; then whatever they left behind. Returns how each ended."""
        ended = {}
        for process in self.processes.values():
            process.send_signal(signal.SIGTERM)
        for service, process in self.processes.items():
            try:
                ended[service] = process.wait(60)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        self.processes.clear()
        return ended

    # ------------------------------------------------------------------------------------------------ asking

    def wait(self, predicate: Callable[[], Any], what: str) -> Any:
        """What ``predicate`` returns once it is true."""
        give_up = time.monotonic() + PATIENCE
        while time.monotonic() < give_up:
            found = predicate()
            if found:
                return found
            time.sleep(0.2)
        raise AssertionError(f"{what}: not after {PATIENCE:.0f} s\n" + "\n".join(map(self.said, self.processes)))

    def said(self, service: str) -> str:
        """The end of what a service wrote."""
        return f"--- {service}\n{(self.place / f'{service}.log').read_text(errors='replace')[-3000:]}"

    def graphql(self, query: str, **variables: Any) -> Any:
        """The data that the webserver answers."""
        body = json.dumps({"query": query, "variables": variables}).encode()
        request = urllib.request.Request(f"{self.url}/graphql", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            content = json.loads(answer.read())
        assert "errors" not in content, content
        return content["data"]
