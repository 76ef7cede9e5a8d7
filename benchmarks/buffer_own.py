"""agentpipe's shards as contestants, and a plain memory-mapped file of the same bytes beside them."""

from __future__ import annotations

import dataclasses
import itertools
import os
import shutil
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from agentpipe.experience.graph import temporal_parents
from agentpipe.experience.store import records as rec
from agentpipe.experience.store.writer import ShardWriter
from benchmarks.measure import Contestant

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from agentpipe.experience.recorder import Recorded
    from agentpipe.experience.sampling.draw import Sampler
    from agentpipe.experience.store.shard import Shard
    from agentpipe.experience.store.writer import Durability

FEATURES, ACTIONS = 60, 16
EPISODE_STEPS, CHUNK_EPISODES = 10, 200
CHUNK: Final = EPISODE_STEPS * CHUNK_EPISODES
"""transitions that every contestant writes at once"""
FIELDS: Final = ("observation", "action", "reward", "terminated")
"""what every contestant samples"""


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    transitions: int = 1_000_000
    batch: int = 2_048
    batches: int = 200
    repeats: int = 7
    line_episodes: int = 20_000
    kills: int = 100
    reopenings: int = 5


SMOKE: Final = Sizes(20_000, 256, 4, 1, 200, 4, 1)


def header(features: int = FEATURES, actions: int = ACTIONS) -> dict[str, Any]:
    """What a shard of the benchmark says of itself."""
    policy = {"player": "benchmark", "version": "1", "ordinal": 0}
    return {"cell": "benchmark", "observation_size": features, "action_count": actions, "policies": [policy]}


def chunk(seed: int = 0) -> Recorded:
    """One chunk of episodes of ten steps, each step used by the next."""
    from agentpipe.experience.recorder import Recorded

    random = np.random.default_rng(seed)
    steps = np.zeros(CHUNK, rec.step_dtype(FEATURES, ACTIONS))
    steps["observation"] = random.normal(size=(CHUNK, FEATURES))
    steps["reward"] = random.normal(size=CHUNK)
    steps["action"] = random.integers(0, ACTIONS, CHUNK)
    steps["mask"] = rec.pack_masks(np.ones((CHUNK, ACTIONS), np.bool_))
    steps["environment"] = np.repeat(np.arange(CHUNK_EPISODES), EPISODE_STEPS)
    steps["step"] = np.tile(np.arange(EPISODE_STEPS), CHUNK_EPISODES)
    steps["terminated"] = steps["step"] == EPISODE_STEPS - 1
    episodes = np.zeros(CHUNK_EPISODES, rec.EPISODE)
    episodes["environment"] = np.arange(CHUNK_EPISODES)
    episodes["steps"] = EPISODE_STEPS
    episodes["final"] = rec.NO_FINAL
    episodes["success"] = random.integers(0, 2, CHUNK_EPISODES)
    episodes["mode"] = random.integers(0, 8, CHUNK_EPISODES)
    return Recorded(steps, episodes, None, temporal_parents(episodes["steps"]))


def numbered(chunk_: Recorded, number: int) -> Recorded:
    """The same chunk as the environments' episode ``number``; changes it in place."""
    chunk_.steps["episode"] = number
    chunk_.episodes["episode"] = number
    return chunk_


