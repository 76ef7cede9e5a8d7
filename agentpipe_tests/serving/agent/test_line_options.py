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

from agentpipe.cli.agent import _line_end
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


@pytest.mark.parametrize("as_json", [False, True])
def test_a_line_that_ctrl_c_ends_says_what_it_played_and_not_that_it_goes_on(as_json):
    command = [sys.executable, "-m", "agentpipe", "line", "--cell", "sensor-1", *(["--json"] if as_json else [])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        ready = (process.stdout if as_json else process.stderr).readline()
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=300)
    assert process.returncode == 130
    if as_json:
        ended = json.loads(output)
        assert (ended["event"], ended["interrupted"], ended["orders"]) == ("ended", True, 0)
        assert errors == ""
    else:
        assert ready.endswith("(1 station; Ctrl-C ends it)\n")
        assert errors == "0 orders, 0 well, 0 answers, 0 deadlines missed\n"


def test_one_of_a_kind_is_told_in_the_singular():
    figures = {"orders": 1, "successes": 1, "answered": 1, "missed": 1}
    assert _line_end(figures) == "1 order, 1 well, 1 answer, 1 deadline missed"
    assert _line_end(dict.fromkeys(figures, 1200)) == "1,200 orders, 1,200 well, 1,200 answers, 1,200 deadlines missed"
