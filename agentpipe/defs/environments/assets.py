"""The line, the catalogue, the disturbance table, the pool's health, the observation statistics."""

from typing import TYPE_CHECKING, Any

import dagster as dg

from agentpipe.defs.environments.checks import declared, health_gates, health_specs
from agentpipe.defs.gates import check_result, figures
from agentpipe.defs.graph import specification
from agentpipe.defs.players import rules
from agentpipe.defs.resources import Workspace
from agentpipe.defs.scene import scene
from agentpipe.defs.steps import markdown, plot, rows, step

if TYPE_CHECKING:
    from agentpipe.learning.policy.normalisation import ObservationStatistics


@dg.asset(**specification("line_profile"))
def line_profile(context: dg.AssetExecutionContext, workspace: Workspace) -> dg.MaterializeResult:
    """Sensor channels, fault signatures and fault frequencies of the line.

    From a machine-history table when one is given (class-conditional means, covariances and prevalences of its failure
    modes), else the project's own profile. The report says what was fitted, from how many rows, and what was set aside.
    """
    from agentpipe.environments.line_profile import default_profile, save_profile
    from agentpipe.environments.machine_history import fit_profile

    with step(context, workspace) as work:
        history = workspace.settings.machine_history
        work.progress("fit" if history else "read", 0, 1)
        profile = fit_profile(history) if history else default_profile()
        path = workspace.root / "line_profile" / f"{profile.digest[:16]}.json"
        save_profile(profile, path)
        modes = [{"mode": mode.name, "prevalence": mode.prevalence, "rows": mode.rows} for mode in profile.modes]
        structural = [{"mode": name, "prevalence": share} for name, share in profile.structural_prevalence.items()]
        return work.result(
            data_version=profile.digest,
            path=path,
            figures={"name": profile.name, "modes": len(profile.modes), "report": profile.report},
            metadata={
                "channels": rows([{"channel": c.name, "unit": c.unit, "nominal": c.nominal} for c in profile.channels]),
                "fault_modes": rows(modes + structural),
                "report": dg.MetadataValue.json(profile.report),
            },
        )


@dg.asset(**specification("environment_catalog"))
def environment_catalog(context: dg.AssetExecutionContext, workspace: Workspace) -> dg.MaterializeResult:
    """Every environment (template × disturbance kind × intensity) and its split.

    Training, validation and hold-out are disjoint by template (one template is shared between training and validation);
    this is checked here and recorded. The profile `demo` takes an even part of each split.
    """
    from agentpipe.environments.datafiles import data_dir

    with step(context, workspace) as work:
        catalog = workspace.catalog()
        counts = catalog.counts()
        fitted = {mode.name for mode in workspace.line_profile().modes}
        by_cell = [
            {"cell": cell, **{split: len(catalog.environments(split, cell)) for split in counts}}
            for cell in sorted({environment.cell for environment in catalog.environments()})
        ]
        return work.result(
            data_version=catalog.digest,
            path=data_dir() / "templates.csv",
            figures={**counts, "templates": len(catalog.templates), "modes_of_the_line": len(fitted)},
            metadata={"by_cell": rows(by_cell), "disjointness": dg.MetadataValue.json(catalog.disjointness)},
        )


@dg.asset(**specification("disturbance_table"))
def disturbance_table(context: dg.AssetExecutionContext, workspace: Workspace) -> dg.MaterializeResult:
    """The rows of one cell (disturbance kind × intensity), in the newest version of the table.

    An edit of the source becomes a new version of the whole table; the data version of a cell covers its own rows only,
    so an edit changes exactly the cells that it touches. Where a Redis is set, the version is published there.
    """
    from agentpipe.environments.table_redis_home import publish_current

    with step(context, workspace) as work:
        assert work.partition is not None
        store = workspace.table_store()
        table = store.refresh(who="disturbance_table", why=f"run {context.run.run_id}")
        published = publish_current(store, workspace.settings.redis_url)
        redis = f"version {published.current[:12]}, entry {published.number}" if published else "not set"
        own = [table.rows[index] for index in table.cell_rows(work.partition)]
        return work.result(
            data_version=table.cell_digests[work.partition],
            path=store.source_path,
            figures={"table_version": table.version, "rows": len(own)},
            metadata={"parameters": rows([_parameters(row.variant, row.values) for row in own]), "redis": redis},
        )