def write_all(folder: Path, transitions: int) -> ShardWriter:
    """An open shard of so many transitions."""
    writer = ShardWriter.open(folder, header(), capacity=transitions)
    piece = chunk()
    for number in range(transitions // CHUNK):
        writer.append(*numbered(piece, number))
    return writer


def timed(folder: Path, work: Callable[[Path], object]) -> float:
    """Seconds of ``work`` in a folder of its own, which is removed afterwards."""
    place = folder / "turn"
    place.mkdir()
    began = time.perf_counter()
    work(place)
    seconds = time.perf_counter() - began
    shutil.rmtree(place)
    return seconds


def writers(folder: Path, sizes: Sizes) -> list[Contestant]:
    """The shard with checksums, graph and index; and its step records alone, copied into a mapped file."""

    def shard(place: Path) -> None:
        write_all(place / "shard", sizes.transitions).close()

    def raw(place: Path) -> None:
        steps = chunk().steps
        mapped = preallocated(place / "raw.bin", steps.dtype, sizes.transitions)
        for first in range(0, sizes.transitions, CHUNK):
            mapped[first : first + CHUNK] = steps

    named = [("agentpipe, with checksums, graph and index", shard), ("the same bytes into a mapped file", raw)]
    return [
        Contestant(f"Writing: {name}", sizes.transitions, lambda work=work: timed(folder, work), sizes.transitions)  # type: ignore[misc]
        for name, work in named
    ]


def preallocated(path: Path, dtype: np.dtype[Any], count: int) -> npt.NDArray[Any]:
    """A mapped file whose blocks are there."""
    with path.open("w+b") as file:
        os.posix_fallocate(file.fileno(), 0, count * dtype.itemsize)
    mapped: npt.NDArray[Any] = np.memmap(path, dtype, "r+", shape=(count,)).view(np.ndarray)
    return mapped


def sampling(shard: Shard, sizes: Sizes) -> list[Contestant]:
    """Drawing and gathering a batch, by each sampler."""
    from agentpipe.experience.sampling.causal import CausalSampler
    from agentpipe.experience.sampling.prioritised import PrioritisedSampler
    from agentpipe.experience.sampling.sets import SampleSet
    from agentpipe.experience.sampling.uniform import UniformSampler

    steps = SampleSet([shard])
    # The chunk is the same over and over; influence of the line is skewed, and so is this.
    influence = np.random.default_rng(1).pareto(1.5, steps.size)
    errors = np.random.default_rng(2).exponential(size=sizes.batch)
    prioritised = PrioritisedSampler(steps.size, seed=0)
    prioritised.update(np.arange(steps.size), np.random.default_rng(3).exponential(size=steps.size))
    contestants = [
        ("Uniform: agentpipe, stratified", UniformSampler(steps.size, seed=0), None),
        ("Uniform: agentpipe, independent", UniformSampler(steps.size, seed=0, stratified=False), None),
        ("Prioritised: agentpipe", prioritised, None),
        ("Prioritised, with update: agentpipe", prioritised, errors),
        ("Causal: agentpipe, stratified", CausalSampler(influence, seed=0), None),
        ("Causal: agentpipe, independent", CausalSampler(influence, seed=0, stratified=False), None),
    ]

    def turn(sampler: Sampler, update: npt.NDArray[np.float64] | None) -> float:
        began = time.perf_counter()
        for _ in range(sizes.batches):
            draw = sampler.draw(sizes.batch)
            steps.gather(draw.ids, FIELDS)
            if update is not None:
                prioritised.update(draw.ids, update)
        return time.perf_counter() - began

    random = np.random.default_rng(0)
    mapped = np.memmap(shard.path / rec.RECORDS, shard.records.dtype, "r")

    def plain() -> float:
        began = time.perf_counter()
        for _ in range(sizes.batches):
            ids = random.integers(0, len(mapped), sizes.batch)
            for name in FIELDS:
                mapped[name][ids]
        return time.perf_counter() - began

    count = sizes.batches * sizes.batch
    made = [
        Contestant(name, count, lambda sampler=sampler, update=update: turn(sampler, update), steps.size)  # type: ignore[misc]
        for name, sampler, update in contestants
    ]
    return [*made, Contestant("Uniform: numpy, the same mapped file", count, plain, steps.size)]


def line_pieces(episodes: int, environments: int = 1_024) -> list[Recorded]:
    """So many episodes of the production line or a few more: what ended at each step together.

    They are played as trajectories are recorded before there is a champion: by rule, one time in five at random.
    """
    from agentpipe.environments.layout import ACTION_COUNT, OBSERVATION_SIZE
    from agentpipe.environments.rules import RulesPlayer
    from agentpipe.experience.behaviour import epsilon_player
    from agentpipe.experience.recorder import Recorder
    from benchmarks.line import frozen_line

    line = frozen_line(min(environments, episodes), 1)
    pool, player = line.pool, epsilon_player(RulesPlayer(line.profile))
    index = np.arange(pool.size, dtype=np.uint32)
    recorder = Recorder(pool, rec.step_dtype(OBSERVATION_SIZE, ACTION_COUNT), index)
    pieces: list[Recorded] = []
    while sum(len(piece.episodes) for piece in pieces) < episodes:
        recorder.before()
        decision = player.act(pool)
        pool.step(decision.actions)
        ended = recorder.after(decision.actions, np.log(decision.probabilities), None, 0, 0)
        if len(ended):
            pieces.append(recorder.take(ended))
    return pieces


def line_header(seed: int = 0) -> dict[str, Any]:
    """Header of a shard of the line."""
    from agentpipe.environments.layout import ACTION_COUNT, OBSERVATION_SIZE

    return {**header(OBSERVATION_SIZE, ACTION_COUNT), "seed": seed}


def seal(writer: ShardWriter, final: Path) -> Shard:
    """Sealed with its figures."""
    from agentpipe.environments.layout import REASONS
    from agentpipe.experience.quality import measure_quality

    inside = np.unique(writer.recorded["environment"]).tolist()
    names: Mapping[int, str] = {number: f"environment-{number}" for number in inside}
    return writer.seal(final, names=names, reasons=REASONS, quality=lambda shard: measure_quality(shard).to_json())


def line_writers(folder: Path, sizes: Sizes) -> list[Contestant]:
    """Writing the production line's own episodes, as they ended, with and without sealing."""
    pieces = line_pieces(sizes.line_episodes)
    episodes = sum(len(piece.episodes) for piece in pieces)
    steps = sum(len(piece.steps) for piece in pieces)
    itemsize = pieces[0].steps.itemsize

    def write(place: Path, *, sealed: bool, durability: Durability = "process") -> None:
        with ShardWriter.open(place / "open", line_header(), capacity=steps, durability=durability) as writer:
            for piece in pieces:
                writer.append(*piece)
            if sealed:
                seal(writer, place / "sealed")

    def raw(place: Path) -> None:
        mapped = preallocated(place / "raw.bin", pieces[0].steps.dtype, steps)
        for first, piece in zip(itertools.accumulate((len(p.steps) for p in pieces), initial=0), pieces, strict=False):
            mapped[first : first + len(piece.steps)] = piece.steps

    notes = {"bytes_of_a_record": itemsize, "steps_of_an_episode": round(steps / episodes, 2)}
    named: Sequence[tuple[str, Callable[[Path], None]]] = [
        ("agentpipe", lambda place: write(place, sealed=False)),
        ("agentpipe, safe from power cuts", lambda place: write(place, sealed=False, durability="power")),
        ("agentpipe, and sealed with its figures", lambda place: write(place, sealed=True)),
        ("the same bytes into a mapped file", raw),
    ]
    made = [
        Contestant(f"Line: {name}", episodes, lambda work=work: timed(folder, work), len(pieces))  # type: ignore[misc]
        for name, work in named
    ]
    return [dataclasses.replace(made[0], notes=lambda: notes), *made[1:]]
