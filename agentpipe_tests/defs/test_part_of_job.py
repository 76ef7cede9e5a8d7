"""What of a stage is left after an interruption runs by itself."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentpipe.definitions import defs
from agentpipe.defs.jobs import BOUND, STAGES, Stage
from agentpipe.defs.main_job import part_of_job


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_a_part_of_a_stage_takes_along_no_check_of_another_stage(stage: Stage) -> None:
    job = defs.resolve_job_def(stage.name)
    for start in range(len(stage.assets)):
        due = list(itertools.islice(stage.assets, start, None))
        nodes = {node.name for node in part_of_job(job, stage, due).nodes}
        bound = {f"environment_catalog_{BOUND.name}"} if stage.bound else set()
        assert nodes == set(due) | bound


def test_an_interruption_between_line_and_catalogue_made_the_home_unusable(tmp_path: Path) -> None:
    code = (
        "import sys, json\n"
        "from agentpipe.definitions import defs\n"
        "from agentpipe.defs import main_job\n"
        "main_job.STAGES = main_job.STAGES[:1]\n"
        "outcome = main_job.run_main_job(defs, {'home': sys.argv[1]})\n"
        "print(json.dumps([outcome.executed, outcome.reused]))\n"
    )

    def run() -> list[list[str]]:
        environment = {**os.environ, "AGENTPIPE_PROFILE": "demo"}
        command = [sys.executable, "-c", code, str(tmp_path)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        answer: list[list[str]] = json.loads(done.stdout.splitlines()[-1])
        return answer

    assert run() == [["line_profile", "environment_catalog"], []]
    (tmp_path / "references" / "environment_catalog" / "reference.json").unlink()
    assert run() == [["environment_catalog"], ["line_profile"]]
    assert run() == [[], ["line_profile", "environment_catalog"]]
