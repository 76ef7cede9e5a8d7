"""The small feedback sample in ``data/``: decisions of the random player in the built-in line, judged by the oracle.

``python -m agentpipe.feedback.sample > data/feedback_sample.jsonl`` makes it again; equal simulators give equal bytes.
"""

from __future__ import annotations

import datetime as dt
import json
import sys
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from agentpipe.environments.catalog import load_catalog
from agentpipe.environments.datafiles import data_dir
from agentpipe.environments.layout import ACTION_SEGMENT, SIMULATOR_VERSION, Purpose
from agentpipe.environments.line_profile import default_profile
from agentpipe.environments.players import OraclePlayer, RandomPlayer
from agentpipe.environments.pool import LinePool, build_pool
from agentpipe.environments.table import load_table

if TYPE_CHECKING:
    from collections.abc import Iterator

LINES: Final = 6
STEPS: Final = 4
START: Final = dt.datetime(2026, 1, 5, 8, tzinfo=dt.UTC)
_ERROR: Final = ("perception", "planning", "planning", "execution")  # by segment


def sample_rows() -> Iterator[dict[str, Any]]:
    """Six lines, four decisions each; every second decision has a label, a day later."""
    environments = load_catalog().environments(split="train", cell="sensor-3")[::60][:LINES]
    table = load_table(data_dir() / "disturbances.csv")
    pool = build_pool(environments, table, default_profile(), seed=0, purpose=Purpose.COLLECT)
    for step in range(STEPS):
        actions = RandomPlayer().act(pool).actions
        better = OraclePlayer().act(pool).actions
        time = START + dt.timedelta(minutes=step)
        for row, environment in enumerate(environments):
            identifier = f"sample-{step}-{row}"
            yield _decision(pool, row, int(actions[row]), identifier, environment.template.line_id, time)
            if (step + row) % 2 == 0:
                yield _label(identifier, int(actions[row]), int(better[row]), time + dt.timedelta(days=1))
        pool.step(actions)


def _decision(
    pool: LinePool, row: int, action: int, identifier: str, line_id: str, time: dt.datetime
) -> dict[str, Any]:
    mask = pool.mask[row]
    return {
        "kind": "decision",
        "decision_id": identifier,
        "time": time.isoformat(),
        "line_id": line_id,
        "policy_version": f"random-{SIMULATOR_VERSION}",
        "observation": [round(float(value), 4) for value in pool.observation[row]],
        "last_action": int(pool.last_action[row]),
        "elapsed_minutes": round(float(pool.time[row]), 4),
        "mask": [bool(allowed) for allowed in mask],
        "probabilities": [round(float(value), 6) for value in mask / np.count_nonzero(mask)],
        "action": action,
        "result": "done",
    }


def _label(identifier: str, action: int, better: int, time: dt.datetime) -> dict[str, Any]:
    right = action == better
    return {
        "kind": "label",
        "label_id": f"label-{identifier}",
        "decision_id": identifier,
        "time": time.isoformat(),
        "verdict": "correct" if right else "wrong",
        "error_type": None if right else _ERROR[ACTION_SEGMENT[action]],
        "confidence": 0.9,
        "annotator": "oracle",
        "corrected_action": None if right else better,
    }


if __name__ == "__main__":
    for entry in sample_rows():
        sys.stdout.write(json.dumps(entry, separators=(",", ":")) + "\n")
