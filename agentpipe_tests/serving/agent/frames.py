"""Frames for tests: of a small policy of two features and three actions, and of the built-in line's pools."""

from __future__ import annotations

import datetime as dt
import time

import numpy as np

from agentpipe.serving.agent.types import Answer, Frame


def frame(observation=(0.25, -1.0), mask=(True, False, True), *, number=0, order="o1", seconds=1.0, last=None) -> Frame:
    """A question that is asked now and wants its answer within ``seconds``."""
    now = time.monotonic()
    seen, allowed = np.asarray(observation, np.float32), np.asarray(mask, np.bool_)
    return Frame(
        decision_id=f"{order}-{number}",
        line_id="line",
        order_id=order,
        number=number,
        observation=seen,
        last_action=len(allowed) if last is None else last,
        elapsed_minutes=0.5 * number,
        mask=allowed,
        received=now,
        deadline=now + seconds,
        time=dt.datetime.now(dt.UTC),
    )


def pool_frame(pool, row=0, *, seconds=1.0) -> Frame:
    """What environment ``row`` of a pool shows now."""
    asked = frame(
        pool.observation[row].copy(), pool.mask[row].copy(), number=int(pool.plant().step[row]), seconds=seconds
    )
    return Frame(**{**vars(asked), "last_action": int(pool.last_action[row]), "elapsed_minutes": float(pool.time[row])})


class FakeDecider:
    """Answers with the first allowed action after ``delay`` seconds, or fails while ``error`` is set."""

    def __init__(
        self, name: str, *, delay: float = 0.0, error: Exception | None = None, version: str | None = None
    ) -> None:
        self.name, self.policy_version = name, version or f"version of {name}"
        self.delay, self.error, self.probe_error = delay, error, error
        self.asked, self.probed, self.closed = 0, 0, False
        self.timeouts: list[float] = []

    def decide(self, frame: Frame, timeout: float) -> Answer:
        self.asked += 1
        self.timeouts.append(timeout)
        time.sleep(min(self.delay, timeout))
        if self.error is not None:
            raise self.error
        probabilities = np.zeros(len(frame.mask), np.float32)
        action = int(frame.mask.argmax())
        probabilities[action] = 1.0
        return Answer(action, probabilities, 0.0, self.name, self.policy_version)

    def probe(self, timeout: float) -> None:
        self.probed += 1
        if self.probe_error is not None:
            raise self.probe_error

    def close(self) -> None:
        self.closed = True
