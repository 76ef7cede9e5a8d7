"""A day of production in miniature: what a policy decided in a few lines, and what an expert said of it."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from agentpipe.environments.catalog import load_catalog
from agentpipe.environments.datafiles import data_dir
from agentpipe.environments.layout import ACTION_SEGMENT, Purpose
from agentpipe.environments.line_profile import default_profile
from agentpipe.environments.players import OraclePlayer
from agentpipe.environments.pool import build_pool
from agentpipe.environments.table import load_table
from agentpipe.learning.policy.package import PolicyPackage

ERRORS = ("perception", "planning", "planning", "execution")


def day_of_production(
    package: Path, day: dt.date, lines: int = 6, steps: int = 4, seed: int = 0
) -> list[dict[str, Any]]:
    """``lines × steps`` decisions of the policy on ``day``, each with a label of the same day."""
    return [row for pair in _pairs(PolicyPackage.load(package), day, lines, steps, seed) for row in pair]


def _pairs(policy: PolicyPackage, day: dt.date, lines: int, steps: int, seed: int) -> Iterator[list[dict[str, Any]]]:
    environments = load_catalog().environments(split="train")[:: 7_000 // lines][:lines]
    table = load_table(data_dir() / "disturbances.csv")
    pool = build_pool(environments, table, default_profile(), seed=seed, purpose=Purpose.COLLECT)
    for step in range(steps):
        last, time, mask = np.asarray(pool.last_action), np.asarray(pool.time), np.asarray(pool.mask)
        output = policy.act(pool.observation.copy(), last.astype(np.int64), time.astype(np.float32), mask.copy())
        better = OraclePlayer().act(pool).actions
        at = dt.datetime.combine(day, dt.time(8, step), dt.UTC)
        for row, environment in enumerate(environments):
            name, action = f"{day}-{seed}-{step}-{row}", int(output.action[row])
            right = action == int(better[row])
            yield [
                {
                    "kind": "decision",
                    "decision_id": name,
                    "time": at.isoformat(),
                    "line_id": environment.template.line_id,
                    "policy_version": policy.digest,
                    "observation": pool.observation[row].tolist(),
                    "last_action": int(last[row]),
                    "elapsed_minutes": float(time[row]),
                    "mask": mask[row].tolist(),
                    "probabilities": output.probabilities[row].astype(float).tolist(),
                    "action": action,
                    "result": "done",
                },
                {
                    "kind": "label",
                    "label_id": f"label-{name}",
                    "decision_id": name,
                    "time": (at + dt.timedelta(hours=1)).isoformat(),
                    "verdict": "correct" if right else "wrong",
                    "error_type": None if right else ERRORS[ACTION_SEGMENT[action]],
                    "confidence": 0.9,
                    "annotator": "expert",
                    "corrected_action": None if right else int(better[row]),
                },
            ]
        pool.step(output.action)


def drop(rows: list[dict[str, Any]], inbox: Path, name: str) -> None:
    """Leaves ``rows`` as a JSON-lines file in the inbox, whole."""
    inbox.mkdir(parents=True, exist_ok=True)
    aside = inbox / f".{name}"
    aside.write_text("".join(json.dumps(row) + "\n" for row in rows))
    aside.rename(inbox / name)
