"""What a day's labels are worth, how far nights without change drift: ``python -m benchmarks.feedback_learning``.

*A planted weakness.* A trained policy is made to misjudge one fault mode (by fine-tuning on wrong corrections), plays
production on training lines under a seed of its own, and an annotator who learns the truth later labels at most 2,000
decisions of one day, worst first. Fine-tuning on them is judged on held-out lines, mode and rest apart; the negative
control learns from the same labels with their corrections shuffled, with the looks at validation and without.

*Nights.* Retraining after retraining, each from the policy of the night before, with nothing new to learn: KL to the
parent on reference observations, and success on held-out lines; with the anchor, without, and at the training's rate.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from agentpipe.storage import read_json
from benchmarks.buffer_learning import Scene, chosen_at_random
from benchmarks.buffer_learning import Sizes as SceneSizes
from benchmarks.measure import results_folder, stamp, store
from benchmarks.production import as_labels, label_day, play_day, shuffled, success_by_mode
from benchmarks.seeds import interval

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from agentpipe.experience.store.shard import Shard
    from agentpipe.learning.options import FineTuningOptions
    from agentpipe.learning.policy.package import PolicyPackage

    Tell = Callable[[str], None]

TYPED, UNTYPED = "labels with error types", "labels without"
SHUFFLED, UNGUARDED = "shuffled corrections", "shuffled corrections, no look at validation"


@dataclass(frozen=True)
class Sizes:
    """How large the comparison is."""

    environments: int = 7_000
    warm_up_episodes: int = 300_000
    steps: int = 2_400_000
    """of the policy to begin with"""
    production: int = 5_000
    """episodes of the day"""
    labels: int = 2_000
    holdout: int = 3_000
    holdout_episodes: int = 2
    nights: int = 5
    night_steps: int = 600_000
    reference_rows: int = 20_000


SMOKE = Sizes(300, 4_000, 5_000, 300, 200, 60, 1, 1, 5_000, 1_100)
NIGHTS = {
    "nights": "a tenth of the rate, with the anchor",
    "nights_free": "a tenth of the rate, no anchor",
    "nights_full": "the training's rate, no anchor",
}
PARTS = ("weakness", *NIGHTS)
MODES_PLANTED = (2, 4, 0)
"""the fault mode that is misjudged, by seed"""


class Bench:
    """The scene and the policy to begin with, which is trained once and kept in ``folder``."""

    def __init__(self, sizes: Sizes, threads: int, folder: Path, tell: Tell) -> None:
        from agentpipe.environments.catalog import load_catalog

        scene_sizes = SceneSizes(environments=sizes.environments, validation_episodes=8)
        self.sizes, self.threads, self.folder, self.tell = sizes, threads, folder, tell
        self.scene = Scene(0, scene_sizes, threads)
        self.holdout = chosen_at_random(load_catalog().environments("holdout"), sizes.holdout, 0)
        self.names = [environment.environment_id for environment in self.holdout]
        self.policy = self._policy()

    def _policy(self) -> PolicyPackage:
        from agentpipe.environments.demonstrator import DemonstratorPlayer
        from agentpipe.environments.layout import Purpose
        from agentpipe.learning.options import training_options
        from agentpipe.learning.policy.package import PolicyPackage
        from agentpipe.learning.trainer import train
        from agentpipe.settings import Settings

        path = self.folder / "train" / "package"
        if path.exists():
            return PolicyPackage.load(path)
        chosen = training_options(Settings.model_construct(threads=self.threads, seed=0))
        assert chosen.warm_up is not None
        warm_up = dataclasses.replace(chosen.warm_up, episodes=self.sizes.warm_up_episodes)
        chosen = dataclasses.replace(
            chosen, warm_up=warm_up, stream=None, budget_steps=self.sizes.steps, patience=None, checkpoint_every=10**9
        )
        made = train(
            self.scene.pool(self.scene.train, Purpose.TRAIN),
            self.scene.statistics(),
            chosen,
            directory=self.folder / "train",
            expert=DemonstratorPlayer(),
            validate=self.scene.validate,
        )
        self.tell(f"trained a policy: validation {made.best_validation:.1%}")
        return made.package

    def judge(self, package: PolicyPackage) -> tuple[np.ndarray, np.ndarray]:
        """Success and mode of every held-out episode."""
        from agentpipe.environments.layout import Purpose

        def pool() -> Any:  # noqa: ANN401 - a pool
            return self.scene.pool(self.holdout, Purpose.REPORT)

        return success_by_mode(pool, self.names, package, self.sizes.holdout_episodes)

    def recorded(self, package: PolicyPackage, folder: Path) -> Shard:
        """What ``package`` records as the champion: one sampled episode of each training environment."""
        from agentpipe.environments.layout import Purpose
        from agentpipe.experience.record import record_trajectories
        from agentpipe.learning.policy.player import PolicyPlayer

        return record_trajectories(
            lambda some: self.scene.pool(some, Purpose.COLLECT),
            PolicyPlayer(package, greedy=False, seed=0, name="champion"),
            environments=self.scene.train,
            table=self.scene.table,
            episodes_per_env=1,
            out_dir=folder,
            cell="all",
            policy_version=package.digest,
            durability="process",
        )

    def day_pool(self, seed: int, episodes: int) -> Any:  # noqa: ANN401 - a pool
        """Production: training lines under a seed that no training used."""
        from agentpipe.environments.layout import Purpose
        from agentpipe.environments.pool import build_pool

        lines = chosen_at_random(self.scene.train, min(episodes, len(self.scene.train)), seed)
        table, profile = self.scene.table, self.scene.profile
        return build_pool(lines, table, profile, seed=1_000 + seed, purpose=Purpose.COLLECT, threads=self.threads)


def default_options(threads: int) -> FineTuningOptions:
    """The defaults, a tenth of the standard training's learning rate, and its rewards."""
    from agentpipe.learning.options import FineTuningOptions, training_options
    from agentpipe.settings import Settings

    ppo = training_options(Settings.model_construct(threads=threads)).ppo
    return FineTuningOptions(learning_rate=0.1 * ppo.learning_rate, ppo=ppo)


