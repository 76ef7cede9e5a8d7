"""The policy that is in use, judged again whenever it or the disturbance table has changed."""

from typing import TYPE_CHECKING, Any

import dagster as dg

from agentpipe.defs.graph import specification
from agentpipe.defs.players import champion, policy_player
from agentpipe.defs.resources import NONE, Workspace
from agentpipe.defs.scene import scene
from agentpipe.defs.steps import Step, plot, purpose, rows, step

if TYPE_CHECKING:
    from agentpipe.evaluation.report import EvaluationReport
    from agentpipe.learning.succession.champion import Champion

SHOWN = ("success", "ci95", "decision_seconds", "episodes", "environments")


@dg.asset(**specification("champion_evaluation"))
def champion_evaluation(context: dg.AssetExecutionContext, workspace: Workspace) -> dg.MaterializeResult:
    """The champion on the hold-out under the present table, and how that compares with the day it was promoted.

    The last step after a change of the table: what the change means for the policy that runs in production. The same
    episodes as `holdout_evaluation` would play under this table. Says NO_CHAMPION before there is one.
    """
    with step(context, workspace) as work:
        current = champion(workspace)
        if current is None:
            figures: dict[str, Any] = {"status": "NO_CHAMPION"}
            return work.result(data_version=NONE, path=workspace.root, figures=figures)
        report = _judge(work, current)
        report.save(work.folder)
        played = report.summary["players"]["policy"]
        promoted_at = current.figures.get("success")
        figures = {
            "status": "OK",
            "champion": current.digest,
            "table_version": workspace.table().version,
            **{name: played[name] for name in SHOWN},
            **({"change_since_promotion": played["success"] - promoted_at} if promoted_at is not None else {}),
        }
        return work.result(
            data_version=report.digest,
            path=work.folder,
            figures=figures,
            metadata={"by_cell": _by_cell(report), "table": rows(_rows(report))},
        )


def _judge(work: Step, current: "Champion") -> "EvaluationReport":
    from agentpipe.evaluation.holdout import evaluate

    setting, settings = scene(work.workspace), work.workspace.settings
    return evaluate(
        [policy_player(work.workspace.root / current.package)],
        setting.catalog.environments("holdout"),
        setting.table,
        setting.profile,
        seed=settings.seed,
        purpose=purpose("REPORT"),
        episodes_per_env=settings.evaluation.episodes_per_env,
        trained_on=setting.catalog.environments("train"),
        threads=settings.threads,
        progress=work.progress,
    )


def _by_cell(report: "EvaluationReport") -> dg.MarkdownMetadataValue:
    from agentpipe.evaluation import plots

    return plot(plots.success_by_cell(report.summary), "success by cell")


def _rows(report: "EvaluationReport") -> list[dict[str, Any]]:
    from agentpipe.evaluation import tables

    return tables.scoreboard(report.summary)
