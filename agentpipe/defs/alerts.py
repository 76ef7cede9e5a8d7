"""Failed runs and failed gates are told to a webhook."""

from __future__ import annotations

from typing import TYPE_CHECKING

import dagster as dg

from agentpipe.settings import AlertSettings

if TYPE_CHECKING:
    from agentpipe.alerts import Alert


def alert_sensor(chosen: AlertSettings, every_seconds: int) -> dg.SensorDefinition:
    """The sensor ``failure_alerts``; without a webhook its ticks say that there is none."""

    @dg.run_failure_sensor(
        name="failure_alerts",
        minimum_interval_seconds=every_seconds,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Tells the webhook of every failed run, and of the gates that failed in it. An alert that is not "
        "delivered fails the tick and is sent again at the next.",
    )
    def failure_alerts(context: dg.RunFailureSensorContext) -> dg.SkipReason | None:
        from agentpipe.alerts import send

        if chosen.webhook is None:
            return dg.SkipReason("no webhook is set (AGENTPIPE_ALERTS__WEBHOOK)")
        sent = send(
            chosen.webhook, failure_alert(context.instance, context.dagster_run, chosen.ui), chosen.timeout_seconds
        )
        if not sent.delivered:
            raise dg.Failure(f"the alert was not delivered: {sent.reason}")
        return None

    return failure_alerts


def failure_alert(instance: dg.DagsterInstance, run: dg.DagsterRun, ui: str | None) -> Alert:
    """What somebody should know of a failed run: its gates that failed, or its first error."""
    from agentpipe.alerts import Alert

    partition = run.tags.get("dagster/partition")
    name = f"{run.job_name}[{partition}]" if partition else run.job_name
    gates = failed_gates(instance, run.run_id)
    fields = {"run": run.run_id, "job": run.job_name, "partition": partition or "none", **gates}
    title = f"Gate failed: {', '.join(gates)} in {name}" if gates else f"Run failed: {name}"
    link = f"{ui.rstrip('/')}/runs/{run.run_id}" if ui else None
    return Alert(title, _why(instance, run.run_id), fields, link)


def failed_gates(instance: dg.DagsterInstance, run_id: str) -> dict[str, str]:
    """The checks that failed as errors in a run, each with its remedy."""
    found: dict[str, str] = {}
    for entry in instance.all_logs(run_id, of_type=dg.DagsterEventType.ASSET_CHECK_EVALUATION):
        assert entry.dagster_event is not None
        check = entry.dagster_event.asset_check_evaluation_data
        if not check.passed and check.severity is dg.AssetCheckSeverity.ERROR:
            asset = check.asset_key.to_user_string()
            found[f"{check.check_name} of {asset}"] = check.description or "see the check's metadata"
    return found


def _why(instance: dg.DagsterInstance, run_id: str) -> str:
    """The innermost error of the first step that failed, as its message says it."""
    for entry in instance.all_logs(run_id, of_type=dg.DagsterEventType.STEP_FAILURE):
        assert entry.dagster_event is not None
        error = entry.dagster_event.step_failure_data.error
        while error is not None and error.cause is not None:
            error = error.cause
        if error is not None:
            return error.message.strip()
    return "no step failed: the run ended before, or from outside"
