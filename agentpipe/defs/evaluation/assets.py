"""Judging a candidate: hold-out, attribution of its failures, drift against the champion, the weekly report."""

import datetime as dt

import dagster as dg

from agentpipe.defs.drifting import drift_from
from agentpipe.defs.evaluation.checks import attribution_specs, evaluation_gates, evaluation_specs
from agentpipe.defs.evaluation.weekly import measured
from agentpipe.defs.gates import check_result, figures
from agentpipe.defs.graph import specification
from agentpipe.defs.partitions import TRIGGERS, candidate_key, days_of_week
from agentpipe.defs.players import judged_players, parent_of, policy_player
from agentpipe.defs.resources import Workspace
from agentpipe.defs.scene import scene
from agentpipe.defs.steps import markdown, plot, purpose, rows, step

SHOWN = ("success", "ci95", "decision_seconds", "decision_seconds_ci95", "episodes", "environments", "mean_steps")


@dg.asset(**specification("holdout_evaluation"), check_specs=evaluation_specs())
def holdout_evaluation(context: dg.AssetExecutionContext, workspace: Workspace) -> dg.MaterializeResult:
    """The policy on lines it has never seen, beside random, rules, diagnoser and oracle on the same episodes.

    Success with a 95 % interval clustered by environment, simulated decision time, by cell, fault mode and segment of
    failure; one row per episode in Parquet. That the splits are disjoint is checked and recorded.
    """
    from agentpipe.evaluation import plots, tables
    from agentpipe.evaluation.holdout import evaluate

    with step(context, workspace) as work:
        setting, settings = scene(workspace), workspace.settings
        training = setting.catalog.environments("train")
        package = workspace.references.artefact("policy_checkpoint", work.partition)
        report = evaluate(
            judged_players(package, setting),
            setting.catalog.environments("holdout"),
            setting.table,
            setting.profile,
            seed=settings.seed,
            purpose=purpose("REPORT"),
            episodes_per_env=settings.evaluation.episodes_per_env,
            trained_on=training,
            threads=settings.threads,
            progress=work.progress,
        )
        report.save(work.folder)
        summary = report.summary
        gates = evaluation_gates(summary, None, settings.gates)
        players = {name: {key: summary["players"][name][key] for key in SHOWN} for name in report.players}
        return work.result(
            data_version=report.digest,
            path=work.folder,
            figures={
                "success": players["policy"]["success"],
                "decision_seconds": players["policy"]["decision_seconds"],
                "players": players,
                "disjoint": summary["disjoint"],
                "gates": figures(gates),
            },
            metadata={
                "scoreboard": rows(tables.scoreboard(summary)),
                "by_cell": plot(plots.success_by_cell(summary), "success by cell"),
                "by_fault_mode": plot(plots.success_by_mode(summary), "success by fault mode"),
                "failures": plot(plots.failures(summary), "failures by segment and reason"),
                "decision_time": plot(plots.decision_time(summary), "simulated decision time"),
                "by_topology": markdown(tables.slices_markdown(summary, "topology")),
            },
            checks=[check_result(judged) for judged in gates],
        )


@dg.asset(**specification("failure_attribution"), check_specs=attribution_specs())
def failure_attribution(context: dg.AssetExecutionContext, workspace: Workspace) -> dg.MaterializeResult:
    """Which disturbance the policy's failures are due to.

    A sample of its failed hold-out episodes is replayed with one disturbance switched off, then pairs, all other random
    numbers unchanged: what turns a failure into a success is its cause. The rest is skill or missing information. The
    same is done with successes, to show how often a switch alone changes an outcome.
    """
    from agentpipe.evaluation import plots
    from agentpipe.evaluation.attribution import attribute_failures, causes_markdown
    from agentpipe.evaluation.report import EvaluationReport

    with step(context, workspace) as work:
        setting, settings = scene(workspace), workspace.settings
        references = workspace.references
        evaluation = EvaluationReport.load(references.artefact("holdout_evaluation", work.partition))
        attribution = attribute_failures(
            evaluation,
            policy_player(references.artefact("policy_checkpoint", work.partition)),
            setting.catalog.environments("holdout"),
            setting.table,
            setting.profile,
            seed=settings.seed,
            purpose=purpose("REPORT"),
            cap=settings.evaluation.attribution_episodes,
            threads=settings.threads,
            progress=work.progress,
        )
        attribution.save(work.folder)
        summary = attribution.summary
        gates = evaluation_gates(evaluation.summary, summary, settings.gates)
        return work.result(
            data_version=attribution.digest,
            path=work.folder,
            figures={
                **{key: summary[key] for key in ("failures", "sampled", "replayed", "attributed", "ci95", "causes")},
                "gates": figures(gates),
            },
            metadata={
                "causes": plot(plots.causes(summary), "causes of failure"),
                "table": markdown(causes_markdown(summary)),
            },
            checks=[check_result(judged) for judged in gates],
        )


