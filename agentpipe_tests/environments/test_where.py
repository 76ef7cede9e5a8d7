"""The filter language selects what it says, refuses everything else, and never evaluates code."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentpipe.environments.parameters import PARAMETER_NAMES
from agentpipe.environments.where import parse_where
from agentpipe.errors import TableError
from agentpipe_tests.strategies import project_table

ROWS = project_table().rows


def parameter(row, name):
    return row.values[PARAMETER_NAMES.index(name)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("kind = sensor", lambda r: r.kind == "sensor"),
        ("kind == 'sensor'", lambda r: r.kind == "sensor"),
        ('kind != "sensor"', lambda r: r.kind != "sensor"),
        ("kind in (sensor, load)", lambda r: r.kind in ("sensor", "load")),
        ("kind not in (sensor)", lambda r: r.kind != "sensor"),
        ("intensity >= 3", lambda r: r.intensity >= 3),
        ("intensity<2", lambda r: r.intensity < 2),
        ("variant in (0,1)", lambda r: r.variant in (0, 1)),
        (
            "kind = sensor and intensity >= 3 and variant in (0,1)",
            lambda r: r.kind == "sensor" and r.intensity >= 3 and r.variant in (0, 1),
        ),
        # "and" binds closer than "or"
        (
            "intensity = 1 or intensity = 2 and kind = load",
            lambda r: r.intensity == 1 or (r.intensity == 2 and r.kind == "load"),
        ),
        (
            "(intensity = 1 or intensity = 2) and kind = load",
            lambda r: r.intensity in (1, 2) and r.kind == "load",
        ),
        ("not kind = load and intensity = 1", lambda r: r.kind != "load" and r.intensity == 1),
        ("NOT (kind = load OR intensity > 1)", lambda r: not (r.kind == "load" or r.intensity > 1)),
        ("sensor_sigma > 0.15", lambda r: parameter(r, "sensor_sigma") > 0.15),
        ("network_rtt_ms > 2e2", lambda r: parameter(r, "network_rtt_ms") > 200),
        ("load_sigma = 0.05", lambda r: parameter(r, "load_sigma") == 0.05),
    ],
)
def test_filter_selects_what_it_says(text, expected):
    selected = [row.key for row in ROWS if parse_where(text)(row)]
    assert selected == [row.key for row in ROWS if expected(row)]
    assert 0 < len(selected) < len(ROWS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "column expected"),
        ("   ", "column expected"),
        ("kind", "expected after kind"),
        ("kind =", "expected, found 'the end'"),
        ("kind = heat", "one of sensor, network, load"),
        ("kind < sensor", "=, != or in expected"),
        ("colour = red", "column expected, found 'colour'"),
        ("intensity = sensor", "number expected for intensity"),
        ("intensity = 1e400", "number expected"),
        ("intensity = 1 kind = load", "unexpected 'kind'"),
        ("intensity in ()", "number expected"),
        ("intensity in (1", "'\\)' expected"),
        ("(intensity = 1", "'\\)' expected"),
        ("intensity not = 1", "expected after intensity"),
        ("intensity = 1 or", "column expected"),
        ("__import__('os').system('true')", "unexpected '.'"),
        ("intensity = 1; drop", "unexpected ';'"),
        ("intensity = 3x", "unexpected"),
        ("(" * 10_000, "nested too deeply"),
        ("not " * 10_000 + "intensity = 1", "nested too deeply"),
    ],
)
def test_malformed_filter_says_where(text, message):
    with pytest.raises(TableError, match=message) as caught:
        parse_where(text)
    assert 1 <= caught.value.where["character"] <= len(text) + 1
    assert caught.value.remedy


@given(st.text(alphabet="kindsetyvra_ (),<>=!'0123456789.andortin", max_size=60))
def test_any_text_is_a_filter_or_a_typed_error(text):
    try:
        condition = parse_where(text)
    except TableError:
        return
    assert condition(ROWS[0]) in (True, False)
