"""Threads that share work."""

import threading
import time

import pytest
import torch

from agentpipe.learning.workers import Workers, single_threaded_torch


def helpers():
    return [thread for thread in threading.enumerate() if thread.name.startswith("learning-")]


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@pytest.mark.parametrize("pieces", [0, 1, 2, 5, 8])
def test_each_piece_is_done_once_by_neighbours_in_order(threads, pieces):
    done: list[tuple[int, int]] = []
    with Workers(threads) as workers:
        workers.run(lambda worker, piece: done.append((worker, piece)), pieces)
    assert sorted(piece for _, piece in done) == list(range(pieces))
    for worker in range(threads):
        own = [piece for at, piece in done if at == worker]
        assert own == list(range(min(own, default=0), min(own, default=0) + len(own)))


def test_ranges_are_as_equal_as_can_be_and_no_thread_gets_an_empty_one():
    found = []
    with Workers(4) as workers:
        workers.share(lambda worker, low, high: found.append((worker, low, high)), 10)
        assert sorted(found) == [(0, 0, 2), (1, 2, 5), (2, 5, 7), (3, 7, 10)]
        found.clear()
        workers.share(lambda worker, low, high: found.append((worker, low, high)), 2)
        assert sorted(found) == [(0, 0, 1), (1, 1, 2)]


def test_one_piece_is_done_in_the_calling_thread_and_starts_none():
    before, seen = len(helpers()), []
    with Workers(4) as workers:
        workers.run(lambda _worker, _piece: seen.append(threading.current_thread()), 1)
        assert len(helpers()) == before
    assert seen == [threading.current_thread()]


def test_threads_work_side_by_side():
    barrier = threading.Barrier(3, timeout=10)
    with Workers(3) as workers:
        workers.run(lambda _worker, _piece: barrier.wait(), 3)


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_the_first_failure_is_raised_once_all_are_done(failing):
    finished = []

    def work(worker, _piece):
        if worker >= failing:
            raise ValueError(f"worker {worker}")
        time.sleep(0.05)
        finished.append(worker)

    with Workers(3) as workers:
        with pytest.raises(ValueError, match=f"worker {failing}"):
            workers.run(work, 3)
        assert sorted(finished) == list(range(failing))
        workers.run(lambda _worker, _piece: None, 3)  # they go on working


def test_threads_end_with_the_block():
    before = len(helpers())
    with Workers(3) as workers:
        workers.run(lambda _worker, _piece: None, 3)
        assert len(helpers()) == before + 2
    assert len(helpers()) == before


def test_inside_torch_has_one_thread_in_every_worker_and_its_own_afterwards():
    before, seen = torch.get_num_threads(), []
    with single_threaded_torch(), Workers(2) as workers:
        workers.run(lambda _worker, _piece: seen.append(torch.get_num_threads()), 2)
    assert seen == [1, 1]
    assert torch.get_num_threads() == before
