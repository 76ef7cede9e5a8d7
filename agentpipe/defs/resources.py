"""The workspace: settings, home and the loaders that the assets share; domain packages are imported late."""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import os
import time
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import Field

from agentpipe.defs.graph import SHAPES, Take
from agentpipe.defs.partitions import TRIGGERS, candidate_key, days_of_week, split_candidate
from agentpipe.defs.references import MISSING, Reference, References
from agentpipe.environments.datafiles import data_dir
from agentpipe.environments.parameters import CELLS
from agentpipe.errors import LockHeldError, MachineHistoryError, TableError
from agentpipe.settings import Settings, load_settings
from agentpipe.storage import canonical_json, digest_bytes, digest_file, home_lock

if TYPE_CHECKING:
    from agentpipe.environments.catalog import Catalog
    from agentpipe.environments.line_profile import LineProfile
    from agentpipe.environments.table import DisturbanceTable
    from agentpipe.environments.table_store import TableStore

CELL_CHAIN = ("disturbance_table", "environment_pool_health", "trajectories")
"""What is made for one cell, each from the one before."""
BUILT_IN_PLAYERS = ("random", "rules", "diagnoser", "oracle")
NONE = "NONE"
"""The data version of an external source that is not used."""
_held: set[Path] = set()
"""Homes whose lock this process holds."""


@contextlib.contextmanager
def hold_home(home: Path, holder: str, patience: float = 0.0) -> Iterator[None]:
    """Holds the home's writer lock, once per process; waits ``patience`` seconds for another process.

    Raises:
        LockHeldError: another process still holds it.
    """
    key = home.resolve()
    if key in _held:
        yield
        return
    give_up = time.monotonic() + patience
    with contextlib.ExitStack() as stack:
        while True:
            try:
                stack.enter_context(home_lock(home, holder))
                break
            except LockHeldError:
                if time.monotonic() >= give_up:
                    raise
                time.sleep(0.2)
        _held.add(key)
        try:
            yield
        finally:
            _held.discard(key)


