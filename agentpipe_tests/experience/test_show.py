"""An episode as text: who used what from whom, to the letter."""

from __future__ import annotations

import numpy as np
import pytest

from agentpipe.environments.layout import (
    A_CLOSE,
    A_DEPOT,
    A_DEPTH,
    A_ESCALATE,
    A_EXPEDITE,
    A_MACHINE,
    A_MODE,
    A_SEVERITY,
    A_START,
    A_TECHNICIAN,
    A_VERIFY,
    ACCUMULATING,
    ACTION_COUNT,
    FALSE_ALARM,
    OBSERVATION_SIZE,
    REASONS,
)
from agentpipe.errors import InputError
from agentpipe.experience.recorder import Recorder
from agentpipe.experience.show import WIDTH, Place, _short, describe, fault_text, locate, render
from agentpipe.experience.store.writer import ShardWriter
from agentpipe_tests.environments.line import catalog, pool_with

from .fakes import header, write_shard

SPEC = next(one for one in catalog().environments("train", "sensor-1") if one.template.topology == "serial")
STAMP = 1_767_225_600_123_456_789  # 2026-01-01T00:00:00.123456789Z
REPAIR = (
    2,
    2,
    5,
    A_MACHINE + 2,
    A_MODE,
    A_SEVERITY + 1,
    A_DEPTH + 1,
    A_DEPOT,
    A_TECHNICIAN,
    A_START,
    A_VERIFY,
    A_CLOSE,
)


