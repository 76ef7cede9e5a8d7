"""Failed runs and gates are told to a real receiver: each once, and again where it was not delivered."""

from collections.abc import Iterator

import dagster as dg
import pytest
from pydantic import SecretStr

from agentpipe.defs.alerts import MOST_ALERTS, alert_sensor, failure_alert, tell_failures
from agentpipe.defs.gates import check_result
from agentpipe.errors import LearningError
from agentpipe.evaluation.gates import GateResult
from agentpipe.settings import AlertSettings
from agentpipe_tests.defs.homes import QUIET
from agentpipe_tests.redis_server import free_port
from agentpipe_tests.test_alerts import SECRET, Receiver

KEY = "2026-11-24"
DAYS = dg.StaticPartitionsDefinition([KEY])
GATE = GateResult(5, "success", passed=False, severity="error", value=0.5, threshold=0.75, remedy="train longer")


@dg.asset(partitions_def=DAYS, check_specs=[dg.AssetCheckSpec("success", asset="holdout_evaluation", blocking=True)])
def holdout_evaluation() -> dg.MaterializeResult:
    """Judged, and not good enough."""
    return dg.MaterializeResult(check_results=[check_result(GATE)])


@dg.asset(partitions_def=DAYS, deps=[holdout_evaluation])
def triton_bundle() -> None:
    """Stands behind the gate."""


@dg.asset
def policy_checkpoint() -> None:
    """Fails, and what is wrong is said further down."""
    raise RuntimeError("a step failed") from LearningError("too few cells are fresh", remedy="materialise them first")


@dg.asset
def line_profile() -> None:
    """Goes well."""


JOBS = dg.Definitions(
    assets=[holdout_evaluation, triton_bundle, policy_checkpoint, line_profile],
    jobs=[
        dg.define_asset_job("candidate", selection=["holdout_evaluation", "triton_bundle"]),
        dg.define_asset_job("training", selection=["policy_checkpoint"]),
        dg.define_asset_job("line", selection=["line_profile"]),
    ],
    executor=dg.in_process_executor,
)


def run(instance: dg.DagsterInstance, job: str) -> dg.DagsterRun:
    key = KEY if job == "candidate" else None
    done = JOBS.resolve_job_def(job).execute_in_process(
        instance=instance, partition_key=key, raise_on_error=False, run_config=QUIET
    )
    assert done.success is (job == "line")
    return done.dagster_run


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.server.shutdown()
    made.server.server_close()


def settings(url: str | None) -> AlertSettings:
    webhook = None if url is None else SecretStr(url)
    return AlertSettings(webhook=webhook, timeout_seconds=2.0, ui="http://127.0.0.1:3000/")


class Sensor:
    """The sensor, tick by tick, with the cursor that the daemon keeps where a tick succeeds."""

    def __init__(self, instance: dg.DagsterInstance, url: str | None) -> None:
        self.instance, self.sensor, self.cursor = instance, alert_sensor(settings(url), 30), None

    def tick(self) -> str:
        answer = self.sensor(dg.build_sensor_context(instance=self.instance, cursor=self.cursor))
        assert isinstance(answer, dg.SensorResult)
        self.cursor = answer.cursor
        assert answer.skip_reason is not None
        return answer.skip_reason.skip_message or ""


def titles(receiver: Receiver) -> list[str]:
    return [got["blocks"][0]["text"]["text"] for got in receiver.got]


# ----------------------------------------------------------------------------------------------------- what is said


def test_a_failed_gate_names_gate_asset_partition_and_remedy(instance: dg.DagsterInstance) -> None:
    failed = run(instance, "candidate")
    alert = failure_alert(instance, failed, None)
    assert alert.title == f"Gate failed: success of holdout_evaluation in candidate[{KEY}]"
    assert alert.fields == {
        "run": failed.run_id,
        "job": "candidate",
        "partition": KEY,
        "success of holdout_evaluation": "train longer",
    }
    assert alert.link is None


def test_a_failed_run_names_its_innermost_error_and_remedy(instance: dg.DagsterInstance) -> None:
    failed = run(instance, "training")
    alert = failure_alert(instance, failed, "http://127.0.0.1:3000/")
    assert alert.title == "Run failed: training"
    assert alert.text.endswith("LearningError: too few cells are fresh - materialise them first")
    assert alert.fields["partition"] == "none"
    assert alert.link == f"http://127.0.0.1:3000/runs/{failed.run_id}"


