"""The three ways to a candidate: from random weights, near the champion, and from a day's labelled decisions."""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentpipe.defs.feedback.due import store
from agentpipe.defs.partitions import split_candidate
from agentpipe.defs.players import champion, expert, validator
from agentpipe.defs.scene import scene
from agentpipe.defs.steps import Step
from agentpipe.environments.parameters import CELLS
from agentpipe.errors import LearningError
from agentpipe.storage import digest_bytes

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from agentpipe.environments.catalog import EnvironmentSpec
    from agentpipe.experience.store.shard import Shard
    from agentpipe.learning.aids.distillation import Distilled
    from agentpipe.learning.cloning.demonstrations import Demonstrations
    from agentpipe.learning.options import TrainingOptions
    from agentpipe.learning.policy.normalisation import ObservationStatistics
    from agentpipe.learning.policy.package import PolicyPackage
    from agentpipe.learning.result import TrainingResult
    from agentpipe.learning.succession.champion import Champion
    from agentpipe.learning.succession.finetuning import FineTuned, FineTuningResult

    Rows = npt.NDArray[np.int64]


HARD_EPISODES = 4
"""Episodes of each of the hardest environments that a policy is judged by, before and after."""


class NothingLearnedError(LearningError):
    """Raised when a day's labels have nothing to teach: there is no candidate, and nothing is wrong."""


@dataclass(frozen=True)
class Made:
    """A candidate, and how it came about."""

    package: PolicyPackage
    path: Path
    trained: TrainingResult | None = None
    """the policy gradient, where there was one"""
    tuned: FineTuned | None = None
    """the fine-tuning, where there was one"""
    distilled: Distilled | None = None
    """the fine-tuning on the hardest training environments, where there was one"""
    untuned: str = ""
    """why a retraining learned from no labels"""
    undistilled: str = ""
    """why there was no fine-tuning on the hardest training environments though it was due"""


def make(work: Step) -> Made:
    """Makes the candidate of one partition, as its trigger asks.

    Raises:
        NothingLearnedError: there is nothing for a feedback candidate to learn.
        LearningError: interrupted, or there is nothing for a feedback candidate to start from, or it forgot too much.
    """
    assert work.partition is not None
    day, trigger = split_candidate(work.partition)
    current = champion(work.workspace)
    if trigger == "feedback":
        return _from_labels(work, day, current)
    if trigger == "manual" or current is None:
        return _from_scratch(work, current)
    return _near_champion(work, day, current)


def cells(work: Step) -> list[str]:
    """The cells that are learned from: those that are fresh; a failed one is left out.

    Raises:
        LearningError: too few are.
    """
    fresh, needed = work.workspace.fresh_cells(), work.workspace.settings.schedule.cells_needed
    if len(fresh) < needed:
        missing = ", ".join(cell for cell in CELLS if cell not in fresh)
        raise LearningError(
            f"{len(fresh)} of 15 cells are fresh, {needed} are needed", cells=missing, remedy="materialise them first"
        )
    return fresh


def _from_scratch(work: Step, current: Champion | None) -> Made:
    from agentpipe.learning.aids.distillation import distillation_due, nothing_met
    from agentpipe.learning.options import training_options
    from agentpipe.learning.policy.normalisation import ObservationStatistics

    statistics = ObservationStatistics.load(work.workspace.references.artefact("observation_statistics"))
    options = training_options(work.workspace.settings)
    trained = _train(work, work.folder, statistics, options, current, None)
    due = distillation_due(trained, options)
    if not due:
        return Made(trained.package, trained.package_path, trained)
    if why_not := nothing_met(trained, options):
        return Made(trained.package, trained.package_path, trained, undistilled=f"due ({due}), {why_not}")
    distilled = _distil(work, trained, options, current, due)
    return Made(distilled.package, distilled.package_path, trained, distilled=distilled)


