"""What every test gets: no Dagster or agentpipe settings from outside, one thread for each numeric library."""

from __future__ import annotations

import os

import pytest

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    for name in [name for name in os.environ if name.startswith(("AGENTPIPE_", "DAGSTER_", "REDIS_URL"))]:
        if name not in (
            "AGENTPIPE_SHARED_DATA",
            "AGENTPIPE_TRITON_HOME",
            "AGENTPIPE_TEST_HOME",
            "AGENTPIPE_TEST_REDIS_URL",
        ):
            monkeypatch.delenv(name)
