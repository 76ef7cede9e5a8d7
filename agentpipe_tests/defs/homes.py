"""A home in which everything is materialised as far as references say, and the runs and champions that tests need."""

from __future__ import annotations

import datetime as dt
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dagster as dg

from agentpipe.defs.graph import SHAPES
from agentpipe.defs.references import Reference
from agentpipe.defs.resources import CELL_CHAIN, Workspace
from agentpipe.environments.parameters import CELLS
from agentpipe.learning.policy.lineage import LABELS, pack_labels
from agentpipe.learning.succession.champion import Champion, ChampionStore
from agentpipe.learning.tensors import seal, sealed_manifest
from agentpipe.storage import publish_directory

QUIET = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}
SECONDS = {"disturbance_table": 1.0, "environment_pool_health": 2.0, "trajectories": 3.0, "champion_evaluation": 20.0}
"""What the partitions of :func:`make_home` took."""
Status = dg.DagsterRunStatus


def leave(
    workspace: Workspace, asset: str, partition: str | None = None, version: str | None = None, **figures: Any
) -> None:
    """The reference of a partition that is materialised from what is there now."""
    if version is None:
        version = workspace.cell_versions()[partition] if asset == "disturbance_table" and partition else f"{asset}-1"
    folder = workspace.root / asset / (partition or "whole").replace("|", "_")
    folder.mkdir(parents=True, exist_ok=True)
    reference = Reference(
        asset=asset,
        partition=partition,
        data_version=version,
        path=str(folder.relative_to(workspace.root)),
        consumed=workspace.consumed(asset, partition),
        configuration=workspace.configuration(asset),
        code_version=SHAPES[asset].code_version,
        seconds=SECONDS.get(asset, 0.5),
        figures=figures,
    )
    workspace.references.save(reference)


def make_cell(workspace: Workspace, cell: str, ordinal: int = 0) -> None:
    """One cell from the rows of now; what it holds follows from them."""
    rows = workspace.cell_versions()[cell]
    for asset in CELL_CHAIN:
        version = rows if asset == CELL_CHAIN[0] else f"{asset}-of-{rows}"
        leave(workspace, asset, cell, version, behaviour_ordinal=ordinal)


def make_home(workspace: Workspace) -> None:
    """Line, catalogue, the fifteen cells, statistics and the champion's evaluation; no champion yet."""
    workspace.table_store().refresh("a test")
    for asset in ("line_profile", "environment_catalog"):
        leave(workspace, asset)
    for cell in CELLS:
        make_cell(workspace, cell)
    for asset in ("observation_statistics", "champion_evaluation"):
        leave(workspace, asset)


def copy_home(made: Path, folder: Path) -> Workspace:
    """A copy of a made home."""
    shutil.copytree(made, folder / "home")
    return Workspace(home=str(folder / "home"), profile="demo")


def edit(workspace: Workspace, cell: str, value: float) -> None:
    """Gives every row of ``cell`` the same value in one column."""
    kind, _, intensity = cell.partition("-")
    where = f"kind = {kind} and intensity = {intensity}"
    workspace.table_store().set(where, {"network_rtt_ms": value}, who="eve", why="a test")


def package(workspace: Workspace, name: str, labels: frozenset[str] = frozenset()) -> str:
    """A package that learned from ``labels``; where it lies, relative to the home."""
    files = {LABELS: pack_labels(labels)} if labels else {}
    with publish_directory(workspace.root / "policy_checkpoint" / name) as folder:
        seal(folder, "package.json", sealed_manifest({"kind": "agentpipe.policy-package", "format": 1}, files), files)
    return f"policy_checkpoint/{name}"


def promote(workspace: Workspace, digest: str, labels: frozenset[str] = frozenset()) -> Champion:
    """Makes ``digest`` the champion."""
    store = ChampionStore(workspace.root / "champion")
    current = store.current()
    expected = None if current is None else current.digest
    return store.promote(digest, package(workspace, digest, labels), expected=expected, reason="a test")


def add_run(
    instance: dg.DagsterInstance,
    job: str,
    partition: str | None = None,
    status: dg.DagsterRunStatus = Status.SUCCESS,
    tags: Mapping[str, str] | None = None,
) -> dg.DagsterRun:
    """A run as Dagster has recorded it."""
    own = {"dagster/partition": partition} if partition else {}
    run = dg.DagsterRun(job_name=job, run_id=str(uuid.uuid4()), status=status, tags={**own, **(tags or {})})
    instance.add_run(run)
    return run


def add_requested(
    instance: dg.DagsterInstance, request: dg.RunRequest, status: dg.DagsterRunStatus = Status.SUCCESS
) -> dg.DagsterRun:
    """The run that the daemon makes of a request."""
    assert request.job_name is not None
    return add_run(instance, request.job_name, request.partition_key, status, request.tags)


def utc(text: str) -> dt.datetime:
    """An instant such as ``2026-03-29 01:00``."""
    return dt.datetime.fromisoformat(text).replace(tzinfo=dt.UTC)
