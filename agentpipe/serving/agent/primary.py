"""Asking somebody who may be slow, or hang, without waiting longer than there is time."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from agentpipe.errors import AgentpipeError

if TYPE_CHECKING:
    from collections.abc import Callable

    from agentpipe.serving.agent.types import Answer, Frame


class Primary:
    """A thread that answers one question at a time; who waits for it stops waiting in time.

    Args:
        decide: answers a question, however long it takes.
    """

    def __init__(self, decide: Callable[[Frame], Answer]) -> None:
        self._decide = decide
        self._changed = threading.Condition()
        self._job: Frame | None = None
        self._result: tuple[Frame, Answer | None, str] | None = None
        self._stopping = self._given_up = False
        self._thread = threading.Thread(target=self._work, name="primary", daemon=True)
        self._thread.start()

    def ask(self, frame: Frame, until: float = 0.0) -> bool:
        """Puts a question; False where it still hangs in an earlier one.

        One that was given up is waited for until ``until`` (monotonic), as it is none that hangs; and only once.
        """
        with self._changed:
            while self._job is not None and self._given_up and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)
            if self._job is not None:
                self._given_up = False
                return False
            self._job, self._result, self._given_up = frame, None, False
            self._changed.notify_all()
            return True

    def answer(self, until: float) -> tuple[Answer | None, str]:
        """The answer to the question put last, waited for until ``until`` (monotonic); else None and why not."""
        with self._changed:
            while self._result is None and not self._given_up:
                left = until - time.monotonic()
                if left <= 0:
                    return None, "no answer in time"
                self._changed.wait(left)
            if self._result is None:
                return None, "a person took over"
            _, answer, reason = self._result
            return answer, reason

    def give_up(self, line_id: str) -> None:
        """Whoever waits for an answer to a question of this line need not wait any longer."""
        with self._changed:
            if self._job is not None and self._job.line_id == line_id:
                self._given_up = True
                self._changed.notify_all()

    def close(self, wait: float = 1.0) -> None:
        """Ends the thread; one that hangs is left behind."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join(wait)

    def _work(self) -> None:
        while True:
            with self._changed:
                while self._job is None and not self._stopping:
                    self._changed.wait()
                if self._stopping:
                    return
                job = self._job
            assert job is not None
            answer, reason = None, ""
            try:
                answer = self._decide(job)
            except AgentpipeError as error:
                reason = error.message
            except Exception as error:  # noqa: BLE001 - whatever it is, the line is answered
                reason = f"{type(error).__name__}: {error}"
            with self._changed:
                self._job, self._result = None, (job, answer, reason)
                self._changed.notify_all()
