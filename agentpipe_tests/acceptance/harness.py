"""A home with its webserver and daemon really running, and what Dagster's instance says of it."""

from __future__ import annotations

import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import dagster as dg
from dagster._core.scheduler.instigation import TickStatus

if TYPE_CHECKING:
    from agentpipe_tests.acceptance.conftest import Home

OVER = (dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED)
QUICK_DAEMON = """\
import sys
if "dagster._daemon" in sys.orig_argv:
    import dagster._daemon.controller
    dagster._daemon.controller.DEFAULT_DAEMON_INTERVAL_SECONDS = 5
"""
"""The daemon looks at backfills every 30 s, which nothing sets; for tests every 5 s."""
READER = """\
import sys, time
import dagster as dg
reads = 0
with dg.DagsterInstance.from_config(sys.argv[1]) as instance:
    while time.time() < float(sys.argv[2]):
        for run in instance.get_runs(limit=2):
            instance.all_logs(run.run_id)
        instance.get_backfills(limit=5)
        for key in instance.get_asset_keys():
            instance.fetch_materializations(key, limit=5)
        for state in instance.all_instigator_state():
            instance.get_ticks(state.instigator_origin_id, state.selector_id, limit=5)
        reads += 1
        print(reads, flush=True)
        time.sleep(4)
"""


