"""Everything that Dagster knows, gathered; ``workspace.yaml`` points here."""

from __future__ import annotations

import warnings

import dagster as dg

warnings.filterwarnings("ignore", category=dg.BetaWarning)  # multi-dimensional partition mappings: used on purpose
warnings.filterwarnings("ignore", category=dg.PreviewWarning)  # partitions of asset checks: used on purpose

from agentpipe.defs.environments import assets as environments  # noqa: E402 - after the filters
from agentpipe.defs.environments import checks as environment_checks  # noqa: E402
from agentpipe.defs.evaluation import assets as evaluation  # noqa: E402
from agentpipe.defs.experience import assets as experience  # noqa: E402
from agentpipe.defs.feedback import assets as feedback  # noqa: E402
from agentpipe.defs.graph import external_assets  # noqa: E402
from agentpipe.defs.jobs import asset_jobs  # noqa: E402
from agentpipe.defs.learning import assets as learning  # noqa: E402
from agentpipe.defs.resources import Workspace  # noqa: E402
from agentpipe.defs.serving import assets as serving  # noqa: E402

defs = dg.Definitions(
    assets=[
        *external_assets(),
        *dg.load_assets_from_modules([environments, experience, learning, evaluation, serving, feedback]),
    ],
    asset_checks=[environment_checks.generalisation_bound],
    jobs=asset_jobs(),
    resources={"workspace": Workspace()},
    executor=dg.in_process_executor,
)
