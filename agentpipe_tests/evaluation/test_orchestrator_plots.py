"""Heat maps of where the orchestrator went: they fit into an event, and hold what the log says."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from agentpipe.errors import EvaluationError
from agentpipe.evaluation.canvas import LIMIT
from agentpipe.evaluation.orchestrator_plots import _over_time, _pair, steering_by_level, steering_over_time
from agentpipe.learning.aids.orchestrator_log import CLASSES, REASONS, ROW


def log_of(decisions, each=300, seed=0):
    generator = np.random.default_rng(seed)
    rows = np.zeros(decisions * each, ROW)
    rows["update"] = 1 + 5 * np.repeat(np.arange(decisions), each)
    rows["group"], rows["arm"] = generator.integers(-1, 25, len(rows)), generator.integers(0, 216, len(rows))
    rows["reason"], rows["environments"] = generator.integers(0, 3, len(rows)), generator.integers(1, 9, len(rows))
    rows["decisions"] = generator.integers(0, 99, len(rows))
    rows["entropy"] = rows["decisions"] * generator.random(len(rows))
    return rows


@pytest.mark.parametrize("decisions", [1, 28, 400])
def test_pictures_fit_into_an_event_and_are_the_same_each_time(decisions):
    rows = log_of(decisions)
    for plot in (steering_over_time, steering_by_level):
        data = plot(rows)
        assert len(data) <= LIMIT
        assert Image.open(io.BytesIO(data)).size[0] > 400
        assert plot(rows) == data


def test_a_log_without_decisions_is_nothing_to_plot():
    with pytest.raises(EvaluationError, match="nothing to plot"):
        steering_over_time(np.zeros(0, ROW))
    floor = log_of(2)
    floor["reason"] = REASONS.index("floor")
    with pytest.raises(EvaluationError, match="nothing to plot"):
        steering_by_level(floor)
    assert len(steering_over_time(floor)) > 1_000


def test_where_nobody_decided_anything_there_is_a_gap():
    rows = log_of(3)
    rows["decisions"], rows["entropy"] = 0, 0.0
    assert len(steering_over_time(rows)) > 1_000
    assert np.isnan(_over_time(rows)[2]).all()


@pytest.mark.parametrize("decisions", [3, 130])
def test_columns_are_spans_of_decisions(decisions):
    """Held against sums made row by row."""
    rows = log_of(decisions, each=20)
    updates, shares, entropy = _over_time(rows)
    span = 1 if decisions == 3 else 3
    assert updates == [1 + 5 * number for number in range(0, decisions, span)]
    moves, summed, count = np.zeros((3, len(CLASSES), len(updates)))
    for row in rows:
        digits = (int(row["arm"]) // 36, int(row["arm"]) // 6 % 6, int(row["arm"]) % 6)
        kinds = [name for name, level in zip(("sensor", "network", "load"), digits, strict=True) if level]
        name = "none" if not kinds else "all three" if len(kinds) == 3 else " × ".join(kinds)
        at = CLASSES.index(name), (int(row["update"]) - 1) // 5 // span
        moves[at] += row["environments"]
        summed[at] += row["entropy"]
        count[at] += row["decisions"]
    np.testing.assert_allclose(shares, moves / moves.sum(axis=0))
    with np.errstate(invalid="ignore"):
        np.testing.assert_allclose(entropy, summed / count)


def test_pairs_of_levels_are_shares_of_the_moves():
    table = _pair(np.array([5, 5, 0], np.int8), np.array([1, 1, 2], np.int8), np.array([3, 1, 4], np.int32))
    assert table[5, 1] == table[0, 2] == 0.5
    assert table.sum() == 1.0
