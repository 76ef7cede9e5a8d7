"""Self-healing as a whole: what is lost is told in answers, incidents and figures; answers never cease."""

from __future__ import annotations

import numpy as np
import pytest

from agentpipe.errors import ServiceError
from agentpipe.serving.agent.deciders import read_policy
from agentpipe.serving.agent.healing import Healing, declared_rungs
from agentpipe.serving.agent.incidents import read_incidents
from agentpipe.settings import load_settings
from agentpipe_tests.bundles import save_bundle
from agentpipe_tests.serving.agent.frames import FakeDecider, frame
from agentpipe_tests.serving.agent.test_sensors import LINE, NAME, Plant
from agentpipe_tests.serving.agent.waiting import until


@pytest.fixture
def deciders():
    return [FakeDecider("triton"), FakeDecider("local"), FakeDecider("rules")]


def heal(deciders, folder, told=None, **agent):
    settings = load_settings(agent={"probe_every": 0.01, **agent})
    return Healing(deciders, LINE, settings, folder, "line-1", on_change=None if told is None else told.append)


def test_the_declared_ladder_is_every_triton_then_this_process_then_rules(tmp_path):
    save_bundle(tmp_path / "bundle", 0)
    rungs = declared_rungs(read_policy(tmp_path / "bundle"), ["127.0.0.1:1", "127.0.0.1:2"])
    assert [rung.name for rung in rungs] == ["triton", "triton-2", "local", "rules"]
    assert [rung.url for rung in rungs[:2]] == ["127.0.0.1:1", "127.0.0.1:2"]


def test_a_lost_server_is_told_in_notes_incidents_and_figures(deciders, tmp_path):
    with heal(deciders, tmp_path) as healing:
        until(lambda: healing.ladder.level.index == 0)
        deciders[0].error = deciders[0].probe_error = ServiceError("away")
        until(lambda: healing.ladder.level.name == "local")
        assert healing.decide(frame(seconds=20.0)).decided_by == "local"
        assert healing.degraded() == {"triton": "away"}
        assert healing.incidents.open_count == 1
        figures = {family.name: family for family in healing.metrics.collect()}
        assert figures["agentpipe_agent_level"].samples[0].value == 1.0
        assert figures["agentpipe_agent_incidents_open"].samples[0].value == 1.0
        deciders[0].error = deciders[0].probe_error = None
        until(lambda: healing.incidents.open_count == 0)
        assert healing.ladder.level.name == "triton"
    assert [(each.part, each.status, each.decided) for each in read_incidents(tmp_path / "incidents")] == [
        ("triton", "closed", {"local": 1})
    ]
    assert all(decider.closed for decider in deciders)


def test_a_frozen_sensor_is_told_in_the_notes_and_the_decider_gets_its_estimate(deciders, tmp_path):
    seen = []
    decide = deciders[1].decide
    deciders[1].decide = lambda asked, timeout: seen.append(asked) or decide(asked, timeout)
    with heal(deciders[1:], tmp_path) as healing:
        until(lambda: healing.ladder.level.name == "local")
        plant = Plant()
        answers = [healing.decide(plant_frame(plant)) for _ in range(10)]
        assert answers[0].notes == ()
        assert answers[-1].notes == (f"estimated: {NAME}",)
        assert max(abs(seen[-1].observation[:80])) < 4.0
        assert answers[0].observation is None
        assert answers[-1].observation is seen[-1].observation
        assert healing.degraded() == {f"sensor {NAME}": "lost"}
    assert [each.part for each in read_incidents(tmp_path / "incidents")] == ["sensor line"]


def plant_frame(plant, seconds=2.0):
    asked = plant.ask(frozen=4.0, seconds=seconds)
    return frame(asked.observation, asked.mask, number=asked.number, seconds=20.0)


def test_an_estimate_beyond_its_limit_asks_a_person(deciders, tmp_path):
    with heal(deciders, tmp_path, estimate_limit=0.01) as healing:
        plant = Plant()
        answers = [healing.decide(plant_frame(plant)) for _ in range(10)]
        assert answers[0].action >= 0
        assert (answers[-1].action, answers[-1].decided_by) == (-1, "sensors")
        assert answers[-1].notes[-1].startswith(f"a person is asked: {NAME} is known to ±")
        assert not answers[-1].probabilities.any()


def test_a_disk_that_is_full_is_an_incident_and_stops_no_decision(deciders, tmp_path):
    told = []
    (tmp_path / "file").write_text("")
    with heal(deciders, tmp_path / "file" / "agent", told) as healing:
        until(lambda: "disk" in healing.degraded())
        assert healing.decide(frame(seconds=20.0)).action >= 0
        assert "disk" in {change.part for change in told}


def test_a_line_that_cannot_be_reached_is_lost(deciders, tmp_path):
    def probe(timeout):
        raise ServiceError("cut")

    settings = load_settings(agent={"probe_every": 0.01})
    with Healing(deciders, LINE, settings, tmp_path, "line-1", line_probe=probe) as healing:
        until(lambda: healing.degraded() == {"line": "cut"})


def test_what_nobody_probes_is_degraded_and_an_incident_while_it_is_told_so(deciders, tmp_path):
    told = []
    with heal(deciders, tmp_path, told) as healing:
        healing.tell("feedback", "no inbox")
        assert healing.degraded() == {"feedback": "no inbox"}
        assert healing.incidents.open_count == 1
        healing.tell("feedback", "")
        assert healing.degraded() == {}
        assert [(change.part, change.up) for change in told if change.part == "feedback"] == [
            ("feedback", False),
            ("feedback", True),
        ]
    (found,) = [each for each in read_incidents(tmp_path / "incidents") if each.part == "feedback"]
    assert found.status == "closed"


def test_somebody_who_fails_when_told_ends_no_watch(deciders, tmp_path):
    def broken(change):
        raise BrokenPipeError("closed terminal")

    settings = load_settings(agent={"probe_every": 0.01})
    with Healing(deciders, LINE, settings, tmp_path, "line-1", on_change=broken) as healing:
        until(lambda: healing.ladder.level.index == 0)
        deciders[0].probe_error = ServiceError("away")
        until(lambda: healing.ladder.level.name == "local")
        deciders[0].probe_error = None
        until(lambda: healing.ladder.level.index == 0)


def test_a_question_of_another_line_passes_unchanged(deciders, tmp_path):
    with heal(deciders, tmp_path) as healing:
        until(lambda: healing.ladder.level.index == 0)
        assert healing.decide(frame((np.nan, 1.0), seconds=20.0)).decided_by == "triton"
