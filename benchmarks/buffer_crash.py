"""kill -9 of a writer: how long its shard takes to be taken up again, and whether anything that counted is missing."""

from __future__ import annotations

import contextlib
import multiprocessing
import statistics
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from agentpipe.experience.store.live import open_live
from agentpipe.experience.store.writer import ShardWriter
from benchmarks.buffer_own import FEATURES, chunk, header, numbered, write_all
from benchmarks.measure import Figure

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from pathlib import Path

    from agentpipe.experience.recorder import Recorded

LONGEST = 0.05
"""seconds that a writer lives at most after its first append"""
PRELOADED = ["benchmarks.buffer_own", "agentpipe.experience.store.live", "agentpipe.experience.store.writer"]


def killed(work: Callable[..., None], arguments: tuple[Any, ...], live: float | None) -> int:
    """Runs ``work`` in a process of its own, kills it -9, and returns the last number that it told.

    The process is forked from a server that has imported everything and opened nothing: LevelDB's own thread would not
    survive a fork of this process.

    Args:
        work: importable; gets ``arguments`` and then a function that tells a number.
        arguments: for it.
        live: seconds from its first number to the kill; None: killed when it has returned.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    reading, writing = context.Pipe(duplex=False)
    child = context.Process(target=perform, args=(work, arguments, writing), daemon=True)
    child.start()
    writing.close()
    numbers = [reading.recv()]
    if live is None:
        while (number := reading.recv()) is not None:
            numbers.append(number)
    else:
        time.sleep(live)
    child.kill()
    child.join()
    with contextlib.suppress(EOFError, OSError):  # OSError: killed in the middle of a message
        while True:
            numbers.append(reading.recv())
    reading.close()
    return int(numbers[-1])


def perform(work: Callable[..., None], arguments: tuple[Any, ...], told: Connection) -> None:
    """In the child: works, says so, and waits for its end."""
    work(*arguments, told.send)
    told.send(None)
    time.sleep(3_600)


def pieces(number: int) -> Recorded:
    """One to three episodes that follow from ``number``."""
    whole = chunk(number % 7)
    count = 1 + number % 3
    steps = int(whole.episodes["steps"][:count].sum())
    words = whole.parents[:steps]  # ten steps: one word each
    return numbered(whole._replace(steps=whole.steps[:steps], episodes=whole.episodes[:count], parents=words), number)


def append_until_killed(folder: Path, tell: Callable[[int], object]) -> None:
    """Small appends, each told when it counts."""
    writer = ShardWriter.open(folder, header())
    number = int(writer.recorded["episode"][-1]) + 1 if writer.episodes else 0
    prepared = {number + ahead: pieces(number + ahead) for ahead in range(64)}
    while True:
        piece = prepared.pop(number, None) or pieces(number)
        writer.append(*piece)
        tell(writer.steps)
        number += 1


def kill_often(folder: Path, kills: int, seed: int = 0) -> Figure:
    """Kills a writer at random instants, again and again, in one shard; checks every byte after each."""
    random = np.random.default_rng(seed)
    lost, wrong, counted, seconds = 0, 0, 0, []
    for _ in range(kills):
        told = killed(append_until_killed, (folder,), float(random.uniform(0, LONGEST)))
        began = time.perf_counter()
        with ShardWriter.open(folder, header()) as writer:
            seconds.append(time.perf_counter() - began)
            counted = writer.steps
        lost += max(0, told - counted)
        shard = open_live(folder)
        shard.check()
        wrong += count_wrong(shard.records, shard.episodes)
    notes = {
        "kills": kills,
        "counted_samples_lost": lost,
        "samples_that_differ": wrong,
        "samples_that_counted": counted,
        "longest_reopening_ms": round(1e3 * max(seconds), 1),
    }
    return figure("Killed at random instants", counted, seconds, notes)


def count_wrong(records: Any, episodes: Any) -> int:  # noqa: ANN401 - structured arrays
    """Samples that are not what the writer appended under their number."""
    sources = [chunk(seed).steps for seed in range(7)]
    numbers = records["episode"]
    wrong = 0
    for seed, source in enumerate(sources):
        here = np.flatnonzero(numbers % 7 == seed)
        row = records["environment"][here].astype(np.int64) * 10 + records["step"][here]
        same = (records["observation"][here] == source["observation"][row]).reshape(-1, FEATURES).all(axis=1)
        wrong += int((~(same & (records["reward"][here] == source["reward"][row]))).sum())
    each = np.unique(episodes["episode"], return_counts=True)
    return wrong + 10 * int((each[1] != 1 + each[0] % 3).sum())


def write_and_stay(folder: Path, transitions: int, tell: Callable[[int], object]) -> None:
    """Writes so many steps and leaves the shard open."""
    global _KEPT  # noqa: PLW0603 - collected, it would be closed in order
    _KEPT = write_all(folder, transitions)
    tell(_KEPT.steps)


_KEPT: ShardWriter | None = None


def reopen(folder: Path, transitions: int, times: int) -> list[Figure]:
    """Kills the writer of a shard of so many steps, and takes it up again: as a writer, and as a reader."""
    writer_seconds, reader_seconds, lost = [], [], 0
    for turn in range(times):
        place = folder / f"reopened-{turn}"
        told = killed(write_and_stay, (place, transitions), live=None)
        began = time.perf_counter()
        lost += max(0, told - len(open_live(place).records))
        reader_seconds.append(time.perf_counter() - began)
        began = time.perf_counter()
        with ShardWriter.open(place, header()) as again:
            writer_seconds.append(time.perf_counter() - began)
            lost += max(0, told - again.steps)
    return [
        figure(f"Reopened after kill -9, {name}", transitions, seconds, note(seconds, lost))
        for name, seconds in (("to go on writing", writer_seconds), ("to read", reader_seconds))
    ]


def note(seconds: list[float], lost: int) -> dict[str, Any]:
    """What the page says of a reopening."""
    return {"median_ms": round(1e3 * statistics.median(seconds), 1), "counted_samples_lost": lost}


def figure(name: str, steps: int, seconds: list[float], notes: dict[str, Any]) -> Figure:
    """Durations as a figure: rates are steps a second."""
    rates = tuple(steps / each for each in seconds)
    return Figure(name, steps, 1, steps, rates, statistics.median(rates), max(rates), min(rates), notes)
