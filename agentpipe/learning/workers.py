"""A few threads that share work whose pieces do not depend on how many threads there are."""

from __future__ import annotations

import contextlib
import functools
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Self

import torch
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextlib.contextmanager
def single_threaded_torch() -> Iterator[None]:
    """One thread an operation, of torch and of BLAS: the workers share the work in larger pieces."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1, "blas"):
            yield
    finally:
        torch.set_num_threads(before)


class Workers:
    """Shares numbered pieces among ``threads`` threads, the calling one included; use as a context manager.

    torch and compiled kernels release the interpreter lock, so that pieces run side by side. One barrier for many
    operations costs less than torch's own one per operation, above all on a machine with other work to do.

    Args:
        threads: at least one; one runs everything in the calling thread.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._orders: list[SimpleQueue[Callable[[], None] | None]] = [SimpleQueue() for _ in range(threads - 1)]
        self._done: SimpleQueue[tuple[int, BaseException | None]] = SimpleQueue()
        self._helpers: list[Thread] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for orders in self._orders[: len(self._helpers)]:
            orders.put(None)
        for helper in self._helpers:
            helper.join()
        self._helpers = []

    def run(self, function: Callable[[int, int], None], pieces: int) -> None:
        """Calls ``function(worker, piece)`` for each piece; each worker takes a range of neighbouring pieces, in order.

        Raises:
            Exception: whatever a piece raised; that of the first range that failed.
        """

        def work(worker: int, low: int, high: int) -> None:
            for piece in range(low, high):
                function(worker, piece)

        self.share(work, pieces)

    def share(self, function: Callable[[int, int, int], None], pieces: int) -> None:
        """Calls ``function(worker, low, high)`` once a worker, for its range of pieces; none is empty.

        Raises:
            Exception: whatever a call raised; that of the first range that failed.
        """
        taking = max(1, min(self.threads, pieces))
        bounds = [worker * pieces // taking for worker in range(taking + 1)]
        self._start(taking - 1)
        for worker in range(1, taking):
            self._orders[worker - 1].put(functools.partial(function, worker, bounds[worker], bounds[worker + 1]))
        failures: list[BaseException | None] = [None] * taking
        try:
            function(0, bounds[0], bounds[1])
        except BaseException as error:  # noqa: BLE001 - raised below, once the others are done with the same arrays
            failures[0] = error
        for _ in range(1, taking):
            worker, failure = self._done.get()
            failures[worker] = failure
        for found in failures:
            if found is not None:
                raise found

    def _start(self, helpers: int) -> None:
        for number in range(len(self._helpers), helpers):
            work = functools.partial(_help, number + 1, self._orders[number], self._done)
            helper = Thread(target=work, name=f"learning-{number + 1}", daemon=True)
            helper.start()
            self._helpers.append(helper)


def _help(
    worker: int,
    orders: SimpleQueue[Callable[[], None] | None],
    done: SimpleQueue[tuple[int, BaseException | None]],
) -> None:
    torch.set_num_threads(1)  # holds for one thread only: each would start further ones of its own
    while (order := orders.get()) is not None:
        failure: BaseException | None = None
        try:
            order()
        except BaseException as error:  # noqa: BLE001 - raised where the work was asked for
            failure = error
        del order
        done.put((worker, failure))