def left_over(group: int) -> list[str]:
    """Processes that still belong to a process group."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if os.getpgid(int(folder.name)) == group:
                found.append((folder / "cmdline").read_text())
        except (ProcessLookupError, FileNotFoundError, PermissionError):
            continue
    return [command for command in found if command]


PATIENCE = 600.0
"""Seconds after which something that should happen is taken not to; a laden machine may be slow."""


def wait_until(predicate: Callable[[], Any], what: str, said: Callable[[], object] = str) -> Any:
    """What ``predicate`` returns once it is true; fails after :data:`PATIENCE` with ``what`` and what is ``said``."""
    give_up = time.monotonic() + PATIENCE
    while time.monotonic() < give_up:
        found = predicate()
        if found:
            return found
        time.sleep(0.5)
    raise AssertionError(f"{what}: not after {PATIENCE:.0f} s\n{said()}")


class Served:
    """``agentpipe ui`` over a home until :meth:`stop`."""

    def __init__(self, home: Home, log: Path, **settings: str) -> None:
        self.home, self.log = home, log
        hooks = log.parent / "hooks"
        hooks.mkdir(exist_ok=True)
        (hooks / "sitecustomize.py").write_text(QUICK_DAEMON)
        path = os.pathsep.join(filter(None, [str(hooks), os.environ.get("PYTHONPATH")]))
        self.environment = home.environment(PYTHONPATH=path, AGENTPIPE_SCHEDULE__EVERY_SECONDS="5", **settings)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "agentpipe", "ui", "--port", "0", "--home", str(home.path), "--json"],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
        )
        document = json.loads(_first_object(self.process.stdout))
        self.url, self.group = str(document["url"]), int(document["process"])

    def stop(self) -> None:
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(60) == 0, self.log.read_text()[-4000:]
        assert not left_over(self.group), "the UI left processes behind"


def _first_object(lines: IO[str] | None) -> str:
    assert lines is not None
    text = ""
    for line in lines:
        text += line
        if line.startswith("}"):
            break
    return text


class Loop:
    """Questions to the instance of a served home."""

    def __init__(self, home: Home, served: Served) -> None:
        self.home, self.served = home, served
        self.instance = dg.DagsterInstance.from_config(str(home.path / "dagster"))

    def wait(self, predicate: Callable[[], Any], what: str) -> Any:
        return wait_until(predicate, what, self.report)

    def ticks(self, sensor: str, text: str = "") -> None:
        """Waits for two more ticks of a sensor, and until one of the later says ``text``."""
        before = len(self.said(sensor))

        def later() -> bool:
            said = self.said(sensor)
            return len(said) >= before + 2 and any(text in tick for tick in said[: len(said) - before - 1])

        self.wait(later, f"a tick of {sensor} that says {text!r}")

    # ------------------------------------------------------------------------------------------------ reading

    def counts(self) -> Counter[tuple[str, str | None]]:
        """Materialisation events by asset and partition; without those of sources, which no run makes."""
        found: Counter[tuple[str, str | None]] = Counter()
        for key in self.instance.get_asset_keys():
            if key.to_user_string() not in ("table_source", "champion"):
                for record in self.instance.fetch_materializations(key, limit=1000).records:
                    found[key.to_user_string(), record.partition_key] += 1
        return found

    def runs(self, job: str | None = None, partition: str | None = None, **tags: str) -> list[dg.RunRecord]:
        """Run records of the daemon, oldest first, with their times."""
        wanted = {**tags, **({"dagster/partition": partition} if partition else {})}
        records = self.instance.get_run_records(dg.RunsFilter(job_name=job, tags=wanted), ascending=True)
        return [record for record in records if "agentpipe/main-job" not in record.dagster_run.tags]

    def idle(self) -> bool:
        """Nothing runs and nothing is about to."""
        waiting = any(record.dagster_run.status not in OVER for record in self.runs())
        return not waiting and all(backfill.status.value != "REQUESTED" for backfill in self.backfills())

    def backfills(self) -> Sequence[Any]:
        """All backfills, oldest first."""
        return list(self.instance.get_backfills())[::-1]

    def said(self, sensor: str) -> list[str]:
        """Why a sensor or schedule launched nothing, the newest tick first; without one that is being evaluated."""
        for state in self.instance.all_instigator_state():
            if state.instigator_name == sensor:
                ticks = self.instance.get_ticks(state.instigator_origin_id, state.selector_id, limit=500)
                return [tick.skip_reason or "" for tick in ticks if tick.status is not TickStatus.STARTED]
        return []

    def tick_errors(self) -> list[str]:
        """Errors of every tick of every sensor and schedule."""
        return [
            f"{state.instigator_name}: {tick.error}"
            for state in self.instance.all_instigator_state()
            for tick in self.instance.get_ticks(state.instigator_origin_id, state.selector_id, limit=500)
            if tick.error is not None
        ]

    def report(self) -> str:
        """Runs, backfills, last ticks and the end of the log: for a test that fails."""
        runs = [f"{r.dagster_run.job_name} {r.dagster_run.status.value} {r.dagster_run.tags}" for r in self.runs()]
        backfills = [f"{b.backfill_id} {b.status.value} {b.tags}" for b in self.backfills()]
        ticks = [
            f"{s.instigator_name}: {self.said(s.instigator_name)[:2]}" for s in self.instance.all_instigator_state()
        ]
        return "\n".join([*runs[-8:], *backfills[-4:], *ticks, self.served.log.read_text()[-3000:]])

    # ------------------------------------------------------------------------------------------------ doing

    def command(self, *arguments: str) -> dict[str, Any]:
        """The document of a command that must succeed."""
        code, document, log = self.home.call(*arguments)
        assert code == 0, (arguments, document, log)
        return document

    def graphql(self, query: str, **variables: Any) -> Any:
        """The one answer of a query or mutation."""
        body = json.dumps({"query": query, "variables": variables}).encode()
        request = urllib.request.Request(f"{self.served.url}/graphql", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            content = json.loads(answer.read())
        assert "errors" not in content, content
        [only] = content["data"].values()
        return only

    def launch(self, job: str, configuration: dict[str, Any]) -> str:
        """Launches a job as the launchpad does; returns the run's id."""
        selector = {
            "repositoryLocationName": "agentpipe",
            "repositoryName": "__repository__",
            "jobName": job,
        }
        launched = self.graphql(
            "mutation($p: ExecutionParams!) { launchRun(executionParams: $p) { __typename"
            " ... on LaunchRunSuccess { run { runId } } ... on PythonError { message }"
            " ... on RunConfigValidationInvalid { errors { message } } } }",
            p={"selector": selector, "runConfigData": configuration},
        )
        assert launched["__typename"] == "LaunchRunSuccess", launched
        return str(launched["run"]["runId"])


class Receiver:
    """A webhook that takes what it is told."""

    def __init__(self) -> None:
        told: list[dict[str, Any]] = []
        self.told = told

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                told.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_arguments: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook"

    def of(self, run_id: str) -> list[dict[str, Any]]:
        """The alerts that name a run."""
        return [alert for alert in self.told if run_id in json.dumps(alert)]


class Readers:
    """Processes that read the instance without pause, each with its own connections."""

    def __init__(self, dagster_home: Path, folder: Path, number: int = 3, seconds: float = 1800) -> None:
        self.logs = [folder / f"reader-{index}.log" for index in range(number)]
        command = [sys.executable, "-c", READER, str(dagster_home), str(time.time() + seconds)]
        self.processes = [
            subprocess.Popen(command, stdout=log.open("w"), stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
            for log in self.logs
        ]

    def ends(self) -> list[tuple[int | None, str]]:
        """Exit code (none while it reads) and last line of each."""
        return [
            (process.poll(), (log.read_text().splitlines() or [""])[-1])
            for process, log in zip(self.processes, self.logs, strict=True)
        ]

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
