"""The server that the tests start themselves."""

import subprocess
import sys
import time

import pytest
import redis

from agentpipe_tests.redis_server import redis_server

pytestmark = pytest.mark.redis


@pytest.mark.parametrize("tcp", [False, True])
def test_restarted_server_is_empty_and_has_the_same_url(tcp):
    with redis_server(password="secret", tcp=tcp) as server:
        client = redis.Redis.from_url(server.url)
        client.set("a", "1")
        assert client.get("a") == b"1"
        server.restart()
        assert client.get("a") is None
        server.kill()
        with pytest.raises(redis.ConnectionError):
            client.get("a")
        client.close()


def test_server_dies_with_the_process_that_started_it():
    code = (
        "import os, signal\n"
        "from agentpipe_tests.redis_server import redis_server\n"
        "with redis_server(tcp=True) as server:\n"
        "    print(server.url, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert ended.returncode == -9
    client = redis.Redis.from_url(ended.stdout.strip())
    deadline = time.monotonic() + 10
    while answers(client) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not answers(client)


def answers(client):
    try:
        return client.ping()
    except redis.ConnectionError:
        return False