class Workspace(dg.ConfigurableResource[Any]):
    """Where everything is and how it is set; empty fields are read from the environment (``AGENTPIPE_...``)."""

    home: str | None = Field(default=None, description="folder that holds every store")
    profile: str | None = Field(default=None, description="demo or standard")
    machine_history: str | None = Field(default=None, description="machine-history table that becomes the line profile")
    table_source: str | None = Field(default=None, description="disturbance table to follow instead of the home's copy")
    seed: int | None = Field(default=None, description="root of all randomness")
    threads: int | None = Field(default=None, description="threads of simulation and training")

    @property
    def settings(self) -> Settings:
        """The typed settings that these fields and the environment give."""
        fields = ("home", "profile", "machine_history", "table_source", "seed", "threads")
        environment = tuple(
            sorted(item for item in os.environ.items() if item[0].startswith(("AGENTPIPE_", "REDIS_URL")))
        )
        return _settings(tuple((name, getattr(self, name)) for name in fields), environment)

    @property
    def root(self) -> Path:
        """The home."""
        return self.settings.home

    @property
    def references(self) -> References:
        """What is materialised."""
        return References(self.root)

    # ------------------------------------------------------------------------------------------ loaders

    def table_store(self) -> TableStore:
        """The store of table versions."""
        from agentpipe.environments.table_store import TableStore

        return TableStore(self.root, source=self.settings.table_source)

    def table(self, cell: str | None = None) -> DisturbanceTable:
        """The table version that ``cell`` was materialised from; without a cell, the version that holds all cells.

        Read from Redis where one is set, else from the home. Where no version holds all cells, the one that holds all
        fresh ones (:meth:`fresh_cells`), if enough are.

        Raises:
            TableError: no version holds the rows of enough materialised cells, since some were left behind.
            RedisServerError: a Redis is set and does not answer.
        """
        from agentpipe.environments.table_redis_home import pinned_table

        store = self.table_store()
        references = {key: self.references.load("disturbance_table", key) for key in ((cell,) if cell else CELLS)}
        versions = sorted({reference.figure("table_version") for reference in references.values()})
        fresh = [] if cell else self.fresh_cells()
        enough = {key: references[key] for key in fresh} if len(fresh) >= self.settings.schedule.cells_needed else {}
        for wanted in filter(None, (references, enough)):
            for version in versions:
                table = pinned_table(store, version, self.settings.redis_url)
                if not _behind(wanted, table):
                    return table
        behind = ", ".join(_behind(references, store.current()))
        remedy = f"materialise disturbance_table for {behind}"
        raise TableError("the cells come from different versions of the table", cells=behind, remedy=remedy)

    def fresh_cells(self) -> list[str]:
        """The cells whose trajectories passed their gates and were recorded under the rows that the table holds now."""
        return [
            cell
            for cell in CELLS
            if all(self._follows(*pair, cell) for pair in pairwise(CELL_CHAIN)) and not self.failed_gates(cell)
        ]

    def failed_gates(self, cell: str) -> list[str]:
        """The gates that ``cell`` failed when it was last made; its artefacts are there, but nothing builds on them."""
        found = {asset: self.references.find(asset, cell) for asset in CELL_CHAIN}
        judged = {
            asset: reference.figures.get("gates", ()) for asset, reference in found.items() if reference is not None
        }
        return [
            f"{gate['name']} of {asset}"
            for asset, gates in judged.items()
            for gate in gates
            if not gate["passed"] and gate["severity"] == "error"
        ]

    def _follows(self, upstream: str, asset: str, cell: str) -> bool:
        """True where ``asset`` was made from what ``upstream`` is now."""
        found = self.references.find(asset, cell)
        return found is not None and found.consumed.get(upstream) == self.references.version(upstream, cell)

    def known_policies(self) -> frozenset[str]:
        """What a production decision may name as its policy: packages and bundles of this home, built-in players.

        An agent's last rung is among them on every line: the rule-based player, or whoever holds the last action.
        """
        from agentpipe.environments.layout import SIMULATOR_VERSION
        from agentpipe.learning.succession.champion import ChampionStore
        from agentpipe.serving.agent.types import HOLD_VERSION

        made = self.references.versions("policy_checkpoint") | self.references.versions("triton_bundle")
        champions = {entry.digest for entry in ChampionStore(self.root / "champion").history()}
        players = {f"{player}-{SIMULATOR_VERSION}" for player in BUILT_IN_PLAYERS}
        return made | champions | players | {HOLD_VERSION}

    def champion_digest(self) -> str:
        """The data version of the policy that is in use; ``NONE`` before the first."""
        from agentpipe.learning.succession.champion import ChampionStore

        current = ChampionStore(self.root / "champion").current()
        return NONE if current is None else current.digest

    def line_profile(self) -> LineProfile:
        """The materialised line profile."""
        from agentpipe.environments.line_profile import load_profile

        return load_profile(self.references.artefact("line_profile"))

    def catalog(self) -> Catalog:
        """The catalogue in the size that the settings ask for."""
        return sized_catalog(self.settings)

    # ------------------------------------------------------------------------------------------ lineage

    def source_version(self, name: str, partition: str | None) -> str:
        """Content version of an external source; of the table, of the rows of one cell."""
        settings = self.settings
        if name == "machine_history":
            return NONE if settings.machine_history is None else _history_version(settings.machine_history)
        if name == "table_source":
            assert partition is not None
            return _source_table(self).cell_digests[partition]
        if name == "champion":
            return self.champion_digest()
        if name == "triton_server":
            return _server_version(settings)
        assert partition is not None
        return _feedback_version(self.root / "feedback", dt.date.fromisoformat(partition))

    def cell_versions(self) -> Mapping[str, str]:
        """The data version of every cell as the source of the table reads now."""
        return _source_table(self).cell_digests

    def consumed(self, asset: str, partition: str | None) -> dict[str, str]:
        """The current data version of everything that one partition of ``asset`` consumes."""
        return {up: self._upstream(up, take, partition) for up, take in SHAPES[asset].consumes.items()}

    def _upstream(self, name: str, take: Take, partition: str | None) -> str:
        if name not in SHAPES:
            return self.source_version(name, partition)
        references = self.references
        if take is Take.WHOLE:
            return references.version(name)
        if take is Take.SAME:
            return references.version(name, partition)
        if take is Take.ALL:
            return references.version_of_all(name, CELLS)
        assert partition is not None
        if take is Take.DAY:
            day, trigger = split_candidate(partition)
            return NONE if trigger == "manual" else references.version(name, day.isoformat())  # that learns no labels
        days = days_of_week(dt.date.fromisoformat(partition))
        if take is Take.WEEK:
            return references.version_of_all(name, tuple(day.isoformat() for day in days))
        keys = tuple(candidate_key(day, trigger) for day in days for trigger in TRIGGERS)
        return references.version_of_all(name, keys)

    def configuration(self, asset: str) -> str:
        """Digest of the settings, and of the project's data files, that change the content of ``asset``."""
        names = SHAPES[asset].settings
        settings = self.settings
        if names == ("*",):
            return settings.digest()
        content = {**settings.model_dump(mode="json"), "*": settings.digest() if "*" in names else None}
        chosen = {name: functools.reduce(lambda part, key: part[key], name.split("."), content) for name in names}
        files = {name: _file_version(data_dir() / name) for name in SHAPES[asset].files}
        return digest_bytes(canonical_json({**chosen, **files}))

    def key(self, asset: str, partition: str | None) -> str:
        """Digest of everything that decides the content of one partition: settings, code version, what it consumes."""
        parts: list[Any] = [self.configuration(asset), SHAPES[asset].code_version, self.consumed(asset, partition)]
        if asset == "policy_checkpoint" and partition is not None and split_candidate(partition)[1] != "manual":
            parts.append(self.champion_digest())  # what it starts from
        return digest_bytes(canonical_json(parts))

    def is_current(self, asset: str, partition: str | None) -> bool:
        """True where the partition is materialised from what it would consume now, and its artefact is there.

        A server check that was skipped is not finished where there is a server to try.
        """
        found = self.references.find(asset, partition)
        skipped = found is not None and found.figures.get("status") == "SKIPPED"
        return (
            found is not None
            and not (skipped and self.source_version("triton_server", None) != NONE)
            and found.consumed == self.consumed(asset, partition)
            and MISSING not in found.data_version
            and found.configuration == self.configuration(asset)
            and found.code_version == SHAPES[asset].code_version
            and (self.root / found.path).exists()
        )


