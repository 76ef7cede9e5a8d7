"""Labelled decisions of the tiny pool, and a policy with a planted weakness."""

from __future__ import annotations

import dataclasses

import numpy as np

from agentpipe.feedback.labelled import CORRECT, WRONG, LabelledDecisions
from agentpipe.learning.options import FineTuningOptions, PpoOptions, ReplayOptions
from agentpipe_tests.learning.tiny import ACTIONS, CHOICES, SEGMENTS, WIDTH, TinyPool

ACTION_SEGMENT = (np.arange(ACTIONS) // CHOICES).astype(np.int8)
WEAK_TARGET, WEAK_SEGMENT = 2, 1


def labelled(rows, prefix="label", **columns):
    """``rows`` decisions without an error of input; ``columns`` replaces some of them."""
    generator = np.random.default_rng(0)
    segment = generator.integers(0, SEGMENTS, rows)
    action = (segment * CHOICES + generator.integers(0, CHOICES, rows)).astype(np.int64)
    mask = np.arange(ACTIONS)[None, :] // CHOICES == segment[:, None]
    ids = tuple(f"{prefix}-{row:05d}" for row in range(rows))
    made = LabelledDecisions(
        label_id=ids,
        decision_id=tuple(f"of-{name}" for name in ids),
        line_id=("line",) * rows,
        policy_version=("v",) * rows,
        observation=generator.normal(size=(rows, WIDTH)).astype(np.float32),
        last_action=np.full(rows, ACTIONS, np.int64),
        time=(0.1 * segment).astype(np.float32),
        mask=mask,
        action=action,
        probabilities=(mask / CHOICES).astype(np.float32),
        verdict=np.full(rows, CORRECT, np.int8),
        error_type=np.full(rows, -1, np.int8),
        confidence=np.ones(rows, np.float32),
        corrected_action=np.full(rows, -1, np.int64),
    )
    return dataclasses.replace(made, **columns)


def played(package, *, rounds=20, size=64, seed=50):
    """Decisions of the greedy policy with the target that was right: columns, targets i64[n], segments i64[n]."""
    pool, parts = TinyPool(size, seed), []
    for _ in range(rounds * SEGMENTS):
        action = package.act(pool.observation, pool.last_action, pool.time, pool.mask).action
        names = ("observation", "last_action", "time", "mask", "target", "segment")
        parts.append({**{name: getattr(pool, name).copy() for name in names}, "action": action})
        pool.step(action)
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return columns, columns.pop("target"), columns.pop("segment").astype(np.int64)


def judged(columns, right, prefix, **changes):
    """Labels that call ``right`` i64[n] the right actions of the decisions ``columns``."""
    wrong = columns["action"] != right
    verdict = np.where(wrong, WRONG, CORRECT).astype(np.int8)
    made = labelled(len(right), prefix, **columns, verdict=verdict, corrected_action=np.where(wrong, right, -1))
    return dataclasses.replace(made, **changes)


def success(package, *, weak, seed=60):
    """Share of right decisions where the weakness is planted, or everywhere else."""
    columns, target, segment = played(package, seed=seed)
    there = (target == WEAK_TARGET) & (segment == WEAK_SEGMENT)
    right = columns["action"] % CHOICES == target
    return float(right[there if weak else ~there].mean())


def tuning(**changes):
    """Options that suit the tiny pool."""
    made = FineTuningOptions(
        learning_rate=1e-3,
        minibatch=32,
        epochs=10,
        ppo=PpoOptions(discount=0.9),
        replay=ReplayOptions(sampler="uniform"),
    )
    return dataclasses.replace(made, **changes)