def _near_champion(work: Step, day: dt.date, current: Champion) -> Made:
    """The policy gradient from the champion, held near it; then the day's labels that no ancestor has learned."""
    from agentpipe.learning.options import retraining_options
    from agentpipe.learning.policy.package import PolicyPackage
    from agentpipe.learning.succession.finetuning import NotTrained

    initial = PolicyPackage.load(work.workspace.root / current.package)
    options = dataclasses.replace(retraining_options(work.workspace.settings), seed=_own_seed(work))
    trained = _train(work, work.folder / "retraining", initial.statistics, options, current, initial)
    tuned = _tune(work, day, trained.package, current)
    if isinstance(tuned, NotTrained):
        return Made(trained.package, trained.package_path, trained, untuned=tuned.explanation)
    return Made(tuned.package, tuned.package_path, trained, tuned)


def _own_seed(work: Step) -> int:
    """A seed for each night: no two of them meet the same episodes."""
    text = f"{work.workspace.settings.seed}:{work.partition}"
    return int(digest_bytes(text.encode())[:12], 16)


def _from_labels(work: Step, day: dt.date, current: Champion | None) -> Made:
    from agentpipe.learning.policy.package import PolicyPackage
    from agentpipe.learning.succession.finetuning import NotTrained

    if current is None:
        raise LearningError("there is no champion yet that could learn from feedback", remedy="run agentpipe run first")
    tuned = _tune(work, day, PolicyPackage.load(work.workspace.root / current.package), current)
    if isinstance(tuned, NotTrained):
        error = LearningError if tuned.reason == "forgetting" else NothingLearnedError
        raise error(f"nothing was learned from the labels of {day}: {tuned.explanation}", reason=tuned.reason)
    return Made(tuned.package, tuned.package_path, tuned=tuned)


def _train(
    work: Step,
    folder: Path,
    statistics: ObservationStatistics,
    options: TrainingOptions,
    current: Champion | None,
    initial: PolicyPackage | None,
) -> TrainingResult:
    from agentpipe.experience.origin import home_pools
    from agentpipe.learning.checkpoint import latest
    from agentpipe.learning.samples.stream import line_source
    from agentpipe.learning.trainer import train

    setting, chosen, directory = scene(work.workspace), cells(work), folder.resolve()
    live = dataclasses.replace(setting, seed=options.seed)
    environments = [spec for spec in setting.catalog.environments("train") if spec.cell in chosen]
    pools = home_pools(work.workspace.root, threads=setting.threads)
    shown = None if initial is not None else _demonstrations(work, options)
    trained = train(
        live.pool(environments, "TRAIN"),
        statistics,
        options,
        directory=directory,
        expert=None if initial is not None else expert(),
        demonstrations=shown,
        validate=validator(setting),
        initial=initial,
        resume=latest(directory / "checkpoints"),
        recorded=_recorded(work, chosen),
        source=line_source(environments, setting.table.version, live.origin("TRAIN"), pools),
        parent=current.digest if current else None,
        provenance={**_provenance(work, chosen), **({} if shown is None else {"demonstrations": shown.digest})},
        configuration_digest=work.configuration,
        progress=work.progress,
    )
    if trained.reason == "interrupted":
        raise LearningError("training was interrupted", remedy="run it again: it goes on from its last checkpoint")
    return trained


def _demonstrations(work: Step, options: TrainingOptions) -> Demonstrations | None:
    """The recorded episodes that the settings name, to be cloned instead of the built-in expert."""
    path = work.workspace.settings.training.demonstrations
    if path is None:
        return None
    from agentpipe.environments.layout import ACTION_COUNT, OBSERVATION_SIZE
    from agentpipe.feedback.schema import FeedbackShape
    from agentpipe.learning.cloning.demonstrations import read_demonstrations

    chosen, shape = options.demonstrations, FeedbackShape(OBSERVATION_SIZE, ACTION_COUNT)
    return read_demonstrations([path], shape, least=chosen.least, successes_only=chosen.successes_only)


