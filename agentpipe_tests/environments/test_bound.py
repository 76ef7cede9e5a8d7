"""The bound is what the formula gives; the covering constant is a covering."""

from __future__ import annotations

import math

import numpy as np
import pytest

from agentpipe.environments.bound import bound_report, covering, disturbance_space, generalisation_bound
from agentpipe.environments.table import table_from_rows
from agentpipe.errors import CatalogError
from agentpipe_tests.strategies import project_table


def test_the_formula_gives_214907_and_not_6892():
    assert int(generalisation_bound(42, 0.01, 0.03)) == 214_907
    assert generalisation_bound(42, 0.01, 0.03) == pytest.approx(42 * math.log(100) / 0.0009, rel=1e-12)


def test_short_catalogue_is_said_to_be_short():
    report = bound_report(7_000, project_table())
    assert report.short
    assert report.required == int(generalisation_bound(report.constant))
    assert f"{report.required:,}" in report.text
    assert "short of the bound" in report.text
    enough = bound_report(report.required + 1, project_table())
    assert not enough.short
    assert "short" not in enough.text


def test_epsilon_that_is_shown_gives_back_the_environments():
    report = bound_report(7_000, project_table())
    epsilon = math.sqrt(report.constant * math.log(100) / 7_000)
    assert f"ε = {epsilon:.3f}" in report.text
    assert generalisation_bound(report.constant, 0.01, epsilon) == pytest.approx(7_000)


def test_covering_constant_counts_well_separated_clusters():
    """All rows of a kind alike, kinds far apart: three clusters."""
    table = project_table()
    first = {kind: table.rows[table.cell_rows(f"{kind}-5")[0]].values for kind in ("sensor", "network", "load")}
    alike = table_from_rows([row._replace(values=first[row.kind]) for row in table.rows])
    assert covering(alike, 0.01).constant == 3
    same = table_from_rows([row._replace(values=first["load"]) for row in table.rows])
    assert covering(same, 0.01).constant == 1


def test_covering_grows_as_the_radius_shrinks_and_stays_within_it():
    constants = []
    for radius in (0.4, 0.2, 0.1, 0.05, 1e-9):
        found = covering(project_table(), radius)
        assert found.reached <= radius
        constants.append(found.constant)
    assert constants == sorted(constants)
    assert constants[-1] == len(np.unique(disturbance_space(project_table()), axis=0))


def test_space_is_scaled_to_the_unit_cube():
    space = disturbance_space(project_table())
    assert space.min() == 0.0
    assert space.max() == 1.0
    assert (space.max(axis=0) == 1.0).all()


@pytest.mark.parametrize(
    ("constant", "delta", "epsilon"), [(0, 0.01, 0.03), (42, 0, 0.03), (42, 1, 0.03), (42, 0.01, 0)]
)
def test_figures_outside_the_formula(constant, delta, epsilon):
    with pytest.raises(CatalogError, match="out of range"):
        generalisation_bound(constant, delta, epsilon)


def test_radius_must_be_positive():
    with pytest.raises(CatalogError, match="radius"):
        covering(project_table(), 0.0)
