"""agentpipe beside other PPOs on the same line: ``python -m benchmarks.peers [--minutes N]``.

Stable-Baselines3's PPO, sb3-contrib's MaskablePPO, a PPO in one file in CleanRL's style, and agentpipe, from random
weights; and agentpipe as ``agentpipe run`` trains, whose cloned and recorded steps count. A short trial of two or three
settings each, under a seed of its own and judged on validation lines, chooses how everyone runs. Then one run for each
contestant and seed, of which weights are kept at certain steps and seconds: held-out success at equal environment steps
and at equal seconds of training.

Every training is kept as soon as it is done, under the digest of what it depends on: run the same command again and it
goes on. With ``--minutes`` it stops where the next training would not fit. Times belong to the machine: let nothing
else run.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.measure import results_folder, stamp, store, usable_cores
from benchmarks.peers_report import best_of, section
from benchmarks.peers_run import TRIAL_SEED, as_run, key_of, probe, race, trial
from benchmarks.peers_settings import CONTESTANTS, MASKABLE, PLAIN, SMOKE, WITH_MASK, Sizes
from benchmarks.resumable import RUNS, Cache, Piece, deadline_in, plan, say_what_is_left, work

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from benchmarks.peers_settings import Contestant

_EXTRA = 45.0
"""seconds that a training takes beside its clock: statistics, and judging"""
_SLOWEST = 7_000.0
"""steps a second of the slowest peer, before it was measured"""


def trials(contestants: Iterable[Contestant], sizes: Sizes, cores: int) -> list[Piece]:
    """One short training for each setting that is tried; for agentpipe's default one a look at how fast it goes."""
    found = []
    for contestant in contestants:
        for number, setting in enumerate(contestant.settings, 1):
            found.append(
                Piece(
                    "trials",
                    f"trial {number} of {contestant.name}: {setting.text()}",
                    key_of(contestant, setting, sizes, TRIAL_SEED, "trial"),
                    sizes.trial_seconds + 2 * sizes.thread_seconds + _EXTRA,
                    functools.partial(trial, contestant, setting, sizes, cores),
                )
            )
        if not contestant.settings:
            key = key_of(contestant, None, sizes, TRIAL_SEED, "probe")
            found.append(
                Piece("probes", f"probe of {contestant.name}", key, _EXTRA, functools.partial(probe, sizes, cores))
            )
    return found


def races(
    contestants: Sequence[Contestant],
    tried: dict[str, list[dict[str, Any]]],
    seeds: Iterable[int],
    sizes: Sizes,
    cores: int,
) -> dict[str, list[Piece]]:
    """The runs that are compared, by contestant: with a constant learning rate one a seed serves both comparisons."""
    found: dict[str, list[Piece]] = {contestant.name: [] for contestant in contestants}
    for seed in seeds:
        for contestant in contestants:
            rows = tried.get(contestant.name)
            if not rows:
                continue
            if not contestant.settings:
                for axis in ("steps", "seconds"):
                    key = key_of(contestant, None, sizes, seed, axis)
                    run = functools.partial(as_run, seed, axis, rows[0], sizes, cores)
                    expected = (sizes.seconds if axis == "seconds" else 0.3 * sizes.seconds) + _EXTRA
                    label = f"seed {seed}, {contestant.name}, equal {axis}"
                    found[contestant.name].append(Piece(f"own-{axis}", label, key, expected, run))
                continue
            number, play = best_of(rows)
            setting = dataclasses.replace(contestant.settings[number], threads=rows[number]["threads"])
            for end in ("steps", "seconds") if setting.anneal else ("both",):
                key = {**key_of(contestant, setting, sizes, seed, end), "play": play}
                run = functools.partial(race, contestant, setting, play, end, seed, sizes, cores)
                expected = max(sizes.seconds, sizes.steps / _SLOWEST) + _EXTRA
                label = f"seed {seed}, {contestant.name}: {setting.text()}"
                found[contestant.name].append(Piece("races", label, key, expected, run))
    return found


def rows_of(pieces: Iterable[Piece], cache: Cache) -> list[dict[str, Any]]:
    """Figures of those that are there, in order."""
    return [row for piece in pieces if (row := cache.row(piece)) is not None]


