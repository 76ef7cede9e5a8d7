"""A running agent follows the champion: between two orders, after it has looked, and never to a damaged bundle."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections import defaultdict

import pytest

from agentpipe.errors import ServiceError
from agentpipe.learning.succession.champion import ChampionStore
from agentpipe.serving.agent import following
from agentpipe.serving.agent.deciders import read_policy
from agentpipe.serving.agent.following import Follower
from agentpipe.serving.agent.generations import Generations
from agentpipe.serving.agent.session import AgentOptions, Session
from agentpipe.serving.agent.shadow import read_reports
from agentpipe.settings import load_settings
from agentpipe.storage import replace_directory
from agentpipe_tests.bundles import save_bundle
from agentpipe_tests.serving.agent.frames import FakeDecider
from agentpipe_tests.serving.agent.line_bundle import save_line_bundle
from agentpipe_tests.serving.agent.lines import running_line, wait_for

A, B = "a" * 64, "b" * 64


class Home:
    """A home with the bundles of two policies, the first of which is the champion."""

    def __init__(self, folder):
        self.root = folder
        self.bundles = {A: folder / "bundles" / "bundle-1", B: folder / "bundles" / "bundle-2"}
        save_line_bundle(self.bundles[A], package=A)
        save_line_bundle(self.bundles[B], package=B, power=3.0)
        self.store = ChampionStore(folder / "champion")
        self.promote(A, None)

    def promote(self, digest, expected):
        figures = {"bundle": str(self.bundles[digest].relative_to(self.root))}
        self.store.promote(digest, "package", expected=expected, reason="a test", figures=figures)


@pytest.fixture
def home(tmp_path):
    return Home(tmp_path)


class Working:
    """A session of the champion at a line, in a thread."""

    def __init__(self, url, home, **options):
        agent = {"metrics_port": 0, "probe_every": 0.05, "follow_every": 0.02}
        self.said = []
        options = AgentOptions(url, **{"memory": False, **options})
        self.session = Session(options, load_settings(home=home.root, agent=agent), say=self.said.append)
        self.policies = defaultdict(dict)
        self.session._onlookers.append(self)
        self.thread = threading.Thread(target=self.session.run, daemon=True)
        self.thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.session.stop()
        self.thread.join(60)
        self.session.close()

    def decided(self, frame, answer, seconds):
        """As an onlooker: the policies of an order's decisions."""
        self.policies[frame.line_id].setdefault(frame.order_id, []).append(answer.policy_version)

    def ended(self, message):
        pass

    def newest(self):
        """The policy of the last decision of each station."""
        return {next(reversed(orders.values()))[-1] for orders in self.policies.values() if orders}

    def work(self, count):
        """Until so many decisions more were sent."""
        before = self.session.runtime.counts.decisions
        wait_for(lambda: self.session.runtime.counts.decisions >= before + count)

    def tells(self, start):
        wait_for(lambda: any(text.startswith(start) for text in self.said))

    def figures(self):
        return {
            (sample.name, sample.labels.get("policy")): sample.value
            for family in self.session.healing.metrics.collect()
            for sample in family.samples
        }


def test_another_champion_is_followed_and_no_order_has_two_policies(home):
    with running_line(3, seconds=30.0, every=0.002) as running, Working(running.url, home) as agent:
        wait_for(lambda: len(agent.policies) == 3)
        present = A
        for other in (B, A, B):
            home.promote(other, present)
            wait_for(lambda other=other: agent.newest() == {other})
            present = other
        figures = agent.figures()
        wait_for(lambda: agent.session.generations.count == 1)
    assert agent.said.count(f"the policy changed: {B[:16]} in place of {A[:16]}: orders that begin from now on") == 2
    assert len(agent.policies) == 3
    for orders in agent.policies.values():
        assert all(len(set(versions)) == 1 for versions in orders.values())
        of_orders = [versions[0] for versions in orders.values()]
        assert [version for version, _ in itertools.groupby(of_orders)] == [A, B, A, B]
    assert figures["agentpipe_agent_policy", B] == 1.0
    assert figures["agentpipe_agent_policy_changes_total", None] == 3.0
    assert agent.session.figures()["policy"] == B
    assert agent.session.runtime.counts.fallbacks == 0


def test_a_damaged_bundle_is_refused_and_said_until_it_is_mended(home):
    graph = home.bundles[B] / "policy" / "1" / "model.onnx"
    content = graph.read_bytes()
    graph.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with running_line(seconds=30.0, every=0.002) as running, Working(running.url, home) as agent:
        home.promote(B, A)
        agent.tells("the policy did not change: content is not what SHA256SUMS says")
        wait_for(lambda: "champion" in agent.session.healing.degraded())
        agent.work(6)
        assert agent.newest() == {A}
        assert agent.figures()["agentpipe_agent_policy_refusals_total", None] == 1.0
        (refusal,) = [text for text in agent.said if text.startswith("the policy did not change")]
        assert refusal.endswith(f"; {A[:16]} goes on")
        graph.write_bytes(content)
        wait_for(lambda: agent.session.policy.version == B)
        wait_for(lambda: "champion" not in agent.session.healing.degraded())
        agent.work(6)


