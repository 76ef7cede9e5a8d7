"""What ``agentpipe line`` cannot use is said at the start; however it ends, it ends in good order."""

from __future__ import annotations

import asyncio
import json
import math
import signal
import socket
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from agentpipe.cli.main import app
from agentpipe.environments.catalog import load_catalog
from agentpipe.errors import HomeError, InputError
from agentpipe.serving.agent.messages import encode
from agentpipe.serving.agent.simulated_line import LineOptions, SimulatedLine


@pytest.mark.parametrize("field", ["seconds", "every"])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, -1.0, 1e9])
def test_times_that_are_none_are_refused(field, value):
    with pytest.raises(InputError, match=f"{field} is "):
        LineOptions(**{field: value})
    assert CliRunner().invoke(app, ["line", f"--{field}", str(value)]).exit_code in (1, 2)


@pytest.mark.parametrize("place", ["missing/x", "file/x", "folder"])
def test_a_record_that_cannot_be_written_is_refused_at_the_start(tmp_path, place):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    line = SimulatedLine(load_catalog().environments("holdout", "sensor-1")[:1], LineOptions(record=tmp_path / place))
    with pytest.raises((HomeError, InputError), match=r"cannot (be )?written?|cannot write|something else lies"):
        asyncio.run(line.serve())


def test_a_line_that_is_terminated_with_an_agent_connected_ends_in_good_order():
    command = [sys.executable, "-m", "agentpipe", "line", "--json", "--cell", "sensor-1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        port = int(json.loads(process.stdout.readline())["url"].rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as agent:
            agent.sendall(encode({"type": "hello", "protocol": 1, "role": "agent", "name": "x"}))
            assert agent.recv(16)
            process.send_signal(signal.SIGTERM)
            output, errors = process.communicate(timeout=300)
    assert process.returncode == 130
    assert '"event": "ended"' in output
    assert "Traceback" not in errors
    assert "asyncio" not in errors