def test_a_run_that_ended_from_outside_says_so(instance: dg.DagsterInstance) -> None:
    done = run(instance, "line")
    assert failure_alert(instance, done, None).text == "no step failed: the run ended before, or from outside"


# ------------------------------------------------------------------------------------------------------- the sensor


def test_each_failed_run_is_told_once_and_those_of_before_not_at_all(
    instance: dg.DagsterInstance, receiver: Receiver
) -> None:
    run(instance, "training")
    sensor = Sensor(instance, receiver.url)
    assert sensor.tick() == "runs that fail from now on are told of"
    for job in ("candidate", "line", "training"):
        run(instance, job)
    assert sensor.tick() == "told of 2 failed runs"
    assert sensor.tick() == "no run has failed since"
    assert titles(receiver) == [
        f"Gate failed: success of holdout_evaluation in candidate[{KEY}]",
        "Run failed: training",
    ]
    assert SECRET not in str(receiver.got)


def test_an_alert_that_was_not_delivered_was_never_sent_again(instance: dg.DagsterInstance, receiver: Receiver) -> None:
    sensor = Sensor(instance, receiver.url)
    sensor.tick()
    run(instance, "training")
    receiver.answers = [(410, {}, b"no_service", 0)]
    with pytest.raises(dg.Failure, match="the alert was not delivered: the receiver answered 410") as caught:
        sensor.tick()
    assert SECRET not in str(caught.value)
    assert sensor.tick() == "told of 1 failed runs"
    assert titles(receiver) == ["Run failed: training"] * 2
    assert sensor.tick() == "no run has failed since"


def test_what_was_delivered_is_not_told_again_where_the_next_was_not(
    instance: dg.DagsterInstance, receiver: Receiver
) -> None:
    sensor = Sensor(instance, receiver.url)
    sensor.tick()
    for job in ("training", "candidate"):
        run(instance, job)
    receiver.answers = [(200, {}, b"ok", 0), (404, {}, b"", 0)]
    assert sensor.tick() == "told of 1 failed runs; the next was not delivered: the receiver answered 404"
    assert sensor.tick() == "told of 1 failed runs"
    assert titles(receiver)[0] == "Run failed: training"
    assert titles(receiver)[1:] == [f"Gate failed: success of holdout_evaluation in candidate[{KEY}]"] * 2


def test_a_receiver_that_nobody_answers_at_fails_the_tick_without_naming_it(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentpipe.alerts.time.sleep", lambda _: None)
    sensor = Sensor(instance, f"http://127.0.0.1:{free_port()}/services/{SECRET}")
    sensor.tick()
    run(instance, "training")
    before = sensor.cursor
    with pytest.raises(dg.Failure) as caught:
        sensor.tick()
    assert SECRET not in f"{caught.value} {caught.value.description} {caught.value.metadata}"
    assert sensor.cursor == before


def test_without_a_webhook_the_tick_says_so_and_one_set_later_is_not_flooded(
    instance: dg.DagsterInstance, receiver: Receiver
) -> None:
    run(instance, "training")
    sensor = Sensor(instance, None)
    assert sensor.tick() == "no webhook is set (AGENTPIPE_ALERTS__WEBHOOK)"
    later = Sensor(instance, receiver.url)
    later.cursor = sensor.cursor
    assert later.tick() == "no run has failed since"


def test_many_failures_are_told_over_several_ticks_and_a_deleted_run_not_at_all(
    instance: dg.DagsterInstance, receiver: Receiver
) -> None:
    chosen = settings(receiver.url)
    begun = tell_failures(instance, None, chosen).cursor
    runs = [run(instance, "training") for _ in range(MOST_ALERTS + 2)]
    instance.delete_run(runs[0].run_id)
    first = tell_failures(instance, begun, chosen)
    second = tell_failures(instance, first.cursor, chosen)
    assert tell_failures(instance, second.cursor, chosen).cursor == second.cursor
    told = [field["text"] for got in receiver.got for field in got["blocks"][2]["fields"] if "*run*" in field["text"]]
    assert told == [f"*run*\n{failed.run_id}" for failed in runs[1:]]


@pytest.mark.parametrize("cursor", ['{"record_id": 5}', "-3", ""])
def test_a_cursor_of_another_kind_begins_anew(instance: dg.DagsterInstance, receiver: Receiver, cursor: str) -> None:
    run(instance, "training")
    assert (tell_failures(instance, cursor, settings(receiver.url)).cursor or "0").isdecimal()
    assert receiver.got == []
