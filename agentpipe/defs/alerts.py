"""Failed runs and failed gates are told to a webhook."""

from __future__ import annotations

from typing import TYPE_CHECKING

import dagster as dg

from agentpipe.settings import AlertSettings

if TYPE_CHECKING:
    from agentpipe.alerts import Alert


MOST_ALERTS = 5
"""Failed runs that one tick tells of; the next tick goes on with the others."""


def alert_sensor(chosen: AlertSettings, every_seconds: int) -> dg.SensorDefinition:
    """The sensor ``failure_alerts``; without a webhook its ticks say that there is none.

    Dagster's own sensors of run failures go on to the next run where one could not be told of, since they take their
    effects for done; so the cursor is kept here.
    """

    @dg.sensor(
        name="failure_alerts",
        minimum_interval_seconds=every_seconds,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Tells the webhook of every failed run, and of the gates that failed in it. An alert that is not "
        "delivered fails the tick and is sent again at the next.",
    )
    def failure_alerts(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        return tell_failures(context.instance, context.cursor, chosen)

    return failure_alerts


def tell_failures(instance: dg.DagsterInstance, cursor: str | None, chosen: AlertSettings) -> dg.SensorResult:
    """Tells of the runs that failed after ``cursor``, oldest first; at the first look of none, there is no past yet.

    Raises:
        Failure: the first of them was not delivered; the cursor stays before it.
    """
    from agentpipe.alerts import send

    def result(told: str, place: int) -> dg.SensorResult:
        return dg.SensorResult(skip_reason=told, cursor=str(place))

    if chosen.webhook is None:
        return result("no webhook is set (AGENTPIPE_ALERTS__WEBHOOK)", _last_failure(instance))
    if cursor is None or not cursor.isdecimal():
        return result("runs that fail from now on are told of", _last_failure(instance))
    wanted = dg.RunStatusChangeRecordsFilter(dg.DagsterEventType.RUN_FAILURE, after_storage_id=int(cursor))
    place, told = int(cursor), 0
    for record in instance.fetch_run_status_changes(wanted, limit=MOST_ALERTS, ascending=True).records:
        run = instance.get_run_by_id(record.run_id)
        if run is not None:
            sent = send(chosen.webhook, failure_alert(instance, run, chosen.ui), chosen.timeout_seconds)
            if not sent.delivered and not told:
                raise dg.Failure(f"the alert was not delivered: {sent.reason}")
            if not sent.delivered:
                return result(f"told of {told} failed runs; the next was not delivered: {sent.reason}", place)
            told += 1
        place = record.storage_id
    return result(f"told of {told} failed runs" if told else "no run has failed since", place)


def _last_failure(instance: dg.DagsterInstance) -> int:
    """Where the log of failed runs ends."""
    records = instance.fetch_run_status_changes(dg.DagsterEventType.RUN_FAILURE, limit=1).records
    return records[0].storage_id if records else 0


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
