"""A line profile survives JSON, has a content digest, and a bad one names the field."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest

from agentpipe.environments.line_profile import LineProfile, default_profile, load_profile, save_profile
from agentpipe.errors import InputError

PROFILE = default_profile()


def test_project_profile_has_five_channels_and_seven_modes():
    assert [c.name for c in PROFILE.channels] == ["temperature", "vibration", "current", "pressure", "speed"]
    assert len(PROFILE.modes) == 7
    total = sum(m.prevalence for m in PROFILE.modes) + sum(PROFILE.structural_prevalence.values())
    assert total == pytest.approx(1)
    assert np.diag(PROFILE.healthy_covariance) == pytest.approx(np.ones(5))
    for mode in PROFILE.modes:
        np.linalg.cholesky(mode.covariance)


def test_round_trip_through_a_file(tmp_path):
    save_profile(PROFILE, tmp_path / "p.json")
    again = load_profile(tmp_path / "p.json")
    assert again == PROFILE
    assert again.to_json() == PROFILE.to_json()


def test_digest_covers_content_and_neither_name_nor_report():
    content = PROFILE.to_json()
    same = LineProfile.from_json({**content, "name": "other", "report": {"when": "now"}})
    assert same.digest == PROFILE.digest
    other = copy.deepcopy(content)
    other["modes"][0]["shift"][0] += 0.001
    assert LineProfile.from_json(other).digest != PROFILE.digest


def test_arrays_are_read_only():
    with pytest.raises(ValueError, match="read-only"):
        PROFILE.modes[0].shift[0] = 1


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("format",), 2, "format 2"),
        (("colour",), "red", "unknown field 'colour'"),
        (("channels",), [], "0 channels"),
        (("channels", 0, "sd"), 0, "not positive"),
        (("channels", 0, "sd"), "wide", "not a number"),
        (("channels", 1, "name"), "temperature", "5 channels, 5 different"),
        (("channels", 0, "nominal"), float("nan"), "finite"),
        (("modes",), [], "0 modes"),
        (("modes", 0, "shift"), [1, 2, 3], "5 finite numbers"),
        (("modes", 0, "shift", 2), float("inf"), "5 finite numbers"),
        (("modes", 0, "covariance", 0, 1), 9.0, "symmetric"),
        (("modes", 0, "covariance", 0, 0), -1.0, "positive semi-definite"),
        (("modes", 0, "prevalence"), 2, "not a share"),
        (("modes", 0, "prevalence"), 0.5, "sum to"),
        (("structural_prevalence", "gremlins"), 0.1, "unknown field 'gremlins'"),
        (("healthy_covariance",), "none", "not a block of numbers"),
    ],
)
def test_bad_profile_names_the_field(tmp_path, path, value, message):
    content = copy.deepcopy(PROFILE.to_json())
    target = content
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    file = tmp_path / "p.json"
    file.write_text(json.dumps(content))
    with pytest.raises(InputError, match=message) as caught:
        load_profile(file)
    assert caught.value.where["file"] == file
    assert caught.value.where["field"]


@pytest.mark.parametrize(
    ("data", "message"),
    [(b"", "empty"), (b"{", "not valid JSON"), (b"\xff\xff", "not valid JSON"), (b"[]", "not an object")],
)
def test_file_that_is_no_profile(tmp_path, data, message):
    (tmp_path / "p.json").write_bytes(data)
    with pytest.raises(InputError, match=message):
        load_profile(tmp_path / "p.json")


def test_missing_file(tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        load_profile(tmp_path / "p.json")
