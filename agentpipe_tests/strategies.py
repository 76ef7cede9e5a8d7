"""Hypothesis strategies and small builders shared by tests."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import strategies as st

from agentpipe.environments.datafiles import data_dir
from agentpipe.environments.parameters import INTENSITIES, KINDS, PARAMETER_INDEX, PARAMETERS
from agentpipe.environments.table import DisturbanceTable, TableRow, load_table, table_from_rows

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

REPOSITORY = Path(__file__).resolve().parents[1]


def shared_data(relative: str) -> Path:
    """A file of the real data beside the checkout; skips the test with a reason where it is absent."""
    folder = Path(os.environ.get("AGENTPIPE_SHARED_DATA", REPOSITORY.parent / "shared" / "data"))
    path = folder / relative
    if not path.exists():
        pytest.skip(f"real data file {relative} is not there (set AGENTPIPE_SHARED_DATA)")
    return path


def project_table() -> DisturbanceTable:
    """The project's own disturbance table."""
    return load_table(data_dir() / "disturbances.csv")


def values() -> SearchStrategy[tuple[float, ...]]:
    """Permitted parameter values of one row."""
    each = [st.floats(p.low, p.high, allow_nan=False) for p in PARAMETERS]

    def ordered(drawn: tuple[float, ...]) -> tuple[float, ...]:
        row = list(drawn)
        good, bad = PARAMETER_INDEX["network_loss_good"], PARAMETER_INDEX["network_loss_bad"]
        row[good], row[bad] = sorted((row[good], row[bad]))
        return tuple(value + 0.0 for value in row)

    return st.tuples(*each).map(ordered)


@st.composite
def tables(draw: st.DrawFn, max_variants: int = 2) -> DisturbanceTable:
    """Whole disturbance tables: every cell with one or more variants, values from a small pool of rows."""
    pool = draw(st.lists(values(), min_size=1, max_size=3))
    rows = []
    for kind in KINDS:
        for intensity in INTENSITIES:
            variants = draw(st.sets(st.integers(0, 9), min_size=1, max_size=max_variants))
            rows += [TableRow(kind, intensity, variant, draw(st.sampled_from(pool))) for variant in variants]
    return table_from_rows(rows)


def environment_ids() -> SearchStrategy[str]:
    """Ids of environments, of the catalogue or not."""
    return st.builds(
        lambda number, kind, intensity: f"t{number:04d}.{kind}-{intensity}",
        st.integers(0, 9999),
        st.sampled_from(KINDS),
        st.sampled_from(INTENSITIES),
    )