def shard_of(path, *actions, cut=False, **hidden):
    """One episode of the line, with a perfect link, in a sealed shard."""
    pool = pool_with({"network_loss_good": 0.0, "network_loss_bad": 0.0}, [SPEC])
    pool.plant().deadline[0] = 1e5
    pool._fixed.skills[:] = 0b1111
    for name, value in {"mode": 0, "machine": 2, "severity": 0.4, "growth": 0.0, **hidden}.items():
        getattr(pool.hidden(), name)[0] = value
    sizes = {"observation_size": OBSERVATION_SIZE, "action_count": ACTION_COUNT, "accumulating": ACCUMULATING}
    with ShardWriter.open(path.with_name("open"), header(**sizes), capacity=64) as writer:
        recorder = Recorder(pool, writer.dtype, np.array([SPEC.index]), np.array([0xABCDEF]))
        for number, action in enumerate(actions):
            recorder.before()
            pool.step(np.array([action]))
            probability = np.log(np.array([0.5], np.float32))
            ended = recorder.after(np.array([action]), probability, None, min(number // 6, 1), STAMP + number * 10**9)
        writer.append(*(recorder.cut() if cut else recorder.take(ended)))
        return writer.seal(path, names={SPEC.index: SPEC.environment_id}, reasons=REASONS)


@pytest.fixture(scope="module")
def repaired(tmp_path_factory):
    return shard_of(tmp_path_factory.mktemp("show") / "shard", *REPAIR)


def test_every_step_says_what_it_used_and_from_which_steps(repaired):
    lines = render(repaired, 0).splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith(" step"))
    body = [line.strip() for line in lines[at + 1 :] if line.startswith("         ")]
    assert body == [
        "made reading_2, plc_offset",
        "made reading_2, plc_offset",
        "made reading_5, plc_offset",
        "used reading_1 ← no step; reading_2 ← 0, 1; reading_3 ← no step",
        "made machine",
        "used reading_1 ← no step; reading_2 ← 0, 1; reading_3 ← no step; machine ← 3",
        "made mode",
        "used reading_2 ← 0, 1; machine ← 3; mode ← 4",
        "made severity",
        "used mode ← 4; severity ← 5",
        "made depth",
        "used machine ← 3; mode ← 4; depth ← 6",
        "made part",
        "used machine ← 3; mode ← 4; depth ← 6",
        "made technician",
        "used machine ← 3; mode ← 4; depth ← 6; part ← 7; technician ← 8",
        "made repair, clock",
        "used machine ← 3; repair ← 9",
        "made reading_2, plc_offset, verification",
        "used repair ← 9; verification ← 10",
    ]


def test_the_heading_says_what_it_is_and_who_played_when(repaired):
    lines = render(repaired, 0).splitlines()
    assert lines[0] == f"{SPEC.environment_id}, episode 0 (catalogue index {SPEC.index}, row 0)"
    assert lines[1] == "true fault: p0, machine 2; disturbance 00abcdef"
    assert lines[2].startswith("outcome: success after 12 steps and ")
    assert lines[3] == "played by first 1 (policy 0), second 2 (policy 3)"
    assert lines[4] == "2026-01-01T00:00:00.123456Z to 2026-01-01T00:00:11.123456Z"
    assert lines[5] == str(repaired.path)


@pytest.mark.parametrize(
    ("mode", "machine", "text"),
    [
        ("p3", 4, "p3, machine 4"),
        ("plc_overload", -1, "plc_overload"),
        ("false_alarm", 5, "none, a false alarm of machine 5"),
    ],
)
def test_a_false_alarm_is_no_fault_of_a_machine(mode, machine, text):
    assert fault_text(mode, machine) == text


def test_spikes_idle_steps_and_numbers_of_dependents(repaired):
    steps = describe(repaired, 0)["steps"]
    assert [step["dependents"] for step in steps] == [9, 9, 0, 8, 7, 6, 5, 3, 3, 2, 1, 0]
    assert [step["step"] for step in steps if step["idle"]] == [2]
    assert [step["step"] for step in steps if step["spike"]] == [11]
    assert not any(step["unexplained"] for step in steps)
    assert steps[11]["parents"] == [9, 10]
    assert steps[9]["children"] == [10, 11]
    assert steps[3]["used"] == {"reading_1": [], "reading_2": [0, 1], "reading_3": []}
    assert (steps[4]["action"], steps[4]["segment"], steps[4]["step_id"]) == ("declare_p0", "identify", 4)
    assert (steps[4]["probability"], steps[4]["time"]) == (0.5, "2026-01-01T00:00:04.123456Z")
    text = render(repaired, 0)
    assert text.count("idle") == text.count("spike") == 1
    assert "UNEXPLAINED" not in text


def test_with_a_step_the_text_marks_what_led_to_it_and_what_came_of_it(repaired):
    relations = [step["relation"] for step in describe(repaired, 0, 4)["steps"]]
    assert relations == ["cause", "cause", None, "cause", "this", *["effect"] * 7]
    _, _, table = render(repaired, 0, 4).partition("influence\n")
    signs = [line[0] for line in table.splitlines() if line[1:5].strip().isdigit()]
    assert "".join(signs) == "^^ ^>vvvvvvv"
    with pytest.raises(InputError, match="no step 12"):
        describe(repaired, 0, 12)


def test_an_escalation_shows_why_everything_is_looked_at_again(tmp_path):
    wrong = (
        A_MACHINE + 3,
        A_MODE + 1,
        A_SEVERITY + 1,
        A_DEPTH + 1,
        A_EXPEDITE,
        A_DEPOT,
        A_TECHNICIAN,
        A_START,
        A_VERIFY,
    )
    again = (1, A_MACHINE + 2, A_MODE + 4)
    shard = shard_of(tmp_path / "shard", *wrong, A_ESCALATE, *again, cut=True)
    content = describe(shard, 0)
    assert content["steps"][9]["used"] == {"machine": [0], "mode": [1], "verification": [8]}
    assert content["steps"][10]["used"] == {"reopened": [9]}
    assert content["steps"][11]["used"] == {"reading_1": [10], "reading_2": [], "reading_3": [8], "reopened": [9]}
    assert content["steps"][12]["used"]["machine"] == [11]
    assert content["steps"][5]["used"]["expedite"] == [4]
    assert (content["episode"]["outcome"], content["episode"]["cut"]) == ("cut", True)
    text = render(shard, 0)
    assert "outcome: cut after 13 steps" in text
    assert "truncated" in text


def test_the_version_of_a_player_is_never_cut_in_the_middle_of_a_word():
    assert _short("rules-1.0.0-epsilon-0.2") == "rules-1.0.0-epsilon-0.2"
    assert _short("0123456789abcdef" * 4) == "0123456789abcdef"


def test_nothing_is_wider_than_a_hundred_columns(tmp_path):
    actions = [machine for machine in range(7) for _ in range(7)]
    shard = shard_of(tmp_path / "shard", *actions, A_MACHINE + 3, A_MODE + FALSE_ALARM, cut=True)
    text = render(shard, 0)
    assert max(len(line) for line in text.splitlines() if str(tmp_path) not in line) <= WIDTH
    assert "reading_3 ← 21, 22, 23, 24, 25, 26, 27" in text


def test_a_damage_before_anything_was_done_has_no_explanation_and_says_so(tmp_path):
    shard = shard_of(tmp_path / "shard", 1, severity=0.999, growth=1.0)
    step = describe(shard, 0)["steps"][0]
    assert (step["spike"], step["unexplained"], step["used"]) == (True, True, {"clock": []})
    assert "UNEXPLAINED SPIKE" in render(shard, 0)


def test_episodes_of_other_environments_have_numbers_and_plain_edges(tmp_path):
    shard = write_shard(tmp_path / "shard")
    row = int(np.argmax(shard.episodes["steps"]))
    content = describe(shard, row)
    assert content["steps"][0]["action"].startswith("action ")
    assert content["episode"]["mode"].startswith("mode ")
    for step in content["steps"]:
        assert (step["used"], step["made"]) == ({}, [])
    child = next(step for step in content["steps"] if step["parents"])
    assert "after " + ", ".join(str(parent) for parent in child["parents"]) in render(shard, row)
    for other in range(len(shard.episodes)):
        assert render(shard, other)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("t0012.sensor-3", Place("t0012.sensor-3", None, None)),
        ("745", Place("745", None, None)),
        ("t0012.sensor-3:2.7", Place("t0012.sensor-3", 2, 7)),
        ("745:0", Place("745", 0, 0)),
        ("745:131079", Place("745", 2, 7)),  # 2 * 65536 + 7
        (" 745:4294967295.65535 ", Place("745", 2**32 - 1, 2**16 - 1)),
    ],
)
def test_a_place_is_an_environment_and_perhaps_a_step(text, expected):
    assert locate(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", ":3", "745:", "745:x", "745:1.2.3", "745:-1", "745:1.65536", "745:4294967296.0", "745:1.", "745:٣", "745:1e3"],
)
def test_anything_else_is_refused_with_how_to_write_it(text):
    with pytest.raises(InputError) as caught:
        locate(text)
    assert ":2.7" in caught.value.remedy