@dg.asset(**specification("policy_drift"))
def policy_drift(context: dg.AssetExecutionContext, workspace: Workspace) -> dg.MaterializeResult:
    """How far the candidate's decisions are from those of the champion that it is compared with: its recorded parent.

    KL(candidate ‖ champion) over the same reference observations, which the rule-based player meets in training
    environments: overall, by cell, by segment, with an interval. Says NO_CHAMPION before there is one and
    INSUFFICIENT_DATA for too few rows, never "no drift".
    """
    from agentpipe.evaluation.plots import drift_by_cell
    from agentpipe.storage import canonical_json, digest_bytes, write_json

    with step(context, workspace) as work:
        current = parent_of(workspace, work.partition)
        package = workspace.references.artefact("policy_checkpoint", work.partition)
        result = drift_from(workspace, package, current)
        path = work.folder / "drift.json"
        write_json(path, result.to_dict())
        return work.result(
            data_version=digest_bytes(canonical_json(result.to_dict())),
            path=path,
            figures={
                "status": result.status,
                "kl": result.kl,
                "rows": result.rows,
                "champion": current.digest if current else "none",
                "reference": result.reference_digest,
            },
            metadata={
                "result": markdown(result.markdown()),
                **({"by_cell": plot(drift_by_cell(result), "drift by cell")} if result.kl is not None else {}),
            },
        )


@dg.asset(**specification("weekly_drift_report"))
def weekly_drift_report(context: dg.AssetExecutionContext, workspace: Workspace) -> dg.MaterializeResult:
    """A page for people: what the week's candidates, its champion and production say together.

    Policy drift of every candidate and of this week's champion against last week's; production's observations against
    training's and against last week's; labels, share judged correct, human interventions, quarantine. Too little of
    any of them is INSUFFICIENT_DATA, never "no drift". The report of a running week is preliminary.
    """
    from agentpipe.evaluation.drift import DriftResult
    from agentpipe.evaluation.weekly import DriftDay, FeedbackDay, weekly_report
    from agentpipe.storage import read_json

    with step(context, workspace) as work:
        assert work.partition is not None
        references, week = workspace.references, dt.date.fromisoformat(work.partition)
        drift = [
            DriftDay(day, trigger, DriftResult.from_dict(read_json(workspace.root / found.path)))
            for day in days_of_week(week)
            for trigger in TRIGGERS
            if (found := references.find("policy_drift", candidate_key(day, trigger)))
        ]
        feedback = [
            FeedbackDay(day, found.figure("decisions"), found.figure("verdicts"), found.figure("quarantined_rows"))
            for day in days_of_week(week)
            if (found := references.find("production_feedback", day.isoformat()))
        ]
        work.progress("measure", 0, 1)
        limit = workspace.settings.gates.drift_kl_review
        report = weekly_report(week, drift, feedback, limit=limit, measured=measured(workspace, week))
        report.save(work.folder)
        return work.result(
            data_version=report.digest,
            path=work.folder / "report.html",
            figures={"status": report.summary["status"], "candidates": len(drift), "feedback_days": len(feedback)},
            metadata={
                "report": markdown(report.markdown()),
                "page": dg.MetadataValue.url((work.folder.resolve() / "report.html").as_uri()),
                **{name: plot(png, name) for name, png in report.plots.items()},
            },
        )