def test_other_content_of_the_folder_that_was_named_is_followed(home, tmp_path):
    named = tmp_path / "named"
    save_line_bundle(named, package=A)
    with running_line(seconds=30.0, every=0.002) as running, Working(running.url, home, bundle=named) as agent:
        home.promote(B, A)  # not what it follows
        agent.work(6)
        assert agent.session.policy.version == A
        save_line_bundle(tmp_path / "new", package=B, power=3.0)
        replace_directory(tmp_path / "new", named)
        wait_for(lambda: agent.session.policy.version == B)
        agent.work(6)


def test_the_shadow_is_compared_with_the_policy_of_now_in_a_report_of_its_own(home, tmp_path):
    save_line_bundle(tmp_path / "candidate", package="c" * 64, power=2.0)
    with (
        running_line(seconds=30.0, every=0.002) as running,
        Working(running.url, home, shadow=tmp_path / "candidate") as agent,
    ):
        wait_for(agent.session.complete.is_set)
        agent.work(6)
        home.promote(B, A)
        wait_for(lambda: agent.session.policy.version == B)
        agent.work(6)
        wait_for(lambda: agent.session._shadow is not None)
    reports = read_reports(home.root / "agent" / "agent" / "shadow")
    assert [report["champion"] for report in reports] == [A, B]
    assert all(report["rows"] > 0 for report in reports)


# ------------------------------------------------------------------------------------------ the follower alone


def follow(tmp_path, servers=(), up=lambda _name: True):
    """A follower of a small bundle and what it tells; ``servers`` are the new policy's."""
    save_bundle(tmp_path / "first", 0)
    files = read_policy(tmp_path / "first")
    generations = Generations(files, [*(FakeDecider(s.name) for s in servers), FakeDecider("local")])
    told = []
    follower = Follower(
        generations,
        lambda: tmp_path / "now",
        lambda _files: [*servers, FakeDecider("local")],
        up=up,
        every=60.0,
        installed=lambda before, after: told.append((before.version, after.version)),
        refused=told.append,
    )
    return follower, generations, told


def test_a_bundle_of_another_line_is_refused(tmp_path):
    follower, generations, told = follow(tmp_path)
    save_line_bundle(tmp_path / "now")
    assert [follower.look(), follower.look()] == [False, False]
    assert told == ["the new bundle is of another line"]
    assert generations.newest.files.path == tmp_path / "first"


def test_nothing_to_find_is_said_once_and_forgotten_when_it_is_there(tmp_path):
    follower, _, told = follow(tmp_path)
    assert [follower.look(), follower.look()] == [False, False]
    assert len(told) == 1
    with pytest.raises(Exception, match=r"not a directory"):
        follower.probe(1.0)
    save_bundle(tmp_path / "now", 0)
    assert not follower.look(), "the same policy, at another place"
    follower.probe(1.0)


def other_policy(tmp_path):
    save_bundle(tmp_path / "now", 1)


def test_a_server_that_answers_now_is_waited_for_until_it_has_the_new_policy(tmp_path, monkeypatch):
    server = FakeDecider("triton")
    server.probe_error = ServiceError("not loaded yet")
    follower, generations, told = follow(tmp_path, [server])
    other_policy(tmp_path)
    monkeypatch.setattr(following, "SERVER_SECONDS", 60.0)
    looking = threading.Thread(target=follower.look, daemon=True)
    looking.start()
    wait_for(lambda: server.probed >= 2)
    assert not told
    server.probe_error = None
    looking.join(30)
    assert len(told) == 1
    assert generations.newest.deciders[0] is server


def test_a_server_that_never_gets_it_delays_but_does_not_prevent_it(tmp_path, monkeypatch):
    monkeypatch.setattr(following, "SERVER_SECONDS", 0.0)
    server = FakeDecider("triton")
    server.probe_error = ServiceError("not loaded yet")
    follower, _, told = follow(tmp_path, [server])
    other_policy(tmp_path)
    assert follower.look()
    assert len(told) == 1
    assert not server.closed


def test_the_command_says_it_as_an_event(home):
    with running_line(seconds=30.0, every=0.002) as running:
        command = [sys.executable, "-m", "agentpipe", "agent", "--line", running.url, "--no-memory", "--json"]
        given = {"AGENTPIPE_AGENT__METRICS_PORT": "0", "AGENTPIPE_AGENT__FOLLOW_EVERY": "0.05"}
        process = subprocess.Popen(
            [*command, "--home", str(home.root)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **given},
        )
        assert process.stdout is not None
        try:
            assert json.loads(process.stdout.readline())["event"] == "ready"
            home.promote(B, A)
            events = []
            while not events or events[-1]["event"] != "policy":
                events.append(json.loads(process.stdout.readline()))
            assert events[-1]["said"].startswith(f"the policy changed: {B[:16]} in place of {A[:16]}")
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=300)
