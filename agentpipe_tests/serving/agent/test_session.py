"""A whole agent at a simulated line: what it did is what is on record, once, whatever happens to it."""

from __future__ import annotations

import datetime as dt
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request

import pytest
from typer.testing import CliRunner

from agentpipe.cli.main import app
from agentpipe.environments.layout import ACTION_COUNT, ACTION_NAMES, OBSERVATION_SIZE
from agentpipe.errors import BundleError, InputError, LockHeldError
from agentpipe.feedback.intake import take
from agentpipe.feedback.rules import Rules
from agentpipe.feedback.schema import FeedbackShape
from agentpipe.feedback.store import days, decisions_of, quarantine_counts
from agentpipe.learning.succession.champion import ChampionStore
from agentpipe.serving.agent.incidents import read_incidents
from agentpipe.serving.agent.operator import tell_line
from agentpipe.serving.agent.remember import memory_folder, remember
from agentpipe.serving.agent.session import AgentOptions, Session, champion_bundle
from agentpipe.serving.agent.shadow import read_reports
from agentpipe.settings import load_settings
from agentpipe_tests.serving.agent.line_bundle import save_line_bundle
from agentpipe_tests.serving.agent.lines import running_line, wait_for
from agentpipe_tests.serving.agent.questions import LINE
from agentpipe_tests.serving.agent.test_memory import record

HEAVY = [
    *("torch", "pandas", "numba", "pyarrow", "scipy", "sklearn"),
    *("dagster", "tritonclient", "grpc", "redis", "prometheus_client"),
]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bundle")
    save_line_bundle(folder / "champion")
    save_line_bundle(folder / "candidate", package="b" * 64, power=3.0)
    return folder


def settings(home, **agent):
    section = {"metrics_port": 0, "probe_every": 0.2, **agent}
    return load_settings(home=home, agent=section)


class Working:
    """A session at work in a thread."""

    def __init__(self, url, bundle, home, **options):
        given = settings(home, **options.pop("agent", {}))
        self.said: list[str] = []
        self.session = Session(AgentOptions(url, bundle / "champion", **options), given, say=self.said.append)
        self.thread = threading.Thread(target=self.session.run, daemon=True)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.session.stop()
        self.thread.join(60)
        self.session.close()


def taken_in(home):
    """What the intake has of a home, by decision id: action, result and policy."""
    rules = Rules(FeedbackShape(OBSERVATION_SIZE, ACTION_COUNT), dt.datetime.now(dt.UTC))
    store = home / "feedback" / "store"
    take(home / "feedback" / "inbox", store, rules)
    assert quarantine_counts(store) == {}
    columns = ["decision_id", "action", "result", "policy_version"]
    rows = [row for table in decisions_of(store, days(store), columns) for row in table.to_pylist()]
    assert len({row["decision_id"] for row in rows}) == len(rows)
    return {row["decision_id"]: row for row in rows}


def done_by_agent(running):
    return {identifier: action for identifier, action, who in running.line.taken if who == "agent"}


def test_what_was_done_at_the_line_is_what_the_intake_gets(tmp_path, bundle):
    with running_line(2, seconds=30.0, orders=8) as running:
        tell_line(running.url, "takeover", "ann")
        with Working(running.url, bundle, tmp_path, shadow=bundle / "candidate") as agent:
            wait_for(agent.session.complete.is_set)
            tell_line(running.url, "release", "ann")
            running.wait()
            wait_for(lambda: not agent.session.runtime.presence.connected)
        assert agent.session.figures()["policy"] == "a" * 64
        done = done_by_agent(running)
        ended = {message["order_id"]: message for s in running.line.stations.values() for message in s.ended}
    rows = taken_in(tmp_path)
    of_ended = {name for name in done if name.rpartition("-")[0] in ended}
    assert set(rows) == of_ended, "an order that is still open is handed on when it is over, or after an hour"
    assert {name: row["action"] for name, row in rows.items()} == {name: done[name] for name in of_ended}
    assert {row["policy_version"] for row in rows.values()} == {"a" * 64}
    results = {name: ended[name.rpartition("-")[0]]["result"] for name in rows}
    assert {name: row["result"] for name, row in rows.items()} == results
    (report,) = read_reports(tmp_path / "agent" / "agent" / "shadow")
    assert report["rows"] + report["dropped"] >= len(of_ended)
    assert report["agreement"] == 1.0, "both take the allowed action with the highest number"
    assert report["kl_mean"] > 0


def test_what_memory_finds_changes_no_action(tmp_path, bundle):
    home = tmp_path / "with"
    record(home / "trajectories" / "sensor-1" / "k")
    remember([home / "trajectories" / "sensor-1" / "k"], memory_folder(home, LINE), LINE)
    taken = {}
    for name in ("with", "without"):
        with (
            running_line(seconds=30.0, orders=4) as running,
            Working(running.url, bundle, tmp_path / name, memory=name == "with") as agent,
        ):
            running.wait()
            wait_for(agent.session.complete.is_set)
        taken[name] = running.line.taken
    assert taken["with"] == taken["without"]
    assert len(taken["with"]) >= 8
    journal = (home / "agent" / "agent" / "journal" / "journal-00000001.log").read_text()
    assert '"k":"retrieved"' in journal


