"""What is played to explain the gap between a policy and the oracle, and the figures that come out of it.

Players that share the work between policy, truth and an ideal observer play the same episodes. From one to the next
either something is known no longer, or the policy does one part more, so the differences add up to the gap. Training
and validation environments are played; the hold-out only where it is asked for, and nothing is chosen by what is seen
there. Everything is seeded.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from agentpipe.environments.layout import MODES, Purpose
from agentpipe.environments.parameters import CELLS
from agentpipe.environments.pool import build_pool
from agentpipe.evaluation.statistics import rounded
from benchmarks.difficulty import spread
from benchmarks.gap.classifier import ARMS, ClassifierDiagnosis, chosen_of, collect, fit
from benchmarks.gap.play import BESIDES, EXTRA, LADDER, REST, Bench, Group, cost, lost, right, shapley, won
from benchmarks.gap.players import HybridPlayer, Policy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from agentpipe.evaluation.statistics import Estimate
    from agentpipe.learning.policy.package import PolicyPackage
    from benchmarks.difficulty import Line
    from benchmarks.gap.play import Played

COLLECT_SEED: Final = 777
"""of the labelled examples, apart from every seed that a policy was trained under"""


@dataclass(frozen=True)
class Sizes:
    """How much is played."""

    train: int = 750
    train_episodes: int = 2
    validation: int = 245
    validation_episodes: int = 8
    holdout: int = 0
    examples: tuple[int, ...] = (14_000, 42_000, 126_000)
    """labelled moments that classifiers learn from, ascending, each a multiple of the one before"""
    passes: tuple[int, ...] = (20, 12, 8)
    """times that each number of them is gone through"""


SMOKE = Sizes(15, 1, 15, 1, 0, (60, 120, 240), (1, 1, 1))
STEPS: Final = (
    ("time that measuring takes", "oracle", "truth"),
    ("what no player can know: missed although the disturbance is told", "truth", "told, every packet"),
    ("missed besides where the disturbance has to be inferred", "told, every packet", "untold, every packet"),
    ("packets forgotten, only their means kept", "untold, every packet", "untold, means"),
    ("cause named worse than the means allow", "untold, means", "policy names"),
    ("severity, dispatch and execution", "policy names", "policy"),
)
"""what is lost between two players of the ladder; together the gap"""
SEEN: Final = ("truth", "untold, every packet", "untold, means", "policy names")
"""players that are shown by cell and by fault"""


def figure(found: Estimate) -> dict[str, float]:
    """An estimate as it is stored."""
    return {"value": found.value, "low": found.low, "high": found.high}


def ladder(bench: Bench, group: Group) -> list[dict[str, Any]]:
    """One row a player: success, first diagnoses that are right, and what is lost to the one before."""
    rows: list[dict[str, Any]] = []
    before = None
    for name in LADDER:
        played = bench.of(name, group)
        row: dict[str, Any] = {"player": name, "success": figure(won(played)), "right": figure(right(played))}
        row["claimed"] = played.claimed
        row["lost"] = None if before is None else figure(lost(before, played))
        rows.append(row)
        before = played
    return rows


def short(bench: Bench, group: Group) -> list[dict[str, Any]]:
    """The gap in as few lines as explain it."""
    return [
        {"what": what, "lost": figure(lost(bench.of(first, group), bench.of(second, group)))}
        for what, first, second in STEPS
    ]


def parts(bench: Bench, group: Group) -> dict[str, dict[str, float]]:
    """What each part of the policy's work costs, after Shapley; the policy measures throughout."""
    costs = shapley(lambda chosen: bench.coalition(chosen, group).success)
    return {part: figure(cost(values)) for part, values in costs.items()}


def besides(bench: Bench, group: Group) -> list[dict[str, Any]]:
    """Players beside the ladder, each with what it loses to the one that it is compared with."""
    against = dict(zip(BESIDES, ("told, every packet", "truth", "policy names"), strict=True))
    against |= {f"policy +{extra}": "policy" for extra in EXTRA}
    rows = []
    for name, other in against.items():
        played = bench.of(name, group)
        differs = figure(lost(bench.of(other, group), played))
        rows.append({"player": name, "success": figure(won(played)), "against": other, "lost": differs})
    return rows


def mishaps(bench: Bench, group: Group) -> dict[str, Any]:
    """What the truth at once wins where a repair failed although it was right, and where none did."""
    played = bench.of("truth at once", group)
    struck = played.mishap
    return {
        "share": float(struck.mean()),
        "struck": figure(won(played, struck)) if struck.any() else None,
        "spared": figure(won(played, ~struck)),
    }


