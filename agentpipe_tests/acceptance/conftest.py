"""A home in which the main job has run, in the smallest size that goes through every asset."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

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


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Home, dict[str, Any]]:
    """The home and the document of its first run; tests leave its candidate alone."""
    home = Home(tmp_path_factory.mktemp("finished") / "home")
    code, document, log = home.call("run")
    assert code == 0, log
    return home, document
