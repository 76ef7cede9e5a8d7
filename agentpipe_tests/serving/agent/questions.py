"""Small questions for tests of the runtime: five features, four actions, no names; and some of the built-in line."""

from __future__ import annotations

import datetime as dt
import time

import numpy as np

from agentpipe.environments.layout import ACTION_COUNT, ACTION_NAMES, OBSERVATION_NAMES, OBSERVATION_SIZE, SEGMENTS
from agentpipe.serving.agent.types import Answer, Frame, OrderEnded
from agentpipe.serving.agent.vocabulary import BUILT_IN
from agentpipe.serving.signature import policy_signature

SMALL = policy_signature(5, 4)
LINE = policy_signature(OBSERVATION_SIZE, ACTION_COUNT, observation_names=OBSERVATION_NAMES, action_names=ACTION_NAMES)


def frame(number=0, *, order="o1", line="l1", mask=(True, True, True, True), seconds=30.0, name=None, **changes):
    """A question of a small line that wants its answer in ``seconds``."""
    now = time.monotonic()
    given = {
        "decision_id": name or f"{line}-{order}-{number}",
        "line_id": line,
        "order_id": order,
        "number": number,
        "observation": np.arange(5, dtype=np.float32),
        "last_action": 4 if number == 0 else 2,
        "elapsed_minutes": float(number),
        "mask": np.array(mask),
        "received": now,
        "deadline": now + seconds,
        "time": dt.datetime.now(dt.UTC),
    }
    return Frame(**{**given, **changes})


def line_frame(segment, number=0, *, mask=None, **changes):
    """A question of the built-in line in one of its segments."""
    observation = np.zeros(OBSERVATION_SIZE, np.float32)
    observation[BUILT_IN.segment_columns + SEGMENTS.index(segment)] = 1.0
    allowed = np.ones(ACTION_COUNT, np.bool_) if mask is None else mask
    return frame(number, last_action=ACTION_COUNT, **changes).with_inputs(observation, allowed)


def answer(action=0, *, mask=(True, True, True, True), by="local", version="p" * 64, **changes):
    """An answer that spreads its probability evenly over what is allowed."""
    allowed = np.array(mask, np.float32)
    given = {"value": 0.0, "decided_by": by, "policy_version": version}
    return Answer(action, allowed / allowed.sum(), **{**given, **changes})


def ended(order="o1", line="l1", result="done", success=True):
    """The end of an order."""
    return OrderEnded(line, order, result, success)