def split_by(
    bench: Bench, groups: Sequence[Group], labels: Sequence[str], of: Callable[[Group, Played], Any]
) -> list[dict[str, Any]]:
    """First diagnoses that are right, by label, over all groups together.

    Args:
        bench: what was played.
        groups: to count.
        labels: one row each.
        of: numbers of the labels i64[N, K] of a group's episodes.
    """
    rows: list[dict[str, Any]] = []
    for number, label in enumerate(labels):
        row: dict[str, Any] = {"label": label}
        for name in SEEN[1:]:
            found = [(bench.of(name, group), group) for group in groups]
            hit = np.concatenate([played.right[of(group, played) == number] for played, group in found])
            row[name] = float(hit.mean()) if hit.size else None
            row["episodes"] = int(hit.size)
        rows.append(row)
    return rows


def cells(group: Group, played: Played) -> Any:  # noqa: ANN401 - an array
    """i64[N, K]: the cell of each episode."""
    of = np.array([CELLS.index(environment.cell) for environment in group.environments])
    return np.broadcast_to(of[:, None], played.success.shape)


def curve(bench: Bench, sizes: Sizes, tell: Callable[[str], None]) -> list[dict[str, Any]]:
    """One row for each arm and number of examples; the largest of each arm also plays."""
    line, policy = bench.line, bench.policy
    most = sizes.examples[-1]
    lines = spread(line.catalog.environments("train"), most)
    pool = build_pool(lines, line.table, line.profile, seed=line.seed + COLLECT_SEED, purpose=Purpose.COLLECT)
    every = collect(policy, pool, -(-most // len(lines)))
    order = np.random.default_rng(line.seed).permutation(len(every.label))
    tests = {group.name: collect(policy, bench.pool(group), group.episodes) for group in bench.groups}
    rows: list[dict[str, Any]] = []
    for arm in ARMS:
        for count, passes in zip(sizes.examples, sizes.passes, strict=True):
            made = fit(arm, chosen_of(every, order[:count]), passes=passes, seed=line.seed)
            row: dict[str, Any] = {"arm": arm, "examples": count, "passes": passes}
            row["right"] = {name: float(made.right(test).mean()) for name, test in tests.items()}
            if count == most:
                row["plays"] = {}
                for group in bench.groups:
                    size = len(group.environments)
                    named = bench.play(HybridPlayer(arm, policy, None, ClassifierDiagnosis(made, size)), group)
                    whole = bench.play(HybridPlayer(arm, policy, None, ClassifierDiagnosis(made, size), REST), group)
                    gained = figure(lost(whole, bench.of("policy", group)))
                    row["plays"][group.name] = {
                        "names": figure(won(named)),
                        "whole": figure(won(whole)),
                        "gain": gained,
                    }
            rows.append(row)
            tell(f"{arm}, {count:,} examples: {row['right']}")
    return rows


def groups_of(line: Line, sizes: Sizes) -> list[Group]:
    """Training and validation environments, and the hold-out where it is asked for."""
    catalog = line.catalog
    wanted = (
        ("training", "train", sizes.train, sizes.train_episodes, Purpose.VALIDATION),
        ("validation", "validation", sizes.validation, sizes.validation_episodes, Purpose.VALIDATION),
        ("hold-out", "holdout", sizes.holdout, 1, Purpose.REPORT),
    )
    return [
        Group(name, spread(catalog.environments(split), count), episodes, purpose)
        for name, split, count, episodes, purpose in wanted
        if count
    ]


def explain(package: PolicyPackage, line: Line, sizes: Sizes, tell: Callable[[str], None]) -> dict[str, Any]:
    """Everything that is stored, ready for JSON."""
    groups = groups_of(line, sizes)
    bench = Bench(line, Policy(package), groups, tell)
    content = {
        "policy": package.digest,
        "sizes": dataclasses.asdict(sizes),
        "seed": line.seed,
        "groups": [{"name": g.name, "environments": len(g.environments), "episodes": g.episodes} for g in groups],
        "ladder": {group.name: ladder(bench, group) for group in groups},
        "short": {group.name: short(bench, group) for group in groups},
        "parts": {group.name: parts(bench, group) for group in groups},
        "besides": {group.name: besides(bench, group) for group in groups},
        "mishaps": {group.name: mishaps(bench, group) for group in groups},
        "cells": split_by(bench, groups, CELLS, cells),
        "modes": split_by(bench, groups, MODES, lambda _, played: played.mode),
        "curve": curve(bench, sizes, tell) if sizes.examples else [],
    }
    found: dict[str, Any] = rounded(content)
    return found
