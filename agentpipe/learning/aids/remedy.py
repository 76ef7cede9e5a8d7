"""When an aid starts, how long it stays, and when it gives up.

A remedy that is not always on

- starts once a complaint has been heard for ``patience`` updates running;
- ends once none has been heard for ``calm`` updates running;
- ends, too, after ``longest`` updates in which the complaint did not cease: it does not help then, and rests for as
  many updates before it may be tried again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agentpipe.learning.aids.base import Aid

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agentpipe.learning.aids.options import AidOptions, Mode
    from agentpipe.learning.tensors import Arrays


class Remedy(Aid):
    """An aid that is on while it is needed, or always.

    Args:
        mode: ``remedy`` or ``always``.
        options: of all aids.
    """

    def __init__(self, mode: Mode, options: AidOptions) -> None:
        super().__init__()
        self.mode, self.options = mode, options
        self.active = mode == "always"
        self._heard = self._quiet = self._running = self._rest = 0

    @property
    def resting(self) -> bool:
        """It did not help, and may not start again yet."""
        return self._rest > 0

    def judge(self, complaint: str) -> None:
        """Starts or ends the remedy; once an update.

        Args:
            complaint: what is wrong, with its figures; empty where nothing is.
        """
        if self.mode == "always":
            return
        if self.resting:
            self._rest -= 1
            return
        self._heard, self._quiet = (self._heard + 1, 0) if complaint else (0, self._quiet + 1)
        if not self.active:
            if self._heard >= self.options.patience:
                self.begin(f"{complaint}, for {self._heard} updates")
            return
        self._running += 1
        if self._quiet >= self.options.calm:
            self.end(f"nothing to complain of for {self._quiet} updates")
        elif self._running >= self.options.longest and complaint:
            self.end(f"did not help in {self._running} updates: {complaint}", rest=self.options.longest)

    def begin(self, reason: str) -> None:
        """Turns it on; overridden where more is to be done."""
        self.active, self._heard, self._quiet, self._running = True, 0, 0, 0
        self.note("start", reason, 1.0)

    def end(self, reason: str, *, rest: int = 0) -> None:
        """Turns it off for at least ``rest`` updates; overridden where more is to be done."""
        self.active, self._heard, self._quiet, self._running, self._rest = False, 0, 0, 0, rest
        self.note("end", reason, 0.0)

    def state(self) -> tuple[dict[str, Any], Arrays]:
        """On or off, and the counts of updates."""
        return {"active": self.active, "counts": [self._heard, self._quiet, self._running, self._rest]}, {}

    def restore(self, content: Mapping[str, Any], arrays: Arrays) -> None:
        """The inverse of :meth:`state`."""
        del arrays
        self.active = bool(content["active"])
        self._heard, self._quiet, self._running, self._rest = (int(count) for count in content["counts"])
