"""The asset graph, written out: keys, partitions, dependencies, checks and jobs."""

from __future__ import annotations

from textwrap import dedent

import dagster as dg
import pytest

from agentpipe.definitions import defs
from agentpipe.defs.graph import SHAPES, Take
from agentpipe.defs.jobs import STAGES

GRAPH = """
    agent_incidents                 deployment    -            <- champion
    agent_shadow                    deployment    -            <- champion
    bundle_server_check             deployment    day|trigger  <- triton_bundle, triton_server
    champion                        deployment    -            <- publish
    champion_evaluation             evaluation    -            <- champion, disturbance_table, line_profile
    disturbance_table               environments  cell         <- table_source
    environment_catalog             environments  -            <- line_profile
    environment_pool_health         environments  cell         <- disturbance_table, environment_catalog, line_profile
    failure_attribution             evaluation    day|trigger  <- holdout_evaluation
    feedback_inbox                  feedback      -            <-
    holdout_evaluation              evaluation    day|trigger  <- policy_checkpoint
    line_profile                    environments  -            <- machine_history
    machine_history                 environments  -            <-
    observation_statistics          environments  -            <- disturbance_table, environment_catalog, line_profile
    policy_checkpoint               learning      day|trigger  <- observation_statistics, production_feedback, trajectories
    policy_drift                    evaluation    day|trigger  <- policy_checkpoint
    production_feedback             feedback      day          <- feedback_inbox
    publish                         deployment    day|trigger  <- bundle_server_check, triton_bundle
    table_source                    environments  cell         <-
    trajectories                    experience    cell         <- environment_catalog, environment_pool_health, line_profile
    triton_bundle                   deployment    day|trigger  <- failure_attribution, holdout_evaluation, policy_checkpoint, policy_drift
    triton_server                   deployment    -            <-
    weekly_drift_report             evaluation    week         <- policy_drift, production_feedback
"""  # noqa: E501 - one asset, one line

CHECKS = """
    bundle_server_check      server_available       blocks
    bundle_server_check      server_batching        blocks
    bundle_server_check      server_configuration   blocks
    bundle_server_check      server_empty_mask      blocks
    bundle_server_check      server_loads           blocks
    bundle_server_check      server_refusals        blocks
    bundle_server_check      server_values          blocks
    environment_catalog      generalisation_bound   warns
    environment_pool_health  reset_p99              blocks
    environment_pool_health  slow_resets            blocks
    environment_pool_health  start_success          blocks
    failure_attribution      failures_attributed    blocks
    holdout_evaluation       beats_random           blocks
    holdout_evaluation       decision_time          blocks
    holdout_evaluation       success                blocks
    holdout_evaluation       success_target         blocks
    policy_checkpoint        actor_loss             blocks
    policy_checkpoint        advantage_mean         blocks
    policy_checkpoint        circuit_breaker        blocks
    policy_checkpoint        critic_error           blocks
    policy_checkpoint        entropy                blocks
    policy_checkpoint        gradient_norm          blocks
    policy_checkpoint        plateau                blocks
    policy_checkpoint        rewards                blocks
    trajectories             buffer_size            blocks
    trajectories             idle_steps             blocks
    trajectories             influence_coverage     blocks
    trajectories             write_throughput       blocks
    triton_bundle            checkpoint_size        blocks
    triton_bundle            latency                blocks
    triton_bundle            operators              blocks
    triton_bundle            parity                 blocks
"""

JOBS = """
    approval
    candidate     bundle_server_check, failure_attribution, holdout_evaluation, policy_checkpoint, policy_drift, publish, triton_bundle
    cell          disturbance_table, environment_pool_health, trajectories
    champion      champion_evaluation
    feedback_day  production_feedback
    line          environment_catalog, line_profile
    statistics    observation_statistics
    week          weekly_drift_report
"""  # noqa: E501 - one job, one line


@pytest.fixture(scope="module")
def specs() -> dict[str, dg.AssetSpec]:
    return {spec.key.to_user_string(): spec for spec in defs.resolve_all_asset_specs()}


