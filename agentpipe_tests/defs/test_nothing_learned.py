"""A run that finds nothing to learn: it ends well, without a candidate, and says why."""

from __future__ import annotations

from typing import Any

import dagster as dg
import pytest

from agentpipe.definitions import defs
from agentpipe.defs.learning import assets
from agentpipe.defs.learning.assets import policy_checkpoint
from agentpipe.defs.learning.checks import training_specs
from agentpipe.defs.learning.training import NothingLearnedError
from agentpipe.defs.partitions import candidates, last_closed_day
from agentpipe.defs.resources import Workspace
from agentpipe.defs.under_way import SKIPPED_TAG
from agentpipe.errors import LearningError
from agentpipe_tests.defs.homes import QUIET

KEY = f"{last_closed_day()}|feedback"
WHY = "nothing was learned from the labels of 2026-11-29: none of 12 new labels can teach anything"
Events = dg.DagsterEventType


def make(error: Exception | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in for the training."""

    def made(_work: object) -> str:
        if error is not None:
            raise error
        return "a candidate"

    monkeypatch.setattr(assets, "make", made)


def of(result: dg.ExecuteInProcessResult, kind: dg.DagsterEventType) -> list[dg.DagsterEvent]:
    return [event for event in result.all_events if event.event_type is kind]


def test_a_run_with_nothing_to_learn_is_no_failure_and_what_follows_is_skipped(
    home: Workspace, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTPIPE_HOME", str(home.root))
    make(NothingLearnedError(WHY, reason="nothing_to_move"), monkeypatch)
    job = defs.resolve_job_def("candidate")
    result = job.execute_in_process(instance=instance, partition_key=KEY, run_config=QUIET)
    assert result.success
    steps = {event.step_key for event in of(result, Events.STEP_SKIPPED)}
    assert steps >= {"holdout_evaluation", "failure_attribution", "policy_drift", "triton_bundle", "publish"}
    assert [event.step_key for event in of(result, Events.STEP_SUCCESS)] == ["policy_checkpoint"]
    assert of(result, Events.ASSET_MATERIALIZATION) == []
    assert of(result, Events.ASSET_CHECK_EVALUATION) == []
    assert home.references.find("policy_checkpoint", KEY) is None
    run = instance.get_run_by_id(result.run_id)
    assert run is not None
    assert run.tags[SKIPPED_TAG] == WHY
    [event] = of(result, Events.ASSET_OBSERVATION)
    observed = event.asset_observation_data.asset_observation
    assert (observed.asset_key.path, observed.partition) == (["policy_checkpoint"], KEY)
    assert observed.metadata["skipped"].value == WHY


@dg.asset(deps=[policy_checkpoint], partitions_def=candidates)
def after() -> None:
    """What follows."""


def run(workspace: Workspace, instance: dg.DagsterInstance, **options: Any) -> dg.ExecuteInProcessResult:
    chosen = {"partition_key": KEY, "resources": {"workspace": workspace}, "run_config": QUIET, **options}
    return dg.materialize([policy_checkpoint, after], instance=instance, raise_on_error=False, **chosen)


@pytest.mark.parametrize("passed", [True, False])
def test_a_candidate_comes_with_its_checks_and_those_that_fail_stop_what_follows(
    home: Workspace, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch, passed: bool
) -> None:
    names = [spec.name for spec in training_specs()]
    make(None, monkeypatch)
    results = [dg.AssetCheckResult(check_name=name, passed=passed or name != "entropy") for name in names]
    monkeypatch.setattr(
        assets, "_result", lambda *_: dg.MaterializeResult(data_version=dg.DataVersion("v"), check_results=results)
    )
    result = run(home, instance)
    judged = [event.asset_check_evaluation_data for event in of(result, Events.ASSET_CHECK_EVALUATION)]
    assert sorted(found.check_name for found in judged) == sorted(names)
    materialised = [event.asset_key.path for event in of(result, Events.ASSET_MATERIALIZATION) if event.asset_key]
    assert materialised == [["policy_checkpoint"], *([["after"]] if passed else [])]
    assert result.success is passed


@pytest.mark.parametrize("error", [LearningError("training was interrupted"), LearningError("it forgot")])
def test_what_is_wrong_with_a_training_stays_a_failure(
    home: Workspace, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch, error: LearningError
) -> None:
    make(error, monkeypatch)
    result = run(home, instance)
    assert not result.success
    assert [event.step_key for event in of(result, Events.STEP_FAILURE)] == ["policy_checkpoint"]


def test_its_checks_alone_train_nothing(
    home: Workspace, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(AssertionError("trained"), monkeypatch)
    checks = dg.AssetSelection.checks_for_assets(policy_checkpoint)
    result = run(home, instance, selection=checks, partition_key=None)
    [failure] = of(result, Events.STEP_FAILURE)
    assert "judged with the training itself" in str(failure.step_failure_data.error)
