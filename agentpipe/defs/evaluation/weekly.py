"""What the weekly report measures besides the week's candidates: champion, production's observations, production."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import TYPE_CHECKING

from agentpipe.defs.drifting import drift_from
from agentpipe.defs.feedback.due import store
from agentpipe.defs.scene import scene

if TYPE_CHECKING:
    from agentpipe.defs.resources import Workspace
    from agentpipe.evaluation.drift_sample import Observations
    from agentpipe.evaluation.input_drift import InputDriftResult
    from agentpipe.evaluation.weekly import ChampionWeek, Measured
    from agentpipe.learning.succession.champion import Champion

WEEK = dt.timedelta(days=7)


def measured(workspace: Workspace, week: dt.date) -> Measured:
    """Everything of the week from the Monday ``week`` that is not a candidate's."""
    from agentpipe.evaluation.label_mix_store import read_week
    from agentpipe.evaluation.weekly import Measured
    from agentpipe.feedback.store import quarantine_counts

    feedback, needed = store(workspace), workspace.settings.feedback.minimum_labels
    quarantine = quarantine_counts(feedback)
    now, before = _observations(feedback, week, workspace), _observations(feedback, week - WEEK, workspace)
    return Measured(
        champion=_champions(workspace, week),
        inputs=_against(workspace, _recorded(workspace), now),
        inputs_since=_against(workspace, before, now) if len(before.values) else None,
        production=read_week(feedback, week, quarantine=quarantine, minimum_labels=needed),
        production_before=read_week(feedback, week - WEEK, minimum_labels=needed),
    )


def _champions(workspace: Workspace, week: dt.date) -> ChampionWeek:
    """The champions at the end of this week and of the one before."""
    from agentpipe.evaluation.weekly import ChampionWeek
    from agentpipe.learning.succession.champion import ChampionStore

    history = ChampionStore(workspace.root / "champion").history()
    before, now = _last_before(history, week), _last_before(history, week + WEEK)
    if before is None or now is None or before.digest == now.digest:
        return ChampionWeek(before.digest if before else None, now.digest if now else None)
    result = drift_from(workspace, workspace.root / now.package, before)
    return ChampionWeek(before.digest, now.digest, result)


def _last_before(history: tuple[Champion, ...], day: dt.date) -> Champion | None:
    """The champion at the beginning of ``day``, UTC."""
    begins = dt.datetime.combine(day, dt.time(), dt.UTC)
    earlier = [entry for entry in history if dt.datetime.fromisoformat(entry.at) < begins]
    return earlier[-1] if earlier else None


def _observations(feedback: Path, week: dt.date, workspace: Workspace) -> Observations:
    from agentpipe.environments.layout import OBSERVATION_SIZE
    from agentpipe.evaluation.label_mix_store import read_observations

    return read_observations(feedback, week, OBSERVATION_SIZE, seed=workspace.settings.seed)


def _recorded(workspace: Workspace) -> Observations:
    """What training has seen: recorded trajectories of all fresh cells."""
    from agentpipe.evaluation.drift_sample import recorded_observations
    from agentpipe.experience.store.shard import open_shard

    shards = [open_shard(workspace.references.artefact("trajectories", cell)) for cell in workspace.fresh_cells()]
    lines = {spec.index: spec.template.line_id for spec in scene(workspace).catalog.environments()}
    return recorded_observations(shards, lines, seed=workspace.settings.seed)


def _against(workspace: Workspace, reference: Observations, production: Observations) -> InputDriftResult:
    from agentpipe.environments.layout import OBSERVATION_NAMES
    from agentpipe.evaluation.input_drift import input_drift

    return input_drift(
        reference.values,
        production.values,
        OBSERVATION_NAMES,
        seed=workspace.settings.seed,
        reference_groups=reference.groups,
        production_groups=production.groups,
    )
