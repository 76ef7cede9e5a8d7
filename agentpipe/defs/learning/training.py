"""The three ways to a candidate: from random weights, near the champion, and from a day's labelled decisions."""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Collection
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
    from agentpipe.experience.store.shard import Shard
    from agentpipe.learning.champion import Champion
    from agentpipe.learning.finetuning import FineTuned, FineTuningResult
    from agentpipe.learning.normalisation import ObservationStatistics
    from agentpipe.learning.options import TrainingOptions
    from agentpipe.learning.package import PolicyPackage
    from agentpipe.learning.result import TrainingResult


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
    untuned: str = ""
    """why a retraining learned from no labels"""


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
    from agentpipe.learning.normalisation import ObservationStatistics
    from agentpipe.learning.options import training_options

    statistics = ObservationStatistics.load(work.workspace.references.artefact("observation_statistics"))
    options = training_options(work.workspace.settings)
    trained = _train(work, work.folder, statistics, options, current, None)
    return Made(trained.package, trained.package_path, trained)


def _near_champion(work: Step, day: dt.date, current: Champion) -> Made:
    """The policy gradient from the champion, held near it; then the day's labels that no ancestor has learned."""
    from agentpipe.learning.finetuning import NotTrained
    from agentpipe.learning.options import retraining_options
    from agentpipe.learning.package import PolicyPackage

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
    from agentpipe.learning.finetuning import NotTrained
    from agentpipe.learning.package import PolicyPackage

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
    from agentpipe.learning.stream import line_source
    from agentpipe.learning.trainer import train

    setting, chosen, directory = scene(work.workspace), cells(work), folder.resolve()
    live = dataclasses.replace(setting, seed=options.seed)
    environments = [spec for spec in setting.catalog.environments("train") if spec.cell in chosen]
    pools = home_pools(work.workspace.root, threads=setting.threads)
    trained = train(
        live.pool(environments, "TRAIN"),
        statistics,
        options,
        directory=directory,
        expert=None if initial is not None else expert(),
        validate=validator(setting),
        initial=initial,
        resume=latest(directory / "checkpoints"),
        recorded=_recorded(work, chosen),
        source=line_source(environments, setting.table.version, live.origin("TRAIN"), pools),
        parent=current.digest if current else None,
        provenance=_provenance(work, chosen),
        configuration_digest=work.configuration,
        progress=work.progress,
    )
    if trained.reason == "interrupted":
        raise LearningError("training was interrupted", remedy="run it again: it goes on from its last checkpoint")
    return trained


def _tune(work: Step, day: dt.date, policy: PolicyPackage, current: Champion) -> FineTuningResult:
    from agentpipe.feedback.labelled import read_labelled
    from agentpipe.learning.finetuning import fine_tune
    from agentpipe.learning.options import fine_tuning_options

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