def _parameters(variant: object, values: tuple[float, ...]) -> dict[str, Any]:
    from agentpipe.environments.parameters import PARAMETER_NAMES

    return {"variant": variant, **dict(zip(PARAMETER_NAMES, (float(value) for value in values), strict=True))}


@dg.asset(**specification("environment_pool_health"), check_specs=health_specs())
def environment_pool_health(context: dg.AssetExecutionContext, workspace: Workspace) -> dg.MaterializeResult:
    """Starts the training environments of one cell and measures them.

    Reset latency (distribution), start success, environment steps a second, resident memory. Figures of the clock are
    not part of the data version. What only a pool of processes has (CPU share, crashes) does not apply here, nor does
    Redis (round trip, share of its connections) where none is set.
    """
    from agentpipe.environments.health import cell_health
    from agentpipe.environments.table_redis_home import redis_health
    from agentpipe.evaluation.run_plots import reset_latency
    from agentpipe.storage import write_json

    with step(context, workspace) as work:
        assert work.partition is not None
        setting, limits = scene(workspace, work.partition), workspace.settings.gates
        environments = setting.catalog.environments("train", work.partition)
        health = cell_health(
            environments,
            setting.table,
            setting.profile,
            seed=setting.seed,
            progress=work.progress,
            redis=redis_health(workspace.settings.redis_url),
        )
        path = work.folder / "health.json"
        write_json(path, health.to_json())
        measured = {
            "start_success": health.start_success,
            "reset_p99_ms": health.reset_quantile_ms(0.99),
            "slow_reset_share": health.slow_reset_share(limits.reset_p99_ms),
            **{name: value for name, value in health.redis_figures.items() if value is not None},
        }
        gates = health_gates(measured, limits)
        return work.result(
            data_version=health.digest,
            path=path,
            figures={
                "environments": len(environments),
                "table_version": setting.table.version,
                **measured,
                "steps_per_second": round(health.steps_per_second),
                "resident_mb": round(health.resident_mb, 1),
                "pool_mb": round(health.pool_mb, 1),
                "whole_pool_reset_ms": round(float(health.pool_reset_ms.mean()), 3)
                if health.pool_reset_ms.size
                else 0.0,
                "gates": figures(gates),
            },
            metadata={
                "reset_latency": plot(reset_latency(health.reset_ms, limits.reset_p99_ms), "reset latency"),
                "failures": rows([{"environment": name, "reason": reason} for name, reason in health.failures]),
                "not_applicable": dg.MetadataValue.json(health.to_json()["not_applicable"]),
            },
            checks=[check_result(judged) for judged in declared(gates)],
        )


@dg.asset(**specification("observation_statistics"))
def observation_statistics(context: dg.AssetExecutionContext, workspace: Workspace) -> dg.MaterializeResult:
    """Mean and standard deviation of every observation feature, global to all training environments.

    Gathered once from their first steps under the rule-based player and random legal actions, then frozen with every
    checkpoint; never per environment, never updated by an evaluation.
    """
    from agentpipe.learning.policy.normalisation import gather_statistics

    with step(context, workspace) as work:
        setting = scene(workspace)
        environments = setting.catalog.environments("train")
        pool = setting.pool(environments, "STATISTICS")
        steps = workspace.settings.evaluation.statistics_steps
        statistics = gather_statistics(pool, rules(setting.profile), steps=steps, progress=work.progress)
        statistics.save(work.folder)
        return work.result(
            data_version=statistics.digest(),
            path=work.folder,
            figures={"observations": int(statistics.count), "features": len(statistics.names), "steps_each": steps},
            metadata={"features": markdown(_features(statistics))},
        )


def _features(statistics: "ObservationStatistics") -> str:
    lines = ["| feature | mean | standard deviation |", "|---|---|---|"]
    values = zip(statistics.names, statistics.mean, statistics.standard_deviation, strict=True)
    return "\n".join(lines + [f"| {name} | {mean:.4g} | {deviation:.4g} |" for name, mean, deviation in values])