def planted(bench: Bench, mode: int, seed: int, folder: Path) -> PolicyPackage:
    """The policy, made to call ``mode`` something else: fine-tuned without guard on wrong corrections."""
    from agentpipe.environments.layout import A_MODE, A_SEVERITY, PHYSICAL_MODES
    from agentpipe.learning.succession.finetuning import FineTuned, fine_tune

    day = play_day(bench.day_pool(500 + seed, bench.sizes.production), bench.policy)
    columns = day.columns
    declares = (columns["action"] >= A_MODE) & (columns["action"] < A_SEVERITY)
    rows = np.flatnonzero((day.mode[columns["episode"]] == mode) & declares)
    other = A_MODE + (mode + 1) % PHYSICAL_MODES
    part = {name: column[rows] for name, column in columns.items()}
    part = {name: column[part["mask"][:, other]] for name, column in part.items()}
    poison = as_labels(part, np.full(len(part["action"]), other), "poison", typed=False)
    options = dataclasses.replace(
        default_options(bench.threads), learning_rate=2e-4, epochs=20, minibatch=32, rehearsal=32.0, kl_weight=10.0
    )
    shard = bench.recorded(bench.policy, folder / "recorded")
    made = fine_tune(
        bench.policy, poison, recorded=[shard], options=options, directory=folder, seed=seed, threads=bench.threads
    )
    assert isinstance(made, FineTuned)
    return dataclasses.replace(made.package, labels=frozenset())


def weakness(bench: Bench, seed: int, folder: Path) -> list[dict[str, Any]]:
    """One row for the healthy policy, the planted one, and each way of labelling the day."""
    from agentpipe.environments.layout import MODES
    from agentpipe.learning.succession.finetuning import FineTuned, fine_tune

    mode = MODES_PLANTED[seed % len(MODES_PLANTED)]
    weak = planted(bench, mode, seed, folder / "planted")
    shard = bench.recorded(weak, folder / "recorded")
    day = play_day(bench.day_pool(seed, bench.sizes.production), weak)
    typed, untyped = (label_day(day, bench.sizes.labels, "day", typed=kind) for kind in (True, False))
    rows = []

    def row(name: str, package: PolicyPackage, **more: Any) -> None:  # noqa: ANN401 - figures
        success, modes = bench.judge(package)
        hit = modes == mode
        figures = {"on_mode": float(success[hit].mean()), "on_rest": float(success[~hit].mean())}
        rows.append({"seed": seed, "mode": MODES[mode], "name": name, **figures, "episodes": int(hit.sum()), **more})
        bench.tell(f"seed {seed}, {MODES[mode]}, {name}: {figures['on_mode']:.1%}, rest {figures['on_rest']:.1%}")

    row("before planting", bench.policy)
    row("planted", weak)
    mixed = shuffled(untyped, seed)
    for name, labels in ((TYPED, typed), (UNTYPED, untyped), (SHUFFLED, mixed), (UNGUARDED, mixed)):
        began = time.monotonic()
        made = fine_tune(
            weak,
            labels,
            recorded=[shard],
            options=default_options(bench.threads),
            directory=folder / "tuned",
            validate=None if name == UNGUARDED else bench.scene.validate,
            seed=seed,
            threads=bench.threads,
        )
        trained = isinstance(made, FineTuned)
        more: dict[str, Any] = {"labels": len(labels), "wrong": int((labels.verdict == 1).sum()), "kept": trained}
        package = made.package if isinstance(made, FineTuned) else weak
        row(name, package, **more, seconds=round(time.monotonic() - began, 1))
    return rows


