"""Everything that Dagster knows, gathered; ``workspace.yaml`` points here."""

from __future__ import annotations

import dagster as dg

from agentpipe.defs.environments import assets as environments
from agentpipe.defs.environments import checks as environment_checks
from agentpipe.defs.environments import sensors as environment_sensors
from agentpipe.defs.evaluation import assets as evaluation
from agentpipe.defs.evaluation import champion as champion_evaluation
from agentpipe.defs.experience import assets as experience
from agentpipe.defs.feedback import assets as feedback
from agentpipe.defs.graph import external_assets
from agentpipe.defs.jobs import asset_jobs
from agentpipe.defs.learning import assets as learning
from agentpipe.defs.resources import Workspace
from agentpipe.defs.serving import assets as serving

defs = dg.Definitions(
    assets=[
        *external_assets(),
        *dg.load_assets_from_modules(
            [environments, experience, learning, evaluation, champion_evaluation, serving, feedback]
        ),
    ],
    asset_checks=[environment_checks.generalisation_bound],
    jobs=asset_jobs(),
    sensors=[environment_sensors.table_changes],
    resources={"workspace": Workspace()},
    executor=dg.in_process_executor,
)
