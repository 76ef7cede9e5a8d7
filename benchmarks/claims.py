"""What each technique is worth: ``python -m benchmarks.claims [--minutes N]``.

Each figure of the field's that there is something to say about is measured as the ratio, or the difference, with and
without the technique, five seeds at a stated budget (arms and claims: ``claims_table.py``; how each is measured:
``claims_measures.py``, ``claims_run.py``; when a claim counts as reproduced: ``claims_verdict.py``).

Every run is kept as soon as it is done, under the digest of what it depends on: run the same command again and it goes
on. With ``--minutes`` it stops where the next run would not fit. Where arms are missing their claims are not measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from agentpipe.storage import read_json
from benchmarks.claims_run import SMOKE, Sizes, key_of, run
from benchmarks.claims_table import ARMS, CLAIMS, COLD_TARGET, STANDARD, TARGET, learned_to
from benchmarks.claims_verdict import RULE, UNMEASURED, Estimate, estimate, spread, verdict
from benchmarks.fetched import folder
from benchmarks.measure import results_folder, stamp, store
from benchmarks.resumable import RUNS, Cache, Piece, deadline_in, plan, say_what_is_left, work
from benchmarks.seeds import interval

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from benchmarks.claims_run import Arm
    from benchmarks.claims_table import Claim

    Rows = Mapping[str, Mapping[int, Mapping[str, Any]]]
    """arm, seed, figures"""

FORMS: dict[str, tuple[Callable[[float], str], str]] = {
    "ratio": (lambda value: f"{value:.3g}", " ×"),
    "spread": (lambda value: f"{value:.3g}", " ×"),
    "difference": (lambda value: f"{100 * value:+.2f}", " points"),
    "level": (lambda value: f"{value:.1%}", ""),
}
WHAT_WAS_TRAINED = (
    "What was trained. Steps: environment steps of the policy gradient until the validation split shows the target;"
    " cloned ones before do not count. Steps/s: those of the policy gradient over the processor seconds of all threads,"
    " looks at the validation split included."
)
_WARM, _COLD = 160.0, 110.0
"""expected seconds of a run, before one was made"""


def pieces(arms: Iterable[Arm], seeds: Iterable[int], sizes: Sizes, threads: int, starts: Path) -> list[Piece]:
    """One run for each arm and seed, seed by seed, so that what is there can be compared at any time."""
    chosen = [arm for arm in arms if not arm.waiting]
    return [
        Piece(
            "cold" if arm.cold else "warm",
            f"seed {seed}, {arm.name}",
            key_of(arm, sizes, seed),
            _COLD if arm.cold else _WARM,
            functools.partial(run, arm, sizes, seed, threads, starts),
        )
        for seed in seeds
        for arm in chosen
    ]


def measured(claim: Claim, rows: Rows) -> tuple[Estimate | None, int, int]:
    """The claim over the seeds that all of its arms have.

    Returns:
        What was found; the number of seeds in which one arm did not reach the target, and of those in which none did.
    """
    by_arm = [rows.get(arm, {}) for arm in claim.arms]
    seeds = sorted(set.intersection(*(set(found) for found in by_arm)))
    if claim.kind == "spread":
        return spread(*([found[seed]["success"] for seed in seeds] for found in by_arm)), 0, 0
    values = [claim.value(*(found[seed] for found in by_arm)) for seed in seeds]
    there = [value for value in values if value is not None]
    bounds = sum(value.bound for value in there)
    return estimate([value.value for value in there], claim.kind), bounds, len(values) - len(there)


def as_rows(entries: Sequence[Mapping[str, Any]]) -> Rows:
    """Figures by arm and seed."""
    rows: dict[str, dict[int, Mapping[str, Any]]] = {}
    for entry in entries:
        rows.setdefault(entry["arm"], {})[entry["seed"]] = entry
    return rows


def standard_rows(folder: Path) -> list[dict[str, Any]]:
    """Success of whole main jobs by seed, as ``benchmarks.seeds`` stored it in ``folder``; none where it has not."""
    path = folder / "seeds.json"
    if not path.exists():
        return []
    players = {player["player"]: player["by_seed"] for player in read_json(path)["players"]}
    pairs = enumerate(zip(players["policy"], players["rules"], strict=True))
    return [
        {"arm": STANDARD, "seed": seed, "success": policy, "rules_success": rules} for seed, (policy, rules) in pairs
    ]


# ------------------------------------------------------------------------------------------------------- the page

PARTS: Final = {
    "S1": "environments",
    "S7": "orchestrator",
    "S8": "network",
    "S9": "gradient",
    "S10": "aids",
    "S12": "perception",
    "S15": "buffer",
    "S20": "hold-out",
}
"""what each system is called on the page"""


def section(content: dict[str, Any]) -> str:
    """The Markdown section of ``RESULTS.md``."""
    sizes, rows = content["sizes"], as_rows(content["rows"])
    origins = content["origins"]
    target = f"steps to {TARGET:.0%} ({COLD_TARGET:.0%} from random weights)"
    lines = [_what_was_done(sizes), "", RULE, ""]
    lines += [
        "| part | claim | field report | measured, 95 % interval | each seed | verdict |",
        "|---|---|---|---:|---|---|",
        *(_claim_line(claim, rows) for claim in CLAIMS),
        "",
        WHAT_WAS_TRAINED,
        "",
        f"| arm | seeds | success, held-out | deviation over seeds | {target} | entropy ± deviation, nats | steps/s |",
        "|---|---:|---:|---:|---:|---:|---:|",
        *(_arm_line(arm, rows[arm.name]) for arm in ARMS if arm.name in rows),
    ]
    waiting = [f"{arm.name} ({arm.waiting})" for arm in ARMS if arm.waiting]
    if waiting:
        lines += ["", f"Not measured yet: {', '.join(waiting)}."]
    if content["left"]:
        lines += ["", f"Runs that are missing: {content['left']}."]
    if len(origins["revisions"]) > 1:
        lines += ["", f"Runs of several revisions: {', '.join(origins['revisions'])}."]
    return "\n".join(lines)


def _what_was_done(sizes: Mapping[str, Any]) -> str:
    return (
        "*Field reports* are figures that are told of such systems in operation. There is no publication to cite for"
        " them, and how they were measured is not known: hence this table.\n\n"
        f"From cloned weights: {sizes['rows']:,} training environments, {sizes['warm_up_episodes']:,} expert episodes"
        f" cloned, then {sizes['budget']:,} steps of the policy gradient. From random weights: {sizes['cold_rows']:,}"
        f" environments, {sizes['cold_budget']:,} steps. Live samples only, no aid and no orchestrator but those of the"
        f" arm, learning rate constant; else the standard profile. About {sizes['looks']} looks at"
        f" {sizes['validation']} validation environments × {sizes['validation_episodes']} episodes; a target counts as"
        " reached where the non-decreasing curve nearest to the looks (isotonic regression) reaches it. Judged: the"
        f" policy of the best look, greedy, {sizes['holdout']:,} held-out environments × {sizes['holdout_episodes']}"
        " episodes. *Reach*: how much of one unit of reward that execute pays arrives in the advantage of identify"
        " (slope of the one on the other, sampled play), with GAE over the whole episode over that with GAE cut at the"
        " borders of segments; field reports do not say how theirs was measured. *50 demonstrations*: one recorded"
        " episode of the expert in each of 50 environments, learned from in several passes. *Distillation* spends the"
        " last two sevenths of the same budget on the hardest training environments alone. The standard profile's"
        " success is that of whole main jobs (`python -m benchmarks.seeds`)."
    )


def _claim_line(claim: Claim, rows: Rows) -> str:
    found, bounds, nowhere = measured(claim, rows)
    word = verdict(found, field=claim.field, neutral=claim.neutral, more_is_better=claim.more_is_better)
    remarks = [f"bounds in {bounds}"] * bool(bounds) + [f"reached by neither in {nowhere}"] * bool(nowhere)
    note = f" ({'; '.join(remarks)})" if remarks else ""
    form, unit = FORMS[claim.kind]
    whole = each = "–"
    if found is not None:
        mean, low, high, *values = (form(value) for value in (found.mean, found.low, found.high, *found.values))
        whole = f"{mean}{unit}" + ("" if word == UNMEASURED else f" [{low}, {high}]")
        each = ", ".join(values) or "–"
    return f"| {PARTS[claim.system]} | {claim.name} | {claim.says or '–'} | {whole} | {each}{note} | **{word}** |"


def _arm_line(arm: Arm, found: Mapping[int, Mapping[str, Any]]) -> str:
    rows = list(found.values())
    mean, low, high = interval([row["success"] for row in rows])
    deviation = f"{100 * statistics.stdev(row['success'] for row in rows):.2f} points" if len(rows) > 1 else "–"
    reached = [learned_to(row, COLD_TARGET if arm.cold else TARGET) for row in rows]
    there = [steps for steps in reached if steps is not None]
    steps = f"{statistics.fmean(there) / 1e6:.2f} M" if there else "–"
    if len(there) < len(reached):
        steps += f" (in {len(there)} of {len(reached)})"
    entropy = [statistics.fmean(row[name] for row in rows) for name in ("entropy_mean", "entropy_deviation")]
    rate = statistics.median(row["steps_per_processor_second"] for row in rows)
    inside = f" [{low:.1%}, {high:.1%}]" if len(rows) > 1 else ""
    return (
        f"| {arm.name} | {len(rows)} | {mean:.1%}{inside} | {deviation} | {steps} |"
        f" {entropy[0]:.3f} ± {entropy[1]:.3f} | {rate / 1e3:.1f} k |"
    )


# ------------------------------------------------------------------------------------------------ the command line


def main(arguments: Sequence[str] | None = None) -> None:
    """``python -m benchmarks.claims``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.claims", description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", help="by default 0 to 4; of a smoke run 0 and 1")
    parser.add_argument("--arms", nargs="+", choices=[arm.name for arm in ARMS], help="run these alone")
    parser.add_argument("--minutes", type=float, help="stop where the next run would take longer than is left")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cache", type=Path, help="folder of finished runs")
    parser.add_argument("--plan", action="store_true", help="say what is missing and how long it takes; run nothing")
    parser.add_argument("--smoke", action="store_true", help="tiny: shows that it works")
    parser.add_argument("--out", type=Path, help="folder of the results; of a smoke run by default a temporary one")
    chosen = parser.parse_args(arguments)
    out = results_folder(chosen.out, smoke=chosen.smoke)
    sizes, origin = SMOKE if chosen.smoke else Sizes(), stamp("python -m benchmarks.claims")
    cache = Cache(chosen.cache or (out / "runs" if chosen.smoke else RUNS / "claims"))

    def tell(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    asked = [arm for arm in ARMS if not chosen.arms or arm.name in chosen.arms]
    starts = cache.folder / "starts" if chosen.smoke else folder("claims-starts")
    seeds = chosen.seeds or list(range(2 if chosen.smoke else 5))
    wanted = pieces(asked, seeds, sizes, chosen.threads, starts)
    if chosen.plan:
        print(plan(wanted, cache))
        return
    left = work(wanted, cache, deadline_in(chosen.minutes), tell)
    every = {arm.name: pieces([arm], seeds, sizes, chosen.threads, starts) for arm in ARMS}
    kept = {name: [(piece, row) for piece in found if (row := cache.row(piece))] for name, found in every.items()}
    more = {
        "sizes": dataclasses.asdict(sizes),
        "rows": [{"arm": name, **row} for name, found in kept.items() for _, row in found] + standard_rows(out),
        "left": sum(len(every[name]) - len(found) for name, found in kept.items()),
        "origins": cache.origins(piece for found in kept.values() for piece, _ in found),
        "smoke": chosen.smoke,
    }
    store("claims", origin, [], out, **more)
    print(section(more))
    if left:
        say_what_is_left(left, cache, tell)
    elif not (chosen.arms or chosen.seeds or chosen.smoke):
        cache.keep_only(wanted)


if __name__ == "__main__":
    main()