def nights(bench: Bench, folder: Path, arm: str) -> list[dict[str, Any]]:
    """One row for each night: from the policy of the night before, on fresh episodes of the same lines."""
    from agentpipe.environments.layout import Purpose
    from agentpipe.environments.pool import build_pool
    from agentpipe.environments.rules import RulesPlayer
    from agentpipe.evaluation.challenge_result import PROMOTE
    from agentpipe.evaluation.drift import OK, policy_drift
    from agentpipe.evaluation.reference import collect_reference
    from agentpipe.learning.options import retraining_options, training_options
    from agentpipe.learning.trainer import train
    from agentpipe.settings import Settings

    scene, sizes = bench.scene, bench.sizes
    reference = collect_reference(
        scene.validation, scene.table, scene.profile, RulesPlayer(scene.profile), seed=0, rows=sizes.reference_rows
    )
    shard = bench.recorded(bench.policy, folder / "recorded")
    parent, rows = bench.policy, []
    first = bench.judge(parent)[0].mean()
    for night in range(1, sizes.nights + 1):
        settings = Settings.model_construct(threads=bench.threads, seed=night)
        options = retraining_options(settings)
        if arm != "nights":
            options = dataclasses.replace(options, kl_weight=0.0)
        if arm == "nights_full":
            options = dataclasses.replace(options, ppo=training_options(settings).ppo)
        options = dataclasses.replace(options, stream=None, budget_steps=sizes.night_steps, checkpoint_every=10**9)
        pool = build_pool(
            scene.train, scene.table, scene.profile, seed=night, purpose=Purpose.TRAIN, threads=bench.threads
        )
        began = time.monotonic()
        made = train(
            pool,
            parent.statistics,
            options,
            directory=folder / f"night-{night}",
            initial=parent,
            recorded=[shard],
            validate=scene.validate,
            parent=parent.digest,
        )
        drift, success = policy_drift(made.package, parent, reference), bench.judge(made.package)[0].mean()
        same = made.package.digest == parent.digest
        verdict = "SAME" if same else _verdict(bench, made.package, parent, night)
        promoted = verdict == PROMOTE and drift.status == OK
        row = {"night": night, "kl": drift.kl, "success": float(success), "first": float(first)}
        more = {"verdict": verdict, "promoted": promoted, "seconds": round(time.monotonic() - began, 1)}
        rows.append({**row, **more})
        bench.tell(f"night {night}, {NIGHTS[arm]}: KL {drift.kl:.4f}, {success:.2%}, {verdict}")
        parent = made.package if promoted else parent
    return rows


def _verdict(bench: Bench, candidate: PolicyPackage, champion: PolicyPackage, night: int) -> str:
    """Of the comparison that promotion rests on, with its default limits, on episodes of each night's own."""
    from agentpipe.evaluation.challenge import challenge
    from agentpipe.evaluation.challenge_looks import Look
    from agentpipe.evaluation.challenge_statistics import Limits
    from agentpipe.learning.policy.player import PolicyPlayer
    from agentpipe.settings import PromotionSettings

    scene, chosen = bench.scene, PromotionSettings()
    first, episodes = (night - 1) * chosen.episodes_per_env, chosen.episodes_per_env
    look = Look(night, 1, candidate.digest, champion.digest, "", first, episodes, "")
    found = challenge(
        PolicyPlayer(candidate),
        PolicyPlayer(champion),
        bench.holdout,
        scene.table,
        scene.profile,
        seed=0,
        look=look,
        trained_on=scene.train,
        limits=Limits(chosen.margin, chosen.cell_margin, chosen.alpha),
        threads=bench.threads,
    )
    return found.verdict


def gap_closed(rows: Sequence[dict[str, Any]], name: str) -> list[float]:
    """Of each seed, the share of the gap on the mode that ``name`` closed."""
    seeds = sorted({row["seed"] for row in rows})
    at = {(row["seed"], row["name"]): row["on_mode"] for row in rows}
    return [
        (at[seed, name] - at[seed, "planted"]) / (at[seed, "before planting"] - at[seed, "planted"]) for seed in seeds
    ]