def _file_version(path: Path) -> str:
    """Digest of a data file; a missing one is for the asset that reads it to refuse."""
    return digest_file(path) if path.is_file() else MISSING


def _server_version(settings: Settings) -> str:
    """Which Triton bundles are checked in: another address or another installation is another version."""
    from agentpipe.serving.triton_install import installed_version

    if settings.triton_url is not None:
        return digest_bytes(canonical_json([settings.triton_url, settings.serving.triton_grpc]))
    return installed_version() or NONE


def _feedback_version(folder: Path, day: dt.date) -> str:
    """What the day holds, and what waits in the inbox and may belong to it."""
    from agentpipe.feedback.inbox import digests
    from agentpipe.feedback.store import day_state

    waiting = digests(folder / "inbox")
    state = day_state(folder / "store", day)
    empty = not waiting and state.decisions + state.labels == 0
    return NONE if empty else digest_bytes(canonical_json([waiting, state.digest]))


def _history_version(path: Path) -> str:
    if not path.is_file():
        remedy = "give the path of an existing CSV file"
        raise MachineHistoryError("there is no such machine-history table", file=path, remedy=remedy)
    return digest_file(path)


def _behind(references: Mapping[str, Reference], table: DisturbanceTable) -> list[str]:
    """The cells whose materialised rows are not those of ``table``."""
    return [key for key, found in references.items() if table.cell_digests[key] != found.data_version]


def _source_table(workspace: Workspace) -> DisturbanceTable:
    """The table as the source reads now, without publishing a version.

    A source of the home's own that is missing (an editor may be replacing it) is as it was; a set one must be there.
    """
    from agentpipe.environments.datafiles import data_dir
    from agentpipe.environments.table import load_table

    store = workspace.table_store()
    if store.own_source or store.source_path.exists():
        return load_table(store.source_path)
    return store.current() if store.started() else load_table(data_dir() / "disturbances.csv")


@functools.lru_cache(maxsize=8)
def _settings(fields: tuple[tuple[str, Any], ...], environment: tuple[tuple[str, str], ...]) -> Settings:
    """The settings of these fields; asked for at every turn, so they are kept while the environment stays the same."""
    del environment
    return load_settings(**dict(fields))


def sized_catalog(settings: Settings) -> Catalog:
    """The catalogue in the size that the settings ask for; validation shrinks with training, one per cell at least."""
    from agentpipe.environments.datafiles import data_dir

    folder = data_dir()
    files = [folder / name for name in ("templates.csv", "splits.csv")]
    stamp = tuple(file.stat().st_mtime_ns if file.exists() else 0 for file in files)  # reading says what is missing
    return _catalog(folder, stamp, settings.training.environments, settings.evaluation.environments)


@functools.lru_cache(maxsize=4)
def _catalog(folder: Path, stamp: tuple[int, ...], train: int | None, holdout: int | None) -> Catalog:
    from agentpipe.environments.catalog import load_catalog

    del stamp
    catalog = load_catalog(folder)
    if train is None and holdout is None:
        return catalog
    counts = catalog.counts()
    wanted_train = counts["train"] if train is None else train
    share = min(1.0, 4 * wanted_train / counts["train"])
    validation = min(counts["validation"], max(len(CELLS), round(counts["validation"] * share)))
    return catalog.thin(wanted_train, validation, counts["holdout"] if holdout is None else holdout)
