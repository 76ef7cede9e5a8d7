"""Environment distillation (S10): the hardest training environments are fine-tuned on alone.

While the policy trains, :class:`~agentpipe.learning.aids.difficulty.Difficulty` keeps book of what becomes of each
training environment's episodes. Once the training is over, or stands still, its policy goes on learning in a pool of
the ``hardest`` alone: a training like any other (:func:`~agentpipe.learning.trainer.train`), in a folder of its own,
from the main training's package, held near it by KL(before || policy), with a share of its learning rate. It can be
broken off and goes on from its last checkpoint.

Every look at the validation split holds it against the policy that it began with: the latest look counts that lacks no
more than ``distillation_tolerance`` of the best one. What comes of it is kept where it is better on the hard
environments and costs no more than that on validation; else the main training's policy stays what it was. Hard
environments are training environments: validation judges, the hold-out is never met.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from agentpipe.errors import LearningError
from agentpipe.learning import checkpoint as checkpoints
from agentpipe.learning.aids.difficulty import NAME, Met, hardest
from agentpipe.learning.trainer import train
from agentpipe.progress import silent
from agentpipe.storage import write_json

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt

    from agentpipe.environments.pool import LinePool
    from agentpipe.learning.options import TrainingOptions
    from agentpipe.learning.policy.package import PolicyPackage
    from agentpipe.learning.result import TrainingResult
    from agentpipe.learning.samples.stream import LiveSource
    from agentpipe.progress import Progress

    Rows = npt.NDArray[np.int64]

HARDEST: Final = "hardest.json"
"""what was chosen, beside the checkpoints: names, success, return, episodes"""
PIECES: Final = 4
"""minibatches of one pass over a rollout, at least"""
_OVER: Final = ("target", "budget", "patience")


@dataclass(frozen=True)
class Distilled:
    """What a distillation ended with."""

    main: TrainingResult
    """the training before it"""
    trained: TrainingResult
    """the fine-tuning"""
    environments: tuple[str, ...]
    """names of the hardest, hardest first"""
    hard_before: float
    """score on them before"""
    hard_after: float
    """and after; of what the fine-tuning kept, whether or not it is kept in the end"""
    validation_before: float
    """score on the validation split, likewise"""
    validation_after: float
    """and after"""
    kept: bool
    """the fine-tuned policy takes the place of the main one"""
    explanation: str
    """why, or why not"""

    @property
    def finished(self) -> bool:
        """Not broken off; else the same call goes on with it."""
        return self.trained.reason not in ("interrupted", "time")

    @property
    def package(self) -> PolicyPackage:
        """The policy to go on with."""
        return self.trained.package if self.kept else self.main.package

    @property
    def package_path(self) -> Path:
        """Where it was published."""
        return self.trained.package_path if self.kept else self.main.package_path


def distillation_due(main: TrainingResult, options: TrainingOptions) -> str:
    """Why the hardest environments are due for fine-tuning after ``main``; empty where they are not.

    As a remedy they are due where validation stood still: the training ended for want of a gain, or gate 4's plateau
    warns at its end. A training that a gate stopped, or that was broken off, is not built upon.
    """
    mode = options.aids.distillation
    if mode == "off" or main.reason not in _OVER:
        return ""
    if mode == "always":
        return "always"
    if main.reason == "patience":
        return f"the training ended: {main.explanation}"
    for figure in main.gates:
        if figure.name == "plateau gain" and figure.status != "pass":
            return f"gate {figure.gate}: {figure.name} {figure.value:.3g} short of {figure.target:g}"
    return ""


def nothing_met(main: TrainingResult, options: TrainingOptions) -> str:
    """Why no environment of ``main`` can be called hard; empty where some can.

    Episodes under a disturbance of the orchestrator's do not count: with a share of 1 there are no others.
    """
    least = options.aids.least_episodes
    if (Met.restored(_book(main)).episodes >= least).any():
        return ""
    return f"not done: no environment was met {least} times under its own disturbance"


def distillation_options(options: TrainingOptions, environments: int) -> TrainingOptions:
    """The options of the fine-tuning, from those of the training before it.

    Args:
        options: of the training.
        environments: that are fine-tuned on.
    """
    aids, ppo = options.aids, options.ppo
    least = max(1, ppo.rollout_steps * environments // PIECES)
    return dataclasses.replace(
        options,
        ppo=dataclasses.replace(
            ppo,
            learning_rate=ppo.learning_rate * aids.distillation_rate_share,
            minibatch=min(ppo.minibatch, least),
        ),
        warm_up=None,
        aids=dataclasses.replace(aids, curiosity="off", dynamic_lambda="off", layer_rates="off", distillation="off"),
        orchestrator=None,
        budget_steps=aids.distillation_steps,
        target=None,
        kl_weight=aids.distillation_kl_weight,
        tolerance=aids.distillation_tolerance,
    )


def distil(  # noqa: PLR0913 - one flat call, as train
    main: TrainingResult,
    options: TrainingOptions,
    *,
    names: Sequence[str],
    pool_for: Callable[[Rows], LinePool],
    judge_for: Callable[[Rows], Callable[[PolicyPackage], float]],
    validate: Callable[[PolicyPackage], float],
    directory: Path,
    oracle: npt.NDArray[np.float64] | None = None,
    source_for: Callable[[Rows], LiveSource] | None = None,
    parent: str | None = None,
    provenance: dict[str, Any] | None = None,
    configuration_digest: str = "",
    simulator_version: str | None = None,
    stop: Callable[[], bool] | None = None,
    progress: Progress = silent,
) -> Distilled:
    """Fine-tunes the policy of ``main`` on the training environments that it finds hardest.

    Args:
        main: the training before, made with ``options.aids.distillation`` on.
        options: its options.
        names: of its environments, in the order of its pool.
        pool_for: makes the pool of the environments in these rows, i64[n]; with a seed or a first episode of its own,
            lest it plays the main training's first episodes again.
        judge_for: makes what scores a policy on the environments in these rows, such as its success there.
        validate: scores a policy on the validation split, as for the main training.
        directory: of the fine-tuning; what was broken off there is gone on with.
        oracle: f64[N], the oracle's mean return in each environment; NaN where it is not known. None = the hardest are
            those of the lowest success.
        source_for: where the live episodes of these rows come from, for the shards; see ``train``.
        parent: digest of the policy that this one descends from.
        provenance: recorded in the package.
        configuration_digest: recorded, and checked when going on.
        simulator_version: recorded in the package; none = that of the main package.
        stop: asked after every update; true ends the run with a checkpoint.
        progress: told after every update.

    Raises:
        LearningError: the main training kept no book of difficulty, or met no environment often enough.
        CheckpointError: its checkpoint, or the one that is to be gone on from, is damaged or of other options.
        NonFiniteError, DiskFullError, HomeError: as in ``train``.
    """
    met, chosen = Met.restored(_book(main)), options.aids
    rows = hardest(met, names, chosen.hardest, least=chosen.least_episodes, oracle=oracle)
    hard = tuple(names[row] for row in rows)
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / HARDEST, _told(met, rows, hard))
    judge = judge_for(rows)
    trained = train(
        pool_for(rows),
        main.package.statistics,
        distillation_options(options, len(rows)),
        directory=directory,
        validate=validate,
        initial=main.package,
        resume=checkpoints.latest(directory / "checkpoints"),
        source=None if source_for is None else source_for(rows),
        parent=parent,
        provenance={**(provenance or {}), "distilled_from": main.package.digest, "hardest": len(rows)},
        configuration_digest=configuration_digest,
        simulator_version=simulator_version or main.package.simulator_version,
        action_names=main.package.action_names,
        stop=stop,
        progress=progress,
    )
    before, after = trained.validations[0][1], trained.best_validation
    assert after is not None
    figures = (judge(main.package), judge(trained.package), before, after)
    kept, explanation = _verdict(main, trained, *figures, tolerance=chosen.distillation_tolerance)
    return Distilled(main, trained, hard, *figures, kept, explanation)


def _book(main: TrainingResult) -> dict[str, npt.NDArray[Any]]:
    arrays = checkpoints.load(main.checkpoint).arrays["aids"]
    book = {key.partition("/")[2]: array for key, array in arrays.items() if key.partition("/")[0] == NAME}
    if not book:
        remedy = "train with aids.distillation on: it keeps book while the policy learns"
        raise LearningError("nothing is known of how hard each environment is", file=main.checkpoint, remedy=remedy)
    return book


def _told(met: Met, rows: Rows, names: Sequence[str]) -> list[dict[str, Any]]:
    success, total = met.success_rate, met.mean_return
    return [
        {
            "environment": name,
            "success": round(float(success[row]), 4),
            "return": round(float(total[row]), 4),
            "episodes": int(met.episodes[row]),
        }
        for row, name in zip(rows.tolist(), names, strict=True)
    ]


def _verdict(
    main: TrainingResult,
    trained: TrainingResult,
    hard_before: float,
    hard_after: float,
    before: float,
    after: float,
    *,
    tolerance: float,
) -> tuple[bool, str]:
    told = f"hard ones {hard_before:.4f} to {hard_after:.4f}, validation {before:.4f} to {after:.4f}"
    if trained.reason in ("interrupted", "time"):
        return False, f"broken off: {trained.explanation}"
    if trained.reason == "gate":
        return False, f"not kept, a gate stopped it: {trained.explanation}"
    if trained.package.digest == main.package.digest:
        return False, f"not kept: every look lacked more than {tolerance:g} of validation {before:.4f}"
    if not after >= before - tolerance:
        return False, f"not kept, it costs more than {tolerance:g}: {told}"
    if not hard_after > hard_before:
        return False, f"not kept, nothing was gained: {told}"
    return True, f"kept: {told}"
