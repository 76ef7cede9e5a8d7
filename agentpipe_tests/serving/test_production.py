"""``agentpipe bundle serve``: what it refuses, and that a server which ends by itself is an error."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentpipe.cli.main import app
from agentpipe.errors import ServiceError
from agentpipe.learning.succession.promotion import champion_stores
from agentpipe.serving.production import POLL_SECONDS, find_production
from agentpipe.serving.repository import ServingRepository
from agentpipe.serving.server_check import FAILED, ServerCheck
from agentpipe.serving.triton_install import TritonInstallation
from agentpipe.settings import load_settings
from agentpipe_tests.bundles import save_bundle
from agentpipe_tests.redis_server import free_port

SERVER = """\
#!{python}
import http.server, sys
class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        print("asked for", self.path, *sys.argv, flush=True)
    def log_message(self, *arguments):
        pass
port = int(next(each for each in sys.argv if each.startswith("--http-port=")).partition("=")[2])
http.server.HTTPServer(("127.0.0.1", port), Ready).handle_request()
print("error: the disk is gone", flush=True)
sys.exit(3)
"""


@pytest.fixture
def home(tmp_path):
    """A home that serves a bundle."""
    save_bundle(tmp_path / "bundle", 0)
    repository = ServingRepository(tmp_path / "home" / "serving")
    with repository.changing():
        repository.publish(tmp_path / "bundle", who="ann", reason="a test")
    return tmp_path / "home"


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """In place of the installed Triton, a server that says that it is ready once, and ends with 3."""
    installation = TritonInstallation(tmp_path / "server", tmp_path / "environment")
    installation.binary.parent.mkdir(parents=True)
    installation.binary.write_text(SERVER.format(python=sys.executable))
    installation.binary.chmod(0o755)
    monkeypatch.setattr("agentpipe.serving.server.stub_environment", lambda _: dict(os.environ))
    monkeypatch.setattr("agentpipe.serving.production.find_triton", lambda: installation)


def refused(home, *options):
    """The error with which the command ends."""
    result = CliRunner().invoke(app, ["bundle", "serve", *options, "--home", str(home), "--json"])
    assert result.exit_code == 1
    return json.loads(result.stdout)["error"]


def test_before_anything_is_served_it_says_what_to_do(tmp_path, installed):
    error = refused(tmp_path)
    assert (error["type"], error["message"]) == ("ServingError", "nothing is served yet: there is no champion")
    assert error["remedy"].startswith("agentpipe run makes one")
    champion_stores(tmp_path)[0].promote("digest", "package", expected=None, reason="the first", figures={})
    error = refused(tmp_path)
    assert error["message"] == "nothing is served yet"
    assert error["remedy"] == "agentpipe bundle publish serves the champion's bundle"


def test_what_is_not_what_was_published_is_not_served(home, installed):
    Path(home / "serving" / "models" / "policy" / "1" / "model.onnx").write_bytes(b"x")
    error = refused(home)
    assert (error["type"], "holds something else" in error["message"]) == ("BundleError", True)


def test_without_an_installed_triton_it_says_how_to_install_one(home, tmp_path, monkeypatch):
    monkeypatch.setenv("AGENTPIPE_TRITON_HOME", str(tmp_path / "nothing"))
    error = refused(home)
    assert (error["type"], error["remedy"]) == ("NoServerError", "agentpipe bundle install-triton")


@pytest.mark.parametrize("option", ["--http-port", "--grpc-port"])
def test_a_port_in_use_is_refused(home, installed, option):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        other = "--grpc-port" if option == "--http-port" else "--http-port"
        error = refused(home, option, str(port), other, "0")
    assert (error["type"], error["where"]) == ("ServiceError", {"port": port})


def test_one_port_for_both_protocols_is_refused(home, installed):
    port = str(free_port())
    assert refused(home, "--http-port", port, "--grpc-port", port)["message"] == f"port {port} is wanted twice"


def test_a_server_that_ends_by_itself_is_an_error_with_the_end_of_its_log(home, installed):
    with find_production(load_settings(home=home)).start() as server:
        with pytest.raises(ServiceError, match="Triton ended with 3: error: the disk is gone"):
            server.wait()
        told = server.log_path.read_text()
    assert f"--model-repository={home.resolve() / 'serving' / 'models'} " in told
    assert f"--model-control-mode=poll --repository-poll-secs={POLL_SECONDS} --http-address=127.0.0.1 " in told


def test_a_check_that_did_not_pass_is_one_json_document(tmp_path, monkeypatch):
    monkeypatch.setattr("agentpipe.serving.places.find_place", lambda _: "a place")
    failed = ServerCheck(FAILED, "digest", "it does not load")
    monkeypatch.setattr("agentpipe.serving.server_check.check_in_server", lambda *_, **__: failed)
    result = CliRunner().invoke(app, ["bundle", "check", str(tmp_path), "--home", str(tmp_path), "--json"])
    assert result.exit_code == 1
    assert json.loads(result.stdout)["check"]["reason"] == "it does not load"
