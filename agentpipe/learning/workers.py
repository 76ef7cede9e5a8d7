"""A few threads that share work whose pieces do not depend on how many threads there are."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Self

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextlib.contextmanager
def single_threaded_torch() -> Iterator[None]:
    """One thread an operation: the workers share the work in larger pieces."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Workers:
    """Runs numbered pieces on ``threads`` threads; use as a context manager.

    torch and compiled kernels release the interpreter lock, so that pieces run side by side. One barrier for many
    operations costs less than torch's own one per operation, above all on a machine with other work to do.

    Args:
        threads: at least one; one runs everything in the calling thread.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="learning") if threads > 1 else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._executor is not None:
            self._executor.shutdown()

    def run(self, function: Callable[[int, int], None], pieces: int) -> None:
        """Calls ``function(worker, piece)`` for each piece; each worker takes a range of neighbouring pieces, in order.

        Raises:
            Exception: whatever a piece raised; that of the first range that failed.
        """

        def work(worker: int) -> None:
            for piece in range(worker * pieces // self.threads, (worker + 1) * pieces // self.threads):
                function(worker, piece)

        if self._executor is None:
            work(0)
            return
        for future in [self._executor.submit(work, worker) for worker in range(self.threads)]:
            future.result()
