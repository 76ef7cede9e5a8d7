"""What agents leave for people is read as it was written."""

from __future__ import annotations

import datetime as dt

import pytest

from agentpipe.serving.agent.incidents import IncidentBook
from agentpipe.serving.agent.probes import Change
from agentpipe.serving.agent.reports import places, read
from agentpipe.settings import AgentSettings
from agentpipe_tests.serving.agent.questions import answer, frame
from agentpipe_tests.serving.agent.test_shadow import Candidate, shadow


def test_an_incident_and_a_comparison_as_an_agent_writes_them(tmp_path):
    folder = tmp_path / "agent" / "press"
    book = IncidentBook(folder / "incidents", "press", AgentSettings())
    book.note(Change("triton", False, "away", dt.datetime(2026, 3, 29, tzinfo=dt.UTC), 0.0))
    book.decided(answer(1), 0.004)
    book.close()
    made = shadow(folder / "shadow", Candidate())
    for number in range(4):
        made.decided(frame(number), answer(0), 0.002)
    made.close()
    incident, comparison = (read(place) for place in places(tmp_path))
    assert (incident.figures["part"], incident.figures["status"], incident.ended) == ("triton", "stopped", True)
    assert incident.figures["latency_most_ms"] == pytest.approx(4.0)
    assert incident.markdown.startswith("# Incident: triton (stopped)")
    assert (comparison.figures["rows"], comparison.figures["agent"], comparison.ended) == (4, "press", True)
    assert comparison.figures["latency_p50_ms_champion"] == pytest.approx(2.0)
    assert 0.0 <= float(comparison.figures["agreement"]) <= 1.0
    assert "4 decisions compared, 0 dropped, 0 failed." in comparison.markdown


def test_a_home_without_agents_has_none(tmp_path):
    assert places(tmp_path) == []