def test_figures_are_served_and_say_ready_and_complete_apart(tmp_path, bundle):
    with running_line(seconds=30.0, every=0.01) as running, Working(running.url, bundle, tmp_path) as agent:
        wait_for(agent.session.complete.is_set)
        wait_for(lambda: agent.session.runtime.counts.decisions > 3)
        url = f"http://127.0.0.1:{agent.session.metrics_port}/metrics"
        text = urllib.request.urlopen(url, timeout=30).read().decode()
    for name in ("ready", "complete", "takeover", "feedback_backlog"):
        assert f'agentpipe_agent_{name}{{agent="agent"}}' in text
    assert 'agentpipe_agent_complete{agent="agent"} 1.0' in text


def test_what_cannot_be_loaded_is_said_and_costs_no_decision(tmp_path, bundle):
    folder = memory_folder(tmp_path, LINE)
    folder.mkdir(parents=True)
    with (
        running_line(seconds=30.0, every=0.01) as running,
        socket.create_server(("127.0.0.1", 0)) as taken,
        Working(running.url, bundle, tmp_path, agent={"metrics_port": taken.getsockname()[1]}) as agent,
    ):
        wait_for(lambda: "incomplete: without metrics, memory" in agent.said)
        before = agent.session.runtime.counts.decisions
        wait_for(lambda: agent.session.runtime.counts.decisions > before + 3)
        assert not agent.session.complete.is_set()


def test_a_person_takes_over_and_hands_back_while_it_works(tmp_path, bundle):
    with running_line(seconds=30.0, every=0.01) as running, Working(running.url, bundle, tmp_path) as agent:
        runtime = agent.session.runtime
        wait_for(lambda: runtime.counts.decisions > 3)
        (name,) = tell_line(running.url, "takeover", "ann")["lines"]
        wait_for(lambda: runtime.taken_over == 1)
        before = len(done_by_agent(running))
        assert tell_line(running.url, "act", "ann", name, action=0)["ok"]
        assert len(done_by_agent(running)) == before
        tell_line(running.url, "release", "ann")
        wait_for(lambda: len(done_by_agent(running)) > before + 2)
        assert runtime.taken_over == 0


def test_interlocks_of_a_file_hold_at_the_line(tmp_path, bundle):
    limits = tmp_path / "limits.toml"
    limits.write_text('[[interlock]]\nname = "never reject"\nactions = ["reject_alarm", "declare_false_alarm"]\n')
    with (
        running_line(seconds=30.0, orders=1) as running,
        Working(running.url, bundle, tmp_path / "home", interlocks=limits) as agent,
    ):
        running.wait()
    names = {ACTION_NAMES[action] for action in done_by_agent(running).values()}
    assert names.isdisjoint({"reject_alarm", "declare_false_alarm"})
    assert names
    assert agent.session.runtime.counts.refused == 0, "it was not even offered"


# ------------------------------------------------------------------------------------------------ starting


def test_two_agents_of_one_name_cannot_run(tmp_path, bundle):
    options = AgentOptions("tcp://127.0.0.1:9", bundle / "champion")
    with Session(options, settings(tmp_path)), pytest.raises(LockHeldError, match="called agent runs already"):
        Session(options, settings(tmp_path))
    Session(options, settings(tmp_path)).close()


@pytest.mark.parametrize("name", ["", "A", "../x", "a b", "x" * 41])
def test_a_name_that_is_no_folder_is_refused(tmp_path, bundle, name):
    with pytest.raises(InputError, match="no name of an agent"):
        Session(AgentOptions("tcp://127.0.0.1:9", bundle / "champion", name), settings(tmp_path))


def test_the_champions_bundle_is_found_by_its_package(tmp_path, bundle):
    with pytest.raises(BundleError, match="no champion yet"):
        champion_bundle(tmp_path)
    ChampionStore(tmp_path / "champion").promote("a" * 64, "package", expected=None, reason="the first")
    with pytest.raises(BundleError, match="no bundle of the champion"):
        champion_bundle(tmp_path)
    save_line_bundle(tmp_path / "bundles" / "bundle-1", package="c" * 64)
    save_line_bundle(tmp_path / "bundles" / "bundle-2")
    assert champion_bundle(tmp_path) == tmp_path / "bundles" / "bundle-2"


def test_a_stream_needs_redis(tmp_path, bundle):
    with pytest.raises(InputError, match="without Redis"):
        Session(AgentOptions("tcp://127.0.0.1:9", bundle / "champion", feedback="stream"), settings(tmp_path))