def complete(
    contestants: Iterable[Contestant], sizes: Sizes, cores: int, cache: Cache
) -> dict[str, list[dict[str, Any]]]:
    """Figures of all trials of each contestant; none where one is missing: nobody runs before all were tried."""
    found = {}
    for contestant in contestants:
        pieces = trials([contestant], sizes, cores)
        rows = rows_of(pieces, cache)
        found[contestant.name] = rows if len(rows) == len(pieces) else []
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """``python -m benchmarks.peers``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--plan", action="store_true", help="say what is missing and how long it takes; run nothing")
    parser.add_argument("--minutes", type=float, help="stop where the next training would take longer than is left")
    parser.add_argument("--only", nargs="+", choices=[one.name for one in CONTESTANTS], help="run these alone")
    parser.add_argument("--cache", type=Path, help="folder of finished trainings")
    parser.add_argument("--smoke", action="store_true", help="tiny: shows that it works")
    parser.add_argument("--out", type=Path, help="folder of the results; of a smoke run by default a temporary one")
    chosen = parser.parse_args(arguments)
    out = results_folder(chosen.out, smoke=chosen.smoke)
    sizes, cores = SMOKE if chosen.smoke else Sizes(), min(2, len(usable_cores()))
    origin = stamp("python -m benchmarks.peers", ("gymnasium", "numba", "numpy", "torch"))
    cache = Cache(chosen.cache or (out / "runs" if chosen.smoke else RUNS / "peers"))

    def tell(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    wished = chosen.only or [one.name for one in CONTESTANTS]
    if chosen.plan:
        print(planned([one for one in CONTESTANTS if one.name in wished], chosen.seeds, sizes, cores, cache))
        return
    contestants, skipped = available(origin, wished)
    asked = [one for one in contestants if one.name in wished]
    deadline = deadline_in(chosen.minutes)
    left = work(trials(asked, sizes, cores), cache, deadline, tell)
    tried = complete(contestants, sizes, cores, cache)
    runs = races(contestants, tried, chosen.seeds, sizes, cores)
    left += work(by_seed([runs[one.name] for one in asked]), cache, deadline, tell)
    every = [piece for pieces in runs.values() for piece in pieces]
    more = {
        "sizes": dataclasses.asdict(sizes),
        "cores": cores,
        "tried": {
            one.name: [
                {"setting": setting.text(), **row} for setting, row in zip(one.settings, tried[one.name], strict=False)
            ]
            for one in contestants
        },
        "rows": {name: rows_of(pieces, cache) for name, pieces in runs.items()},
        "origins": cache.origins([*trials(contestants, sizes, cores), *every]),
        "left": len(left),
        "skipped": skipped,
        "smoke": chosen.smoke,
    }
    store("peers", origin, [], out, **more)
    print(section(more))
    if left:
        say_what_is_left(left, cache, tell)
    elif not (skipped or chosen.only or chosen.smoke) and chosen.seeds == parser.get_default("seeds"):
        cache.keep_only([*trials(contestants, sizes, cores), *every])


def planned(asked: Sequence[Contestant], seeds: Sequence[int], sizes: Sizes, cores: int, cache: Cache) -> str:
    """What is missing; where trials are, the first setting stands for the one that they will choose."""
    tried = complete(asked, sizes, cores, cache)
    guess = [{"success": {WITH_MASK: 0.0}, "threads": 1}]
    runs = races(asked, {one.name: tried[one.name] or guess for one in asked}, seeds, sizes, cores)
    return plan([*trials(asked, sizes, cores), *by_seed([runs[one.name] for one in asked])], cache)


def available(origin: dict[str, Any], wished: Collection[str]) -> tuple[list[Contestant], dict[str, str]]:
    """Those that can be had, and why the others cannot; ``origin`` is told of versions.

    Others' packages are fetched only where one of theirs is wished; figures that are kept need none.
    """
    from benchmarks import peers_sb3

    if {PLAIN, MASKABLE}.isdisjoint(wished):
        return list(CONTESTANTS), {}
    if why_not := peers_sb3.make_importable():
        others = [one for one in CONTESTANTS if one.name not in (MASKABLE, PLAIN)]
        return others, {f"{PLAIN} and {MASKABLE}": why_not}
    origin["versions"] |= peers_sb3.versions()
    return list(CONTESTANTS), {}


def by_seed(runs: Sequence[Sequence[Piece]]) -> list[Piece]:
    """Turns: the first runs of all, then their second ones."""
    longest = max((len(pieces) for pieces in runs), default=0)
    return [pieces[number] for number in range(longest) for pieces in runs if number < len(pieces)]


if __name__ == "__main__":
    main()
