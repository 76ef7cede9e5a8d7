"""Small shards: one recorded from a pool, one of random episodes."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

from agentpipe.experience.record import record_trajectories

from .fakes import CountingPool, SecondAction, environments, make_episodes, table, write_shard

# The first example of a test may have to wait for a compiler.
settings.register_profile("compiled", deadline=None)
settings.load_profile("compiled")


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


@pytest.fixture(scope="session")
def random_shard(tmp_path_factory):
    """Twenty random episodes, some of them cut; read it, never change it."""
    episodes = make_episodes(np.random.default_rng(0), 20, cut_share=0.5)
    return write_shard(tmp_path_factory.mktemp("random") / "shard", episodes)


@pytest.fixture
def shard_copy(random_shard, tmp_path):
    return shutil.copytree(random_shard.path, tmp_path / "copy")


@pytest.fixture
def quick_path(tmp_path):
    """A folder in memory where there is one: for tests that open many shards, which the disk would make slow."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    folder = Path(tempfile.mkdtemp(prefix="agentpipe-test-", dir=memory))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
