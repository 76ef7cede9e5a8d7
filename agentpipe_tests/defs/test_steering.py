"""What the UI shows of where an orchestrator sent training environments."""

from types import SimpleNamespace

import numpy as np

from agentpipe.defs.learning.assets import _steered
from agentpipe.defs.steps import METADATA_LIMIT
from agentpipe.learning.aids.orchestrator_log import FILE, REASONS, ROW, write_log


def left(tmp_path, *moves):
    rows = np.zeros(len(moves), ROW)
    for row, (update, arm, reason, environments) in zip(rows, moves, strict=True):
        row["update"], row["arm"], row["reason"] = update, arm, REASONS.index(reason)
        row["environments"], row["decisions"], row["entropy"] = environments, 10, 5.0
    write_log(tmp_path / FILE, rows)
    return SimpleNamespace(left={"orchestrator": tmp_path / FILE})


def test_heat_maps_shares_and_the_whole_log_are_shown(tmp_path):
    shown = _steered(left(tmp_path, (1, 0, "floor", 5), (1, 215, "exploit", 30), (6, 7, "explore", 10)))
    assert set(shown) == {"steering", "steering_by_level", "steering_shares", "steering_log", "steering_picture"}
    for name in ("steering", "steering_by_level"):
        assert "data:image/png;base64," in shown[name].md_str
        assert len(shown[name].md_str) < METADATA_LIMIT + 200
    shares = {record.data["combination"]: record.data["share of moves"] for record in shown["steering_shares"].records}
    assert shares["all three"] == "75.0%"  # arm 215 disturbs all three, arm 7 two of them; the floor does not count
    assert (tmp_path / "orchestrator.png").stat().st_size > 0


def test_a_training_without_an_orchestrator_or_without_a_move_shows_nothing(tmp_path):
    assert _steered(SimpleNamespace(left={})) == {}
    assert _steered(left(tmp_path)) == {}


def test_moves_of_the_floor_alone_have_no_share(tmp_path):
    shown = _steered(left(tmp_path, (1, 215, "floor", 5)))
    assert {record.data["share of moves"] for record in shown["steering_shares"].records} == {"–"}
    assert "steering" in shown
    assert "steering_by_level" not in shown
