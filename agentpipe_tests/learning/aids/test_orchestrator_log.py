"""The log of decisions: comes back as it was, is small, and no damage goes unnoticed; shares of its moves."""

from __future__ import annotations

import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentpipe.errors import CorruptError
from agentpipe.learning.aids.orchestrator_bandit import ARMS
from agentpipe.learning.aids.orchestrator_log import (
    CLASSES,
    EVERYWHERE,
    GROUPS,
    REASONS,
    ROW,
    chance_shares,
    class_of,
    coupling_shares,
    group_name,
    log_digest,
    measured,
    read_log,
    write_log,
)


def rows_of(*moves):
    """Rows of (update, group, arm, reason, environments)."""
    rows = np.zeros(len(moves), ROW)
    for row, (update, group, arm, reason, environments) in zip(rows, moves, strict=True):
        row["update"], row["group"], row["arm"] = update, group, arm
        row["reason"], row["environments"] = REASONS.index(reason), environments
    return rows


def random_rows(count, seed=0):
    generator = np.random.default_rng(seed)
    rows = np.zeros(count, ROW)
    rows["update"] = np.sort(generator.integers(1, 100, count))
    rows["group"], rows["arm"] = generator.integers(-1, GROUPS, count), generator.integers(0, ARMS, count)
    rows["reason"], rows["environments"] = generator.integers(0, 3, count), generator.integers(1, 300, count)
    rows["episodes"], rows["decisions"] = generator.integers(0, 999, count), generator.integers(0, 9_999, count)
    rows["expected"] = np.where(generator.random(count) < 0.1, np.nan, generator.random(count))
    rows["entropy"] = rows["decisions"] * generator.random(count)
    return rows


@given(st.integers(0, 60), st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_what_is_written_comes_back_and_equal_content_has_an_equal_digest(tmp_path_factory, count, seed):
    path = tmp_path_factory.mktemp("log") / "orchestrator.parquet"
    rows = random_rows(count, seed)
    digest = write_log(path, rows)
    assert read_log(path).tobytes() == rows.tobytes()
    assert digest == log_digest(rows.copy())
    if count:
        rows["episodes"][-1] += 1
        assert log_digest(rows) != digest


def test_people_read_names_and_levels(tmp_path):
    rows = rows_of((6, 7, 2 * 36 + 5 * 6, "exploit", 40), (6, EVERYWHERE, 215, "floor", 2))
    rows["decisions"], rows["entropy"], rows["expected"] = [10, 0], [4.0, 0.0], [0.5, np.nan]
    write_log(tmp_path / "log.parquet", rows)
    first, second = pq.ParquetFile(tmp_path / "log.parquet").read(use_threads=False).to_pylist()
    assert first == {
        "update": 6,
        "group": "smart_hart / opc_ua",
        "sensor": 2,
        "network": 5,
        "load": 0,
        "combination": "sensor × network",
        "reason": "exploit",
        "environments": 40,
        "episodes": 0,
        "decisions": 10,
        "expected_entropy": 0.5,
        "entropy_sum": 4.0,
        "measured_entropy": 0.4,
    }
    named = ("group", "combination", "reason", "expected_entropy", "measured_entropy")
    assert [second[name] for name in named] == ["all", "all three", "floor", None, None]
    assert measured(rows).tolist()[0] == 0.4


def test_no_damage_goes_unnoticed(tmp_path):
    path = tmp_path / "orchestrator.parquet"
    write_log(path, random_rows(300))
    whole, rows = path.read_bytes(), read_log(path)
    generator = np.random.default_rng(0)
    for place in generator.integers(0, len(whole), 120).tolist():
        changed = bytearray(whole)
        changed[place] ^= 1 << int(generator.integers(0, 8))
        path.write_bytes(bytes(changed))
        try:
            found = read_log(path)
        except CorruptError:
            continue
        assert found.tobytes() == rows.tobytes(), place  # a byte that says nothing, such as who wrote the file
    for length in (0, 5, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(CorruptError):
            read_log(path)
    path.unlink()
    with pytest.raises(CorruptError, match="there is no log"):
        read_log(path)


@pytest.mark.parametrize("change", ["another value", "no column", "no digest", "unknown name"])
def test_a_file_that_somebody_wrote_again_is_refused(tmp_path, change):
    path = tmp_path / "orchestrator.parquet"
    write_log(path, random_rows(20))
    table = pq.ParquetFile(path).read(use_threads=False)
    if change == "another value":
        table = table.set_column(0, "update", pa.array([9] * 20, pa.int32()))
    elif change == "no column":
        table = table.drop_columns(["arm" if "arm" in table.column_names else "sensor"])
    elif change == "no digest":
        table = table.replace_schema_metadata({})
    else:
        table = table.set_column(table.column_names.index("reason"), "reason", pa.array(["whim"] * 20))
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    path.write_bytes(buffer.getvalue())
    with pytest.raises(CorruptError):
        read_log(path)


def test_a_thousand_decisions_are_some_megabytes(tmp_path):
    """With about as many rows a decision as 1,750 steered environments give."""
    path = tmp_path / "orchestrator.parquet"
    write_log(path, random_rows(20_000))
    assert path.stat().st_size * 350 / 20 < 15e6


def test_classes_of_combinations():
    arms = np.array([0, 36, 6, 1, 36 + 6, 36 + 1, 6 + 1, 36 + 6 + 1, 215, 180])
    names = [CLASSES[index] for index in class_of(arms)]
    assert names == [*CLASSES, "all three", "sensor"]
    assert group_name(EVERYWHERE) == "all"
    assert group_name(24) == "rtd_fieldbus / io_link"


def test_shares_of_moves_and_what_chance_gives():
    rows = rows_of(
        (1, 0, 36 + 6, "exploit", 60),
        (1, 1, 215, "explore", 20),
        (1, EVERYWHERE, 1, "floor", 15),
        (1, 2, 0, "floor", 5),
    )
    shares = coupling_shares(rows)
    assert {name: share for name, share in shares.items() if share} == pytest.approx(
        {"sensor × network": 0.6, "all three": 0.2, "load": 0.15, "none": 0.05, "sensor × network or more": 0.8}
    )
    assert coupling_shares(rows, ["explore", "exploit"])["sensor × network"] == pytest.approx(0.75)
    chance = chance_shares()
    assert chance["sensor × network"] == chance["sensor × load"] == pytest.approx(25 / 216)
    assert chance["sensor"] == pytest.approx(5 / 216)
    assert chance["all three"] == pytest.approx(125 / 216)
    assert chance["sensor × network or more"] == pytest.approx(150 / 216)
    assert all(np.isnan(share) for share in coupling_shares(rows[:0]).values())