def section(content: dict[str, Any]) -> str:
    """The Markdown section of ``RESULTS.md``."""
    sizes, rows = content["sizes"], content["weakness"]
    parts = [
        (
            f"One trained policy; in each seed one fault mode is planted as a weakness, {sizes['production']:,}"
            f" episodes of production are played, at most {sizes['labels']:,} decisions of failed episodes are"
            f" labelled, worst first, up to the first wrong diagnosis of an episode. Default options."
            f" {sizes['holdout']:,} held-out lines × {sizes['holdout_episodes']} episodes, common to all rows. Gap:"
            f" from the planted policy to the one before planting; rest: success on all other modes, against the"
            f" planted policy. 95 % t intervals over"
            f" {len({row['seed'] for row in rows})} seeds."
        ),
        "",
        "| learned from | success on the mode, each seed | gap closed | rest, points |",
        "|---|---|---:|---:|",
    ]
    for name in dict.fromkeys(row["name"] for row in rows):
        mine = [row for row in rows if row["name"] == name]
        each = ", ".join(f"{row['mode']} {row['on_mode']:.1%}" for row in mine)
        closed, rest = "–", "–"
        if name not in ("before planting", "planted"):
            base = {row["seed"]: row["on_rest"] for row in rows if row["name"] == "planted"}
            closed = _with_interval(gap_closed(rows, name), "{:.0%}")
            rest = _with_interval([100 * (row["on_rest"] - base[row["seed"]]) for row in mine], "{:+.2f}")
        refusals = sum(not row.get("kept", True) for row in mine)
        refused = f" (in {refusals} of {len(mine)} refused for forgetting)" if refusals else ""
        parts.append(f"| {name}{refused} | {each} | {closed} | {rest} |")
    parts += ["", *_nights_table(content, sizes)]
    return "\n".join(parts)


def _nights_table(content: dict[str, Any], sizes: dict[str, Any]) -> list[str]:
    lines = [
        (
            f"Nights without change: each retrains the policy of the night before for {sizes['night_steps']:,} steps on"
            f" fresh episodes; KL(candidate ‖ parent) on {sizes['reference_rows']:,} reference observations, nats."
            " Promoted: not worse in the comparison with its default limits, and drift within its limit; a night that"
            " is not promoted leaves the policy of the night before."
        ),
        "",
        "| nights | KL to the parent, each night | promoted | success, each night | success before |",
        "|---|---|---:|---|---:|",
    ]
    for arm, name in NIGHTS.items():
        found = content.get(arm)
        if found:
            each = ", ".join(f"{row['kl']:.4f}" for row in found)
            success = ", ".join(f"{row['success']:.1%}" for row in found)
            promoted = f"{sum(row['promoted'] for row in found)} of {len(found)}"
            lines.append(f"| {name} | {each} | {promoted} | {success} | {found[0]['first']:.1%} |")
    return lines


def _with_interval(values: Sequence[float], form: str) -> str:
    mean, low, high = interval(values)
    return f"{form.format(mean)} [{form.format(low)}, {form.format(high)}]" if len(values) > 1 else form.format(mean)


def main(arguments: Sequence[str] | None = None) -> None:
    """``python -m benchmarks.feedback_learning``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.feedback_learning", description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="measured now; others stay as stored")
    parser.add_argument("--policy", type=Path, help="folder that keeps the trained policy; one that is there is used")
    parser.add_argument("--smoke", action="store_true", help="tiny: shows that it works")
    parser.add_argument("--out", type=Path, help="folder of the results; of a smoke run by default a temporary one")
    chosen = parser.parse_args(arguments)
    chosen.out = results_folder(chosen.out, smoke=chosen.smoke)
    sizes, origin = SMOKE if chosen.smoke else Sizes(), stamp("python -m benchmarks.feedback_learning")

    def tell(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    stored = chosen.out / "feedback_learning.json"
    before = read_json(stored) if stored.exists() else {}
    more = {part: before.get(part, []) for part in PARTS} | {part: [] for part in chosen.parts}
    more |= {"sizes": dataclasses.asdict(sizes), "smoke": chosen.smoke}
    with tempfile.TemporaryDirectory(prefix="agentpipe-feedback-learning-") as temporary:
        folder = Path(temporary)
        bench = Bench(sizes, chosen.threads, chosen.policy or folder, tell)
        for seed in chosen.seeds if "weakness" in chosen.parts else ():
            more["weakness"] += weakness(bench, seed, folder / f"seed-{seed}")
            store("feedback_learning", origin, [], chosen.out, **more)
        for arm in (part for part in NIGHTS if part in chosen.parts):
            more[arm] = nights(bench, folder / arm, arm)
            store("feedback_learning", origin, [], chosen.out, **more)
    print(section(more))


if __name__ == "__main__":
    main()
