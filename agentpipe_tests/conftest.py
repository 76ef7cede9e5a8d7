"""What every test gets: no Dagster or agentpipe settings from outside, one thread for each numeric library.

Files that take minutes come early, so that no process works on one of them alone at the end. The very first runs a main
job, which compiles every kernel; in the meantime the other processes test what needs none, or what it has compiled.
"""

from __future__ import annotations

import os

import pytest

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")

WITHOUT_KERNELS = (
    "feedback/",
    "defs/test_publish.py",
    "defs/test_schedule.py",
    "defs/test_imports.py",
    "defs/test_intact.py",
    "defs/test_feedback_sensor.py",
    "defs/test_table_notices.py",
    "defs/test_night",
    "defs/test_table_changes.py",
    "defs/test_alerts.py",
    "cli/test_settings_command.py",
    "test_",
)
FIRST = (
    "acceptance/test_loop.py",
    *WITHOUT_KERNELS,
    "environments/",  # from here on, in the order in which a main job compiles them
    "experience/",
    "learning/",
    "acceptance/test_main_job.py",
    "acceptance/test_browser.py",
    "benchmarks/",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Orders the files as :data:`FIRST` says; all others follow as they were collected."""

    def place(item: pytest.Item) -> int:
        name = item.nodeid.partition("agentpipe_tests/")[2]
        return next((index for index, start in enumerate(FIRST) if name.startswith(start)), len(FIRST))

    items.sort(key=place)


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
