"""What an agent tells goes to somebody who may go away: the work goes on, and the end is a good one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import sys
from agentpipe.cli.agent import _event, _teller
from agentpipe.serving.agent.session import FOLLOWED
as_json = sys.argv[1] == "json"
sys.stdin.readline()  # until the reader has gone
for _ in range(3):
    _event(as_json, "ready", "ready")
    _teller(as_json)(f"{FOLLOWED} x")
    _teller(as_json)("x" * 20_000)
"""


@pytest.mark.parametrize("form", ["json", "text"])
def test_events_without_a_reader_do_not_end_the_work(form):
    reading, writing = os.pipe()
    command = [sys.executable, "-c", PROGRAM, form]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=writing, stderr=writing)
    os.close(writing)
    os.close(reading)
    process.communicate(b"gone\n", timeout=300)
    assert process.returncode == 0


def test_events_on_a_full_disk_do_not_end_the_work():
    program = PROGRAM.replace("sys.stdin.readline()", "") + "import os; os._exit(0)"
    with open("/dev/full", "w") as full:  # noqa: PTH123 - a device
        done = subprocess.run([sys.executable, "-c", program, "json"], stdout=full, stderr=subprocess.PIPE, timeout=300)
    assert (done.returncode, done.stderr) == (0, b"")
