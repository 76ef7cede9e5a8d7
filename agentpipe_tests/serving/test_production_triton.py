"""``agentpipe bundle serve`` with a real Triton: it answers what the documents ask it, until Ctrl-C."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agentpipe.errors import ServiceError
from agentpipe.serving.http_api import HttpServer
from agentpipe.serving.repository import ServingRepository
from agentpipe.serving.server import install_triton

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "serving.md"
pytestmark = [pytest.mark.triton, pytest.mark.slow]


@pytest.fixture
def home(built, tmp_path):
    """A home that serves the built bundle."""
    try:
        install_triton()
    except ServiceError as error:
        pytest.skip(f"no Triton here: {error}")
    repository = ServingRepository(tmp_path / "serving")
    with repository.changing():
        repository.publish(built.path, who="ann", reason="a test")
    return tmp_path


def read_document(stream):
    """The first JSON document of a stream, as soon as it is whole."""
    text = ""
    while not text.endswith("}\n"):
        line = stream.readline()
        assert line, text
        text += line
    return json.loads(text)


def test_what_production_serves_is_asked_as_the_page_says_and_ctrl_c_ends_the_server(home):
    command = [sys.executable, "-m", "agentpipe", "bundle", "serve", "--http-port", "0", "--grpc-port", "0"]
    command += ["--home", str(home), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            ready = read_document(process.stdout)
            assert (ready["model"], ready["version"]) == ("policy", 1)
            (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
            assert '"127.0.0.1:8001"' in example
            found: dict[str, object] = {}
            exec(example.replace("127.0.0.1:8001", ready["grpc"]), found)
            answer = found["answer"]
            assert answer.action.shape == (4,)
            assert answer.probabilities.shape == (4, 46)
            tried = subprocess.run(shlex.split(ready["try"]), capture_output=True, text=True, check=True)
            assert re.fullmatch(r"\[\d+\]\n", tried.stdout)
        finally:
            process.send_signal(signal.SIGINT)
            errors = process.communicate(timeout=60)[1]
    assert process.returncode == 0
    assert errors.splitlines() == ["Starting Triton …", "Triton has ended."]
    with pytest.raises(ServiceError):
        HttpServer(ready["http"].removeprefix("http://")).metadata()
