"""Everything that Dagster knows, gathered; ``workspace.yaml`` points here."""

from __future__ import annotations

import dagster as dg

from agentpipe.defs.alerts import alert_sensor
from agentpipe.defs.environments import assets as environments
from agentpipe.defs.environments import checks as environment_checks
from agentpipe.defs.environments.sensors import table_sensor
from agentpipe.defs.evaluation import assets as evaluation
from agentpipe.defs.evaluation import champion as champion_evaluation
from agentpipe.defs.evaluation.sensors import champion_sensor
from agentpipe.defs.experience import assets as experience
from agentpipe.defs.feedback import assets as feedback
from agentpipe.defs.feedback.sensors import feedback_sensor
from agentpipe.defs.graph import external_assets
from agentpipe.defs.interrupted import interrupted_sensor
from agentpipe.defs.jobs import asset_jobs
from agentpipe.defs.learning import assets as learning
from agentpipe.defs.learning.schedules import nightly_schedule
from agentpipe.defs.learning.sensors import nightly_sensor
from agentpipe.defs.resources import Workspace
from agentpipe.defs.serving import assets as serving
from agentpipe.defs.serving import server_check
from agentpipe.defs.serving.jobs import approval
from agentpipe.defs.serving.sensors import agents_sensor
from agentpipe.settings import load_settings

_settings = load_settings()
_chosen = _settings.schedule

defs = dg.Definitions(
    assets=[
        *external_assets(),
        *dg.load_assets_from_modules(
            [environments, experience, learning, evaluation, champion_evaluation, serving, server_check, feedback]
        ),
    ],
    asset_checks=[environment_checks.generalisation_bound],
    jobs=[*asset_jobs(), approval],
    schedules=[nightly_schedule(_chosen)],
    sensors=[
        table_sensor(_chosen),
        feedback_sensor(_chosen),
        nightly_sensor(_chosen),
        champion_sensor(_chosen),
        agents_sensor(_chosen),
        interrupted_sensor(_chosen),
        alert_sensor(_settings.alerts, _chosen.every_seconds),
    ],
    resources={"workspace": Workspace()},
    executor=dg.in_process_executor,
)
