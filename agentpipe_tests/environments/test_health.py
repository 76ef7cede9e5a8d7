"""Pool health: content that is the same everywhere, durations kept apart, nothing made up."""

from __future__ import annotations

import numpy as np
import pytest

from agentpipe.environments import pool as pools
from agentpipe.environments.catalog import load_catalog
from agentpipe.environments.health import NOT_APPLICABLE, Effort, cell_health
from agentpipe.environments.line_profile import default_profile
from agentpipe.errors import InputError, SimulationError
from agentpipe_tests.strategies import project_table

CATALOG, TABLE, PROFILE = load_catalog(), project_table(), default_profile()
SMALL = Effort(resets=3, samples=4, steps=8)


def measure(cell="sensor-3", count=40, **options):
    return cell_health(CATALOG.environments(cell=cell)[:count], TABLE, PROFILE, seed=1, effort=SMALL, **options)


def test_every_environment_starts():
    health = measure()
    assert health.start_success == 1.0
    assert health.failures == ()
    assert health.content["environments"] == 40


def test_samples_are_there_for_plots():
    health = measure()
    assert (len(health.reset_ms), len(health.pool_reset_ms), len(health.step_rate)) == (4, 3, 8)
    assert health.reset_quantile_ms(0.99) <= health.reset_ms.max()
    assert health.slow_reset_share(0.0) == 1.0
    assert health.slow_reset_share(1e9) == 0.0
    assert health.steps_per_second > 0
    assert health.resident_mb > 10


def test_digest_covers_content_and_no_duration():
    first, second = measure(), measure(threads=2)
    assert first.digest == second.digest
    assert not np.array_equal(first.reset_ms, second.reset_ms)
    assert measure(cell="sensor-4").digest != first.digest


def test_figures_of_separate_processes_are_not_applicable():
    content = measure().to_json()
    assert content["not_applicable"] == NOT_APPLICABLE
    assert not set(NOT_APPLICABLE) & set(content["measured"])


def test_progress_is_told():
    seen = []
    measure(progress=lambda stage, done, total, note="": seen.append((stage, done, total)))
    assert seen == [("health of sensor-3", done, 3) for done in range(4)]


def test_environment_that_does_not_start_is_counted_and_named(monkeypatch):
    bad = CATALOG.environments(cell="sensor-3")[5].environment_id
    real = pools.build_pool

    def build(environments, *arguments, **options):
        if any(environment.environment_id == bad for environment in environments):
            raise SimulationError("does not start", environment=bad)
        return real(environments, *arguments, **options)

    monkeypatch.setattr(pools, "build_pool", build)
    health = measure()
    assert health.start_success == 39 / 40
    assert [name for name, _ in health.failures] == [bad]


@pytest.mark.parametrize("environments", [(), CATALOG.environments()[:2]])
def test_environments_of_exactly_one_cell_are_wanted(environments):
    with pytest.raises(InputError, match="one cell"):
        cell_health(environments, TABLE, PROFILE, seed=1)