def kind(partitions: dg.PartitionsDefinition | None) -> str:
    if partitions is None:
        return "-"
    if isinstance(partitions, dg.StaticPartitionsDefinition):
        return "cell"
    if isinstance(partitions, dg.MultiPartitionsDefinition):
        return "|".join(dimension.name for dimension in partitions.partitions_defs)
    return "week" if "W" in type(partitions).__name__ else "day"


def lines(text: str) -> list[str]:
    return [line.rstrip() for line in dedent(text).strip().splitlines()]


def test_assets_partitions_and_dependencies(specs: dict[str, dg.AssetSpec]) -> None:
    written = [
        f"{name:<30}  {spec.group_name:<12}  {kind(spec.partitions_def):<11}  "
        f"<- {', '.join(sorted(dep.asset_key.to_user_string() for dep in spec.deps))}".rstrip()
        for name, spec in sorted(specs.items())
    ]
    assert written == lines(GRAPH)


def test_checks_and_whether_they_block() -> None:
    repository = defs.get_repository_def()
    graph = repository.asset_graph
    written = [
        f"{key.asset_key.to_user_string():<23}  {key.name:<21}  {'blocks' if graph.get(key).blocking else 'warns'}"
        for key in sorted(graph.asset_check_keys, key=lambda key: (key.asset_key.to_user_string(), key.name))
    ]
    assert written == lines(CHECKS)


def keys(job: dg.JobDefinition) -> set[dg.AssetKey]:
    """What a job materialises; nothing where it is a person's decision."""
    return set(job.asset_layer.executable_asset_keys)


def test_jobs_and_what_they_materialise() -> None:
    written = [
        f"{job.name:<12}  {', '.join(sorted(key.to_user_string() for key in keys(job)))}".rstrip()
        for job in sorted(defs.resolve_all_job_defs(), key=lambda job: job.name)
        if not job.name.startswith("__")
    ]
    assert written == lines(JOBS)


def test_the_bound_is_checked_once_the_whole_table_is_there() -> None:
    key = dg.AssetCheckKey(dg.AssetKey("environment_catalog"), "generalisation_bound")
    jobs = [job for job in defs.resolve_all_job_defs() if not job.name.startswith("__")]
    assert [job.name for job in jobs if key in job.asset_layer.asset_graph.asset_check_keys] == ["statistics"]


def test_every_asset_says_what_it_computes_and_whose_it_is(specs: dict[str, dg.AssetSpec]) -> None:
    for name, spec in specs.items():
        assert len(spec.description or "") > 60, name
        assert spec.owners == ["team:agentpipe"], name
        assert spec.kinds, name


def test_every_computed_asset_has_a_code_version(specs: dict[str, dg.AssetSpec]) -> None:
    assert {name for name, spec in specs.items() if spec.code_version} == set(SHAPES)


def test_stages_run_every_asset_after_what_it_consumes() -> None:
    order = [asset for stage in STAGES for asset in stage.assets]
    assert sorted(order) == sorted(SHAPES)
    for asset, shape in SHAPES.items():
        for upstream in shape.consumes:
            if upstream in SHAPES:
                assert order.index(upstream) < order.index(asset), f"{upstream} before {asset}"


def test_one_partition_of_the_checkpoint_consumes_every_cell_and_its_own_day(specs: dict[str, dg.AssetSpec]) -> None:
    mappings = {dep.asset_key.to_user_string(): dep.partition_mapping for dep in specs["policy_checkpoint"].deps}
    assert isinstance(mappings["trajectories"], dg.AllPartitionMapping)
    assert mappings["production_feedback"] == dg.MultiToSingleDimensionPartitionMapping("day")
    assert SHAPES["policy_checkpoint"].consumes["trajectories"] is Take.ALL


def test_the_champion_closes_the_loop_outside_the_graph(specs: dict[str, dg.AssetSpec]) -> None:
    consumers = [name for name, spec in specs.items() if any(dep.asset_key.path == ["champion"] for dep in spec.deps)]
    assert sorted(consumers) == ["agent_incidents", "agent_shadow", "champion_evaluation"]
    assert {"agent_incidents", "agent_shadow"}.isdisjoint(SHAPES), "only told of"
    assert all("champion_evaluation" not in {dep.asset_key.path[0] for dep in spec.deps} for spec in specs.values())


def test_definitions_can_be_loaded_and_executed() -> None:
    dg.Definitions.validate_loadable(defs)