def test_what_the_first_answer_does_not_need_is_not_imported_before_it(tmp_path, bundle):
    code = f"""
import sys
from pathlib import Path
from agentpipe.cli.main import app
from agentpipe.settings import load_settings
from agentpipe.serving.agent.session import AgentOptions, Session
options = AgentOptions("tcp://127.0.0.1:9", Path({str(bundle / "champion")!r}))
with Session(options, load_settings(home=Path({str(tmp_path)!r}))) as session:
    print(*[name for name in {HEAVY!r} if name in sys.modules])
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == []


# --------------------------------------------------------------------------------------- the command line


def test_trouble_in_handing_on_is_said_degrades_and_is_an_incident_until_it_ends(tmp_path, bundle):
    inbox = tmp_path / "feedback" / "inbox"
    inbox.parent.mkdir()
    inbox.touch()  # a file lies where the inbox belongs
    with running_line(2, seconds=30.0, orders=4) as running, Working(running.url, bundle, tmp_path) as agent:
        session = agent.session
        wait_for(lambda: "feedback" in session.figures()["degraded"])
        running.wait()
        wait_for(lambda: not session.runtime.presence.connected)
        assert session.figures()["backlog"] >= len(done_by_agent(running)) > 0
        inbox.unlink()
        session.shipper.wake()
        wait_for(lambda: "feedback" not in session.figures()["degraded"])
    feedback = [text for text in agent.said if text.startswith("feedback is ")]
    assert feedback[0].startswith("feedback is lost: ")
    assert feedback[1] == "feedback is back: it works again"
    assert "feedback" in {each.part for each in read_incidents(tmp_path / "agent" / "agent" / "incidents")}


def command(*arguments, home):
    environment = {**os.environ, "AGENTPIPE_AGENT__METRICS_PORT": "0"}
    return subprocess.Popen(
        [sys.executable, "-m", "agentpipe", "agent", *arguments, "--home", str(home), "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def test_killed_at_any_instant_it_goes_on_and_every_decision_is_on_record_once(tmp_path, bundle):
    with running_line(2, seconds=5.0, every=0.004) as running:
        killed = 0
        for number in range(3):
            process = command("--line", running.url, "--bundle", str(bundle / "champion"), home=tmp_path)
            before = len(running.line.taken)
            wait_for(lambda before=before: len(running.line.taken) > before + 20)
            if number < 2:
                process.send_signal(signal.SIGKILL)
                killed += 1
            else:
                process.send_signal(signal.SIGTERM)
            output, errors = process.communicate(timeout=300)
        assert process.returncode == 130, errors
        done = done_by_agent(running)
        line = running.line
        open_orders = {station.order_id for station in line.stations.values()}
    assert killed == 2
    events = [json.loads(text) for text in output.splitlines()]
    assert [event["event"] for event in events if event["event"] != "said"] == ["ready", "complete", "ended"]
    # what is still open is handed on without a result when it is old enough: that is now
    with Session(AgentOptions("tcp://127.0.0.1:9", bundle / "champion"), settings(tmp_path)) as session:
        session.shipper._after = dt.timedelta(0)
        session.shipper.ship()
    rows = taken_in(tmp_path)
    assert {name: rows[name]["action"] for name in done} == done, "nothing lost, nothing otherwise"
    assert {name.rpartition("-")[0] for name in set(rows) - set(done)} <= open_orders
    assert len(set(rows) - set(done)) <= 2, "at most the question in hand of each station"


def test_the_command_says_what_is_wrong_as_json(tmp_path, bundle):
    runner = CliRunner()

    def refused(*arguments):
        result = runner.invoke(app, ["agent", *arguments, "--home", str(tmp_path), "--json"])
        assert result.exit_code == 1
        return json.loads(result.stdout)["error"]["type"]

    assert refused() == "InputError"
    assert refused("--line", "tcp://127.0.0.1:9") == "BundleError"
    assert refused("--line", "nowhere", "--bundle", str(bundle / "champion")) == "LineError"
    assert refused("--line", "x", "--champion", "--bundle", str(bundle)) == "InputError"
    limits = tmp_path / "limits.toml"
    limits.write_text("[[interlock]]\n")
    given = ("--line", "tcp://127.0.0.1:9", "--bundle", str(bundle / "champion"), "--interlocks", str(limits))
    assert refused(*given) == "InterlockError"


def test_memory_is_made_from_the_command_line(tmp_path, bundle):
    runner = CliRunner()
    arguments = ["agent", "remember", "--bundle", str(bundle / "champion"), "--home", str(tmp_path), "--json"]
    assert runner.invoke(app, arguments).exit_code == 1
    record(tmp_path / "trajectories" / "sensor-1" / "k")
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0
    assert json.loads(result.stdout)["rows"] > 0


def test_a_line_of_the_command_line_ends_after_its_orders(tmp_path, bundle):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    record = tmp_path / "taken.jsonl"
    options = ["--port", str(port), "--orders", "2", "--seconds", "30", "--record", str(record), "--json"]
    with Working(f"tcp://127.0.0.1:{port}", bundle, tmp_path):  # waits for it
        result = CliRunner().invoke(app, ["line", *options])
    assert result.exit_code == 0
    ready, ended = (json.loads(text) for text in result.stdout.splitlines())
    assert (ready["event"], ready["url"]) == ("ready", f"tcp://127.0.0.1:{port}")
    assert (ended["event"], ended["orders"], ended["missed"]) == ("ended", 2, 0)
    assert len(record.read_text().splitlines()) == ended["answered"]
