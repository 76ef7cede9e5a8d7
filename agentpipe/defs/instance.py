"""The Dagster instance of a home: SQLite under ``HOME/dagster``, so that the UI sees what the main job did."""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import dagster as dg

from agentpipe.errors import DiskFullError, HomeError
from agentpipe.storage import typed_os_errors, write_bytes

CONFIGURATION = """\
# The instance of a home, as `agentpipe run` writes it into HOME/dagster when there is none.
telemetry:
  enabled: false
nux:
  enabled: false
concurrency:
  runs:
    max_concurrent_runs: 1   # one home, one lock: a second run would only wait for it
sensors:
  use_threads: true          # table_changes waits for notices of a Redis; the others go on meanwhile
  num_workers: 4
run_monitoring:
  enabled: true              # a run whose process never came up is marked as failed
  start_timeout_seconds: 180
"""
OURS = "agentpipe/main-job"
_ROOM_OF_THE_LOG = 1 << 20  # bytes that an event and the log's index need at most
_UNFINISHED = [dg.DagsterRunStatus.STARTING, dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.CANCELING]


def dagster_home(home: Path) -> Path:
    """``HOME/dagster`` with its configuration, made at first use; becomes ``DAGSTER_HOME`` of this process."""
    folder = home.resolve() / "dagster"
    if not (folder / "dagster.yaml").exists():
        write_bytes(folder / "dagster.yaml", CONFIGURATION.encode())
    os.environ["DAGSTER_HOME"] = str(folder)
    return folder


@contextlib.contextmanager
def open_instance(home: Path) -> Iterator[dg.DagsterInstance]:
    """The instance of ``home``."""
    dagster_home(home)
    with dg.DagsterInstance.get() as instance:
        yield instance


@contextlib.contextmanager
def typed_storage_errors(home: Path) -> Iterator[None]:
    """Turns what SQLite and the operating system say of an unusable home into typed errors.

    Dagster writes an event for every failure; where the disk is full that fails as well and hides what happened first.

    Raises:
        DiskFullError: no space left for the event log or an artefact.
        HomeError: the event log cannot be written, or stays locked by another process.
    """
    with typed_os_errors(home):
        try:
            yield
        except Exception as error:
            found = list(causes(error))
            said = " ".join(str(cause) for cause in found if isinstance(cause, sqlite3.OperationalError))
            if "disk is full" in said or (said and (_no_room(home) or any(map(_of_a_full_disk, found)))):
                remedy = "free space and run again: what is finished is kept"
                raise DiskFullError("the disk is full", file=home, remedy=remedy) from error
            if said:
                remedy = "choose a writable folder with --home, and end other processes that use it"
                raise HomeError(
                    f"the event log cannot be written: {said}", file=home / "dagster", remedy=remedy
                ) from error
            raise


def _no_room(home: Path) -> bool:
    """SQLite says "disk I/O error" where its index of the log (``-shm``) has no room to grow; so ask the disk."""
    found = os.statvfs(home)
    return found.f_bavail * found.f_frsize < _ROOM_OF_THE_LOG


def _of_a_full_disk(error: BaseException) -> bool:
    return isinstance(error, DiskFullError) or (
        isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    )


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """``error`` and what led to it; Dagster raises an asset's own error again, which closes the chain to a ring."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def sensors_have_threads(instance: dg.DagsterInstance) -> bool:
    """True where a sensor that waits holds no other one up; the configuration of an older home may not say so."""
    settings = instance.get_settings("sensors")
    return bool(settings.get("use_threads")) and settings.get("num_workers", 2) > 1


def settle_interrupted_runs(instance: dg.DagsterInstance) -> int:
    """Marks runs of a main job that was killed as failed; call under the home's lock. Returns how many."""
    runs = instance.get_runs(dg.RunsFilter(statuses=_UNFINISHED))
    killed = [run for run in runs if OURS in run.tags]
    for run in killed:
        instance.report_run_failed(run, "the process that ran it ended without a word")
    return len(killed)


def recorded_version(instance: dg.DagsterInstance, asset: str, partition: str | None) -> str | None:
    """The data version of the latest materialisation that Dagster has recorded of one partition."""
    wanted = dg.AssetRecordsFilter(
        asset_key=dg.AssetKey(asset), asset_partitions=[partition] if partition is not None else None
    )
    records = instance.fetch_materializations(wanted, limit=1).records
    if not records or records[0].asset_materialization is None:
        return None
    return (records[0].asset_materialization.tags or {}).get("dagster/data_version")
