"""Homes in which the main job has run, in the smallest size that goes through every asset."""

from __future__ import annotations

import contextlib
import datetime as dt
import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from agentpipe.errors import ServiceError
from agentpipe.serving.triton_install import install_triton
from agentpipe_tests.acceptance.harness import Loop, Readers, Receiver, Served
from agentpipe_tests.production import day_of_production

TINY = {
    "AGENTPIPE_PROFILE": "demo",
    "AGENTPIPE_THREADS": "1",
    "AGENTPIPE_TRAINING__ENVIRONMENTS": "30",
    "AGENTPIPE_TRAINING__TOTAL_STEPS": "4000",
    "AGENTPIPE_TRAINING__MINIBATCH": "512",
    "AGENTPIPE_TRAINING__HIDDEN": "32",
    "AGENTPIPE_TRAINING__WARMUP_EPISODES": "60",
    "AGENTPIPE_TRAINING__VALIDATE_EVERY": "4",
    "AGENTPIPE_EVALUATION__ENVIRONMENTS": "30",
    "AGENTPIPE_EVALUATION__EPISODES_PER_ENV": "1",
    "AGENTPIPE_EVALUATION__STATISTICS_STEPS": "20",
    "AGENTPIPE_EVALUATION__ATTRIBUTION_EPISODES": "20",
    "AGENTPIPE_GATES__RANDOM_MARGIN": "-1",  # a policy that has learned nothing passes: here it is about the plumbing
}
# The same size, with the whole hold-out and gates that a tiny policy passes: its candidates may become champion. Every
# later one is held for a person, since hardly any drift is allowed.
PROMOTABLE = {
    **{name: value for name, value in TINY.items() if name != "AGENTPIPE_EVALUATION__ENVIRONMENTS"},
    "AGENTPIPE_PROFILE": "standard",
    "AGENTPIPE_TRAINING__WARMUP_MINIBATCH": "720",
    "AGENTPIPE_FINETUNING__RETRAINING_STEPS": "2000",
    "AGENTPIPE_FINETUNING__EPOCHS": "2",
    "AGENTPIPE_PROMOTION__EPISODES_PER_ENV": "1",
    "AGENTPIPE_FEEDBACK__MINIMUM_LABELS": "4",
    "AGENTPIPE_GATES__SUCCESS_MIN": "0",
    "AGENTPIPE_GATES__DRIFT_KL_REVIEW": "1e-9",
}


@dataclass
class Home:
    """A home and the command line over it."""

    path: Path
    settings: dict[str, str] = field(default_factory=lambda: dict(TINY))

    def environment(self, **more: str) -> dict[str, str]:
        return {**os.environ, "OMP_NUM_THREADS": "1", **self.settings, **more}

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "agentpipe", *arguments, "--home", str(self.path), "--json"]

    def call(self, *arguments: str, **more: str) -> tuple[int, dict[str, Any], str]:
        """Exit code, the JSON document, and what went to standard error."""
        done = subprocess.run(
            self.command(*arguments), env=self.environment(**more), capture_output=True, text=True, timeout=600
        )
        return done.returncode, json.loads(done.stdout), done.stderr

    def start(self, *arguments: str, **more: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(*arguments),
            env=self.environment(**more),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )


@contextlib.contextmanager
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of all processes that run tests, for one of them at a time.

    Whoever runs a main job first is alone: it compiles every kernel, and others wait rather than compile the same.
    """
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "original"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished home and the document of its run, made by one of the processes that run tests."""
    with alone(tmp_path_factory) as folder:
        if not (folder / "document.json").exists():
            _server()  # now, or later runs would find one and check the bundle again
            code, document, log = Home(folder / "home").call("run")
            assert code == 0, log
            (folder / "document.json").write_text(json.dumps(document))
    return folder


@pytest.fixture(scope="session")
def finished(original: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Home, dict[str, Any]]:
    """A home and the document of its first run; tests leave its candidate alone."""
    home = Home(tmp_path_factory.mktemp("finished") / "home")
    shutil.copytree(original / "home", home.path, symlinks=True)
    document = (original / "document.json").read_text().replace(str(original / "home"), str(home.path))
    return home, json.loads(document)


@dataclass
class Day:
    """A home whose daemon runs, shortly before its night."""

    loop: Loop
    receiver: Receiver
    readers: Readers
    begins: dt.datetime
    """when the night begins, UTC"""
    production: list[dict[str, Any]]
    """what the champion decided yesterday, and the labels"""

    @property
    def date(self) -> dt.date:
        """The day that the night is for."""
        return self.begins.date() - dt.timedelta(days=1)


def _server() -> dict[str, str]:
    """A real Triton where one can be installed; elsewhere promotions do without it."""
    try:
        install_triton()
    except ServiceError:
        return {"AGENTPIPE_SERVING__SKIPPED_CHECK_ALLOWED": "true"}
    return {}


@pytest.fixture(scope="session")
def day(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Day]:
    """A champion, the daemon, three processes that read the instance, a receiver of alerts; the night is near."""
    if dt.datetime.now(dt.UTC).time() > dt.time(23, 40):
        pytest.skip("the UTC day is almost over: the night would be another day's")
    folder = tmp_path_factory.mktemp("loop")
    home = Home(folder / "home", PROMOTABLE | _server())
    with alone(tmp_path_factory):
        code, document, log = home.call("run")
    assert code == 0, log
    assert document["champion"]["promoted"] is True
    receiver = Receiver()
    package = home.call("champion", "show")[1]["champion"]["package"]
    yesterday = dt.datetime.now(dt.UTC).date() - dt.timedelta(days=1)
    production = day_of_production(home.path / package, yesterday)
    begins = (dt.datetime.now(dt.UTC) + dt.timedelta(seconds=150)).replace(second=0, microsecond=0)
    served = Served(
        home,
        folder / "ui.log",
        AGENTPIPE_SCHEDULE__HOUR=str(begins.hour),
        AGENTPIPE_SCHEDULE__MINUTE=str(begins.minute),
        AGENTPIPE_ALERTS__WEBHOOK=receiver.url,
    )
    readers = Readers(home.path / "dagster", folder)
    yield Day(Loop(home, served), receiver, readers, begins, production)
    readers.stop()
    served.stop()
