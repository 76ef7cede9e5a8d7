"""How long work tells that it is still alive."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Called by long work: ``stage`` names it, ``done`` of ``total`` units are finished, ``note`` is for people."""

    def __call__(self, stage: str, done: int, total: int, note: str = "") -> None:
        """Report that ``done`` of ``total`` units of ``stage`` are finished."""
        ...


def silent(stage: str, done: int, total: int, note: str = "") -> None:
    """A progress receiver that shows nothing."""
