"""The policy of an order is the one with which it began."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agentpipe.errors import ServingError
from agentpipe.serving.agent import generations as module
from agentpipe.serving.agent.deciders import read_policy
from agentpipe.serving.agent.generations import Generations
from agentpipe.serving.agent.types import OrderEnded
from agentpipe_tests.bundles import save_bundle
from agentpipe_tests.serving.agent.frames import FakeDecider, frame


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bundle") / "bundle"
    save_bundle(folder, 0)
    return read_policy(folder)


def policy(version, *names):
    return [FakeDecider(name, version=version) for name in names or ("triton", "local")]


def asked(generations, line, order, rung=0):
    """Who answers: policy and rung."""
    answer = generations.rungs[rung].decide(replace(frame(order=order), line_id=line), 1.0)
    return answer.policy_version, answer.decided_by


def test_an_open_order_goes_on_with_its_policy_and_the_next_one_gets_the_new(files):
    first, second = policy("first"), policy("second")
    generations = Generations(files, first)
    assert asked(generations, "line-1", "o1") == ("first", "triton")
    generations.install(replace(files, version="2"), second)
    assert generations.newest.files.version == generations.rungs[0].policy_version == "2"
    assert asked(generations, "line-1", "o1") == ("first", "local"), "in this process: the server has the new one"
    assert asked(generations, "line-1", "o1", rung=1) == ("first", "local")
    assert asked(generations, "line-2", "o7") == ("second", "triton")
    assert (first[0].closed, first[1].closed, generations.count) == (True, False, 2)
    assert asked(generations, "line-1", "o2") == ("second", "triton")
    assert (first[1].closed, generations.count) == (True, 1)


def test_a_policy_is_let_go_when_its_last_order_has_ended(files):
    first, second, third = policy("first"), policy("second"), policy("third")
    generations = Generations(files, first)
    asked(generations, "line-1", "o1")
    generations.install(files, second)
    asked(generations, "line-2", "p1")
    generations.install(files, third)
    assert asked(generations, "line-1", "o1")[0] == "first"
    assert asked(generations, "line-2", "p1")[0] == "second"
    generations.ended(OrderEnded("line-1", "another", "done"))
    assert generations.count == 3
    generations.ended(OrderEnded("line-1", "o1", "done"))
    assert (first[1].closed, second[1].closed, generations.count) == (True, False, 2)
    assert asked(generations, "line-1", "o2")[0] == "third"


def test_a_policy_that_no_order_needs_is_let_go_at_once(files):
    first = policy("first")
    generations = Generations(files, first)
    generations.install(files, policy("second"))
    assert generations.count == 1
    assert all(decider.closed for decider in first)


def test_lines_that_are_remembered_are_bounded(files, monkeypatch):
    monkeypatch.setattr(module, "LINES", 2)
    generations = Generations(files, policy("first"))
    asked(generations, "line-1", "o1")
    generations.install(files, policy("second"))
    for number in (2, 3):
        asked(generations, f"line-{number}", "o1")
    assert generations.count == 1
    assert asked(generations, "line-1", "o1")[0] == "second"


def test_probes_and_the_end_are_the_newest_ones(files):
    first, second = policy("first"), policy("second")
    generations = Generations(files, first)
    generations.install(files, second)
    second[0].probe_error = ServingError("away")
    with pytest.raises(ServingError, match="away"):
        generations.rungs[0].probe(1.0)
    for rung in generations.rungs:
        rung.close()
    assert all(decider.closed for decider in second)


def test_other_rungs_are_refused(files):
    with pytest.raises(ServingError, match="other rungs"):
        Generations(files, policy("first")).install(files, policy("second", "local"))
