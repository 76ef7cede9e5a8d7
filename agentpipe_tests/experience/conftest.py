"""A small sealed shard."""

from __future__ import annotations

import shutil

import pytest

from agentpipe.experience.record import record_trajectories

from .fakes import CountingPool, SecondAction, environments, table


def record(path, size=3, episodes_per_env=2, **changes):
    arguments = {
        "environments": environments(size),
        "table": table(),
        "episodes_per_env": episodes_per_env,
        "out_dir": path,
        "cell": "sensor-1",
        "policy_version": "1.0",
    }
    build = changes.pop("build", lambda chosen: CountingPool([one.index - 100 for one in chosen]))
    return record_trajectories(build, changes.pop("player", SecondAction()), **{**arguments, **changes})


@pytest.fixture(scope="session")
def sealed(tmp_path_factory):
    """Three environments, two episodes each; read it, never change it."""
    return record(tmp_path_factory.mktemp("shard") / "sensor-1")


@pytest.fixture
def shard_copy(sealed, tmp_path):
    return shutil.copytree(sealed.path, tmp_path / "copy")
