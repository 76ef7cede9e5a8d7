"""The trajectory buffer beside others: ``python -m benchmarks.buffer [--home HOME] [--alone]``.

On one core, a million transitions of 60 numbers (stored with action, mask, reward and what else a record holds):
writing, and sampling batches of 2,048 uniformly, by priority, and causally; torchrl's memory-mapped replay buffer and
cpprb's do the same in turns with ours. Then the production line's own episodes, what a kill -9 costs, and what causal
sampling draws: of the recordings in HOME, or of a few shards that are played for the purpose.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import buffer_others, buffer_own
from benchmarks.buffer_crash import kill_often, reopen
from benchmarks.buffer_shares import home_shards, played_shards, shares, trained_shards
from benchmarks.measure import Contestant, take_turns
from benchmarks.worker import Found
from benchmarks.worker import main as worker_main

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.measure import Figure

HOME, ALONE = "AGENTPIPE_BENCHMARK_HOME", "AGENTPIPE_BENCHMARK_ALONE"
"""hand the options to the pinned process"""


def body(cores: int, smoke: bool) -> Found:  # noqa: FBT001 - called by the worker
    """Everything, in a folder that is removed afterwards."""
    sizes = buffer_own.SMOKE if smoke else buffer_own.Sizes()
    with tempfile.TemporaryDirectory(prefix="agentpipe-buffer-") as name:
        folder = Path(name)
        found = Found()
        crashes = [kill_often(folder / "killed", sizes.kills), *reopen(folder, sizes.transitions, sizes.reopenings)]
        drawn = what_is_drawn(folder, sizes)
        contestants = gather_contestants(folder, sizes, found)
        for group in dict.fromkeys(contestant.name.partition(":")[0] for contestant in contestants):
            turns = [contestant for contestant in contestants if contestant.name.partition(":")[0] == group]
            found.figures += take_turns(turns, cores, sizes.repeats)
        found.figures += take_turns(buffer_own.line_writers(folder, sizes), cores, sizes.repeats)
        found.figures += [*crashes, *drawn]
    return found


def what_is_drawn(folder: Path, sizes: buffer_own.Sizes) -> list[Figure]:
    """Shares under each sampler: of a home's recordings and of its champion's play, else of a few by rule."""
    rules = "rules, one step in five at random"
    if not (home := os.environ.get(HOME)):
        return shares(played_shards(folder, 4, sizes.line_episodes // 4), rules)
    drawn = shares(home_shards(Path(home)), f"recorded before training ({rules})")
    trained = trained_shards(Path(home), folder / "trained")
    return drawn + (shares(trained, "the trained policy, sampled") if trained else [])


def gather_contestants(folder: Path, sizes: buffer_own.Sizes, found: Found) -> list[Contestant]:
    """Ours and those of others that can be had; ``found`` is told of the rest."""
    with buffer_own.write_all(folder / "written", sizes.transitions) as writer:
        shard = buffer_own.seal(writer, folder / "sealed")
    contestants = [*buffer_own.writers(folder, sizes), *buffer_own.sampling(shard, sizes)]
    if os.environ.get(ALONE):
        found.skipped["torchrl and cpprb"] = "not asked for"
        return contestants
    for name, version, (others, why_not) in (
        ("torchrl", buffer_others.TORCHRL, buffer_others.torchrl_contestants(folder, sizes)),
        ("cpprb", buffer_others.CPPRB, buffer_others.cpprb_contestants(sizes)),
    ):
        contestants += others
        if why_not:
            found.skipped[name] = why_not
        else:
            found.versions[name] = version
    return contestants


def main(arguments: Sequence[str] | None = None) -> Path | None:
    """The command line: as of every benchmark, on one core whatever ``--cores`` says, and two of its own."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.buffer", add_help=False)
    parser.add_argument("--home", type=Path, help="of a finished run: shares are those of its recordings")
    parser.add_argument("--alone", action="store_true", help="without the buffers of others, which have to be fetched")
    given, rest = parser.parse_known_args(sys.argv[1:] if arguments is None else list(arguments))
    if given.home:
        os.environ[HOME] = str(given.home.resolve())
    if given.alone:
        os.environ[ALONE] = "1"
    pinned = "--pinned" in rest
    path = worker_main("buffer", body, rest if pinned else [*rest, "--cores", "1"])
    if path is not None:
        print(page(path))
    return path


def page(path: Path) -> str:
    """What the file of results says, as on the page of all results."""
    from agentpipe.storage import read_json
    from benchmarks.report import SECTIONS

    return SECTIONS["buffer"](read_json(path))


if __name__ == "__main__":
    main()
