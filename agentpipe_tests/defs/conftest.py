"""A made home for each test, and a Dagster instance in memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest
from dagster._core.storage.defs_state.base import set_defs_state_storage

from agentpipe.defs.resources import Workspace
from agentpipe_tests.defs.homes import copy_home, make_home


@pytest.fixture(autouse=True)
def _no_instance_of_another_test() -> Iterator[None]:
    """Dagster remembers the last instance; one that is gone would fail whoever makes definitions without one."""
    with set_defs_state_storage(None):
        yield


@pytest.fixture(scope="session")
def made_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made once; tests get copies."""
    folder = tmp_path_factory.mktemp("made") / "home"
    make_home(Workspace(home=str(folder), profile="demo"))
    return folder


@pytest.fixture
def home(made_home: Path, tmp_path: Path) -> Workspace:
    """A home of one's own in which everything is made and nothing is due."""
    return copy_home(made_home, tmp_path)


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    """An instance that is gone after the test."""
    with dg.DagsterInstance.ephemeral() as found:
        yield found
