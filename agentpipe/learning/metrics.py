"""What a training run tells while it runs: TensorBoard events and the use of the machine."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Self

import psutil

from agentpipe.storage import typed_os_errors

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class Events:
    """TensorBoard events; closes (and flushes) at the end of a ``with`` block.

    Args:
        directory: of the event files.
        resume_at: environment steps from which a resumed run writes again; later events of the earlier run are hidden.

    Raises:
        DiskFullError, HomeError: here and in every method: events cannot be written.
    """

    def __init__(self, directory: Path, resume_at: int | None = None) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self._directory = directory
        with typed_os_errors(directory):
            directory.mkdir(parents=True, exist_ok=True)
            self._writer: Any = SummaryWriter(str(directory), purge_step=resume_at)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with typed_os_errors(self._directory):
            self._writer.close()

    def write(self, figures: Mapping[str, float], step: int) -> None:
        """Adds one scalar for each figure at ``step`` (environment steps)."""
        with typed_os_errors(self._directory):
            for name, value in figures.items():
                self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        """Makes what was written so far visible to readers."""
        with typed_os_errors(self._directory):
            self._writer.flush()


class Utilisation:
    """Processor, memory and temperature of this machine, as far as the system tells."""

    def __init__(self) -> None:
        self._process = psutil.Process(os.getpid())
        self._process.cpu_percent(None)
        psutil.cpu_percent(None)

    def sample(self) -> dict[str, float]:
        """``process_cpu`` (1 = one core), ``machine_cpu`` (1 = all) since last time; ``resident_mb``, ``celsius``."""
        figures = {
            "process_cpu": self._process.cpu_percent(None) / 100.0,
            "machine_cpu": psutil.cpu_percent(None) / 100.0,
            "resident_mb": self._process.memory_info().rss / 2**20,
        }
        read = getattr(psutil, "sensors_temperatures", dict)
        celsius = [entry.current for entries in read().values() for entry in entries if entry.current]
        if celsius:
            figures["celsius"] = max(celsius)
        return figures
