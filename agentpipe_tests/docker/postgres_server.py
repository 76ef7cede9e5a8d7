"""A real Postgres of a test's own, on a loopback port, with a password; it dies with the process that started it."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from agentpipe_tests.redis_server import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

START_SECONDS = 60.0


@dataclass(frozen=True)
class PostgresServer:
    """Where it listens and who may log in."""

    folder: Path
    port: int
    user: str
    password: str
    database: str

    def said(self) -> str:
        """The server's log."""
        return (self.folder / "log").read_text(errors="replace")


def binaries() -> Path:
    """The folder of ``initdb`` and ``postgres``: of PATH, else the newest of Debian's; skips the test without one."""
    found = shutil.which("initdb")
    folders = [Path(found).resolve().parent] if found else []
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name), reverse=True)
    for folder in folders:
        if (folder / "initdb").exists() and (folder / "postgres").exists() and shutil.which("setpriv"):
            return folder
    pytest.skip("no Postgres here: apt-get install postgresql")


def _login() -> dict[str, Any]:
    """Postgres refuses to run as root: then as its own user, or nobody."""
    if os.geteuid():
        return {}
    known = {entry.pw_name: entry for entry in pwd.getpwall()}
    chosen = known.get("postgres") or known["nobody"]
    return {"user": chosen.pw_uid, "group": chosen.pw_gid, "extra_groups": []}


@contextlib.contextmanager
def postgres_server(user: str, password: str, database: str, options: Sequence[str] = ()) -> Iterator[PostgresServer]:
    """A new, empty server with one database; stopped and removed afterwards.

    Args:
        user: Its superuser, who logs in by ``password`` only.
        password: See above.
        database: Made at the start.
        options: More of its command line, such as ``("-c", "max_connections=200")``.
    """
    folder, login = binaries(), _login()
    place = Path(tempfile.mkdtemp(prefix="agentpipe-postgres-"))  # short: it holds a socket
    process = None
    try:
        (place / "password").write_text(password)
        for path in (place, place / "password"):
            os.chown(path, login.get("user", -1), login.get("group", -1))
        environment = {"PATH": f"{folder}:/usr/bin:/bin", "LC_ALL": "C.UTF-8", "PGPASSWORD": password}

        def call(*words: str) -> subprocess.CompletedProcess[str]:
            command = [str(folder / words[0]), *words[1:]]
            return subprocess.run(command, env=environment, cwd=place, capture_output=True, text=True, **login)

        made = call(
            *("initdb", "-D", "data", "-U", user, "--pwfile", "password", "--no-sync"),
            *("--auth-host=scram-sha-256", "--auth-local=scram-sha-256", "--data-checksums"),
        )
        assert made.returncode == 0, made.stderr
        port = free_port()
        with (place / "log").open("wb") as log:
            process = subprocess.Popen(
                [
                    *("setpriv", "--pdeathsig", "QUIT", str(folder / "postgres"), "-D", "data", "-p", str(port)),
                    *("-h", "127.0.0.1", "-k", str(place), "-c", "fsync=off", *options),
                ],
                **{"env": environment, "cwd": place, "stdout": log, "stderr": subprocess.STDOUT, **login},
            )
        reach = ("-h", "127.0.0.1", "-p", str(port), "-U", user)
        give_up = time.monotonic() + START_SECONDS
        while call("pg_isready", *reach).returncode:
            said = (place / "log").read_text(errors="replace")
            assert process.poll() is None, said
            assert time.monotonic() < give_up, said
            time.sleep(0.1)
        created = call("createdb", *reach, database)
        assert created.returncode == 0, created.stderr
        yield PostgresServer(place, port, user, password, database)
    finally:
        if process is not None:
            process.send_signal(3)  # SIGQUIT: at once
            process.wait(30)
        shutil.rmtree(place, ignore_errors=True)