def _distil(
    work: Step, trained: TrainingResult, options: TrainingOptions, current: Champion | None, due: str
) -> Distilled:
    """Fine-tunes on the hardest training environments, whose episodes are neither those of the training nor judged.

    Raises:
        LearningError: interrupted; or what :func:`~agentpipe.learning.aids.distillation.distil` raises.
    """
    from agentpipe.evaluation.rollout import play_first_episodes
    from agentpipe.experience.origin import home_pools
    from agentpipe.learning.aids.distillation import distil
    from agentpipe.learning.policy.player import PolicyPlayer
    from agentpipe.learning.samples.stream import line_source

    setting, chosen = scene(work.workspace), cells(work)
    live, judged = (dataclasses.replace(setting, seed=_seed_for(options.seed, name)) for name in ("hardest", "judged"))
    environments = [spec for spec in setting.catalog.environments("train") if spec.cell in chosen]
    names = [spec.environment_id for spec in environments]
    pools = home_pools(work.workspace.root, threads=setting.threads)

    def at(rows: Rows) -> list[EnvironmentSpec]:
        return [environments[row] for row in rows.tolist()]

    def judge_for(rows: Rows) -> Callable[[PolicyPackage], float]:
        hard = [names[row] for row in rows.tolist()]

        def score(package: PolicyPackage) -> float:
            pool, player = judged.pool(at(rows), "TRAIN"), PolicyPlayer(package)
            played = play_first_episodes(pool, player, HARD_EPISODES, environment_ids=hard)
            return float(played["success"].mean())

        return score

    distilled = distil(
        trained,
        options,
        names=names,
        pool_for=lambda rows: live.pool(at(rows), "TRAIN"),
        judge_for=judge_for,
        validate=validator(setting),
        directory=work.folder.resolve() / "distillation",
        source_for=lambda rows: line_source(at(rows), setting.table.version, live.origin("TRAIN"), pools),
        parent=current.digest if current else None,
        provenance={**_provenance(work, chosen), "distillation_due": due},
        configuration_digest=work.configuration,
        progress=work.progress,
    )
    if not distilled.finished:
        raise LearningError("distillation was interrupted", remedy="run it again: it goes on from its last checkpoint")
    return distilled


def _seed_for(seed: int, name: str) -> int:
    """A seed for each of a training's parts: none of them meets the episodes of another."""
    return int(digest_bytes(f"{seed}:{name}".encode())[:12], 16)


def _tune(work: Step, day: dt.date, policy: PolicyPackage, current: Champion) -> FineTuningResult:
    from agentpipe.feedback.labelled import read_labelled
    from agentpipe.learning.options import fine_tuning_options
    from agentpipe.learning.succession.finetuning import fine_tune

    setting, chosen, settings = scene(work.workspace), cells(work), work.workspace.settings
    return fine_tune(
        policy,
        read_labelled(store(work.workspace), day),
        recorded=_recorded(work, chosen),
        options=fine_tuning_options(settings),
        directory=work.folder.resolve(),
        validate=validator(setting),
        seed=settings.seed,
        threads=settings.threads,
        progress=work.progress,
        parent=current.digest,
        provenance=_provenance(work, chosen),
        configuration_digest=work.configuration,
    )


def _recorded(work: Step, chosen: Collection[str]) -> list[Shard]:
    from agentpipe.experience.store.shard import open_shard

    return [open_shard(work.workspace.references.artefact("trajectories", cell)) for cell in chosen]


def _provenance(work: Step, chosen: Collection[str]) -> dict[str, Any]:
    from agentpipe.environments.layout import SIMULATOR_VERSION

    workspace, setting = work.workspace, scene(work.workspace)
    return {
        "partition": work.partition,
        "simulator_version": SIMULATOR_VERSION,
        "table_version": setting.table.version,
        "line_profile": setting.profile.digest,
        "catalog": setting.catalog.digest,
        "trajectories": {cell: workspace.references.version("trajectories", cell) for cell in chosen},
    }
