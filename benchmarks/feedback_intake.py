"""Taking feedback in: ``python -m benchmarks.feedback_intake``.

A million decisions and labels of the built-in line in one Parquet file, into an empty store and into one that already
holds a million ids; then ten thousand JSON-lines files in one call. Each intake runs in a process of its own, so that
its peak memory is its own. Afterwards every row is counted: none may be lost, none may be there twice.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from agentpipe.environments.layout import ACTION_COUNT, OBSERVATION_SIZE
from benchmarks.measure import ROOT, Figure, results_folder, stamp, store

if TYPE_CHECKING:
    from collections.abc import Sequence

PACKAGES = ("numpy", "pyarrow")
ROWS, FILES, ROWS_OF_A_FILE = 1_000_000, 10_000, 3
LABELLED = 10
"""of so many decisions one has a label"""
GROUP = 50_000
NOW = dt.datetime(2026, 6, 30, 12, tzinfo=dt.UTC)
DAYS = 3
LIMITS = {"seconds": 60.0, "gigabytes": 2.0}
"""that we ask of ourselves for a million rows of Parquet"""


def decisions(count: int, first: int, random: np.random.Generator) -> pa.Table:
    """``count`` decisions of the sizes of the built-in line, over three days; ids from ``first`` on."""
    mask = random.random((count, ACTION_COUNT)) < 0.4
    action = random.integers(0, ACTION_COUNT, count)
    mask[np.arange(count), action] = True
    weights = mask * random.random((count, ACTION_COUNT), dtype=np.float32)
    weights[np.arange(count), action] += np.float32(0.5)
    weights /= weights.sum(axis=1, keepdims=True)
    seconds = random.integers(0, DAYS * 86_400, count)
    times = (NOW - dt.timedelta(days=DAYS)).timestamp() + seconds
    observation = np.round(random.normal(size=(count, OBSERVATION_SIZE)), 4).astype(np.float32)
    return pa.table(
        {
            "kind": pa.array(["decision"] * count),
            "decision_id": pa.array([name(number) for number in range(first, first + count)]),
            "time": pa.array((times * 1e6).astype(np.int64)).cast(pa.timestamp("us", tz="UTC")),
            "line_id": pa.array([f"l{number % 50:03d}" for number in range(count)]),
            "policy_version": pa.array(["bundle-0123456789abcdef"] * count),
            "observation": lists(observation),
            "last_action": pa.array(random.integers(0, ACTION_COUNT + 1, count), pa.int32()),
            "elapsed_minutes": pa.array(random.random(count).astype(np.float32) * 30),
            "mask": lists(mask),
            "probabilities": lists(weights.astype(np.float32)),
            "action": pa.array(action, pa.int32()),
            "result": pa.array(["done"] * count),
        }
    )


def labels(count: int, first: int) -> pa.Table:
    """A label of every tenth of the decisions that begin at ``first``."""
    return pa.table(
        {
            "kind": pa.array(["label"] * count),
            "label_id": pa.array([f"label-{name(first + LABELLED * number)}" for number in range(count)]),
            "decision_id": pa.array([name(first + LABELLED * number) for number in range(count)]),
            "time": pa.array([NOW] * count, pa.timestamp("us", tz="UTC")),
            "verdict": pa.array(["wrong"] * count),
            "error_type": pa.array(["planning"] * count),
            "confidence": pa.array(np.full(count, 0.9)),
            "annotator": pa.array(["kim"] * count),
            "corrected_action": pa.array(np.arange(count) % ACTION_COUNT, pa.int64()),
        }
    )


def name(number: int) -> str:
    """An id as long as most, in no order."""
    return f"{(number * 0x9E3779B97F4A7C15) % 2**64:016x}-{number:016x}"


def lists(matrix: np.ndarray[Any, Any]) -> pa.Array:
    """A matrix as a column of lists."""
    offsets = pa.array(np.arange(len(matrix) + 1, dtype=np.int32) * matrix.shape[1])
    return pa.ListArray.from_arrays(offsets, pa.array(matrix.reshape(-1)))


def write_parquet(path: Path, rows: int, first: int) -> None:
    """``rows`` rows, one in eleven of them a label, in groups."""
    random = np.random.default_rng(first)
    group = min(GROUP, rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    schema = pa.unify_schemas([decisions(1, 0, random).schema, labels(1, 0).schema])
    with pq.ParquetWriter(path, schema, compression="zstd", compression_level=1, write_page_checksum=True) as writer:
        for start in range(0, rows, group):
            count = group * LABELLED // (LABELLED + 1)
            tables = [decisions(count, first + start, random), labels(group - count, first + start)]
            writer.write_table(pa.concat_tables(tables, promote_options="default").select(schema.names))


def write_jsonl(inbox: Path, files: int, first: int) -> None:
    """Files of three decisions each."""
    inbox.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(first)
    rows = decisions(files * ROWS_OF_A_FILE, first, random).to_pylist()
    for number in range(files):
        mine = rows[number * ROWS_OF_A_FILE : (number + 1) * ROWS_OF_A_FILE]
        lines = [json.dumps({**row, "time": row["time"].isoformat()}) for row in mine]
        (inbox / f"{number:06d}.jsonl").write_text("\n".join(lines) + "\n")


def intake(folder: Path) -> dict[str, Any]:
    """In a process of its own: takes in what lies in the inbox, and says how long that took and how much memory."""
    from agentpipe.feedback.intake import rules_for, take

    began, worked = time.perf_counter(), time.process_time()
    done = take(folder / "inbox", folder / "store", rules_for(now=NOW, late_days=7))
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "seconds": seconds,
        "processor_seconds": round(time.process_time() - worked, 1),
        "peak_gb": round(peak / 1e9, 2),
        "rows_taken": done.rows_taken,
        "quarantined": sum(done.quarantined.values()),
        "files": len(done.files_taken),
    }


def measured(folder: Path) -> dict[str, Any]:
    """:func:`intake` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.feedback_intake", "--intake", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def stored_ids(folder: Path) -> list[str]:
    """The id of every row in the store, as its parts have them."""
    from agentpipe.feedback.schema import KEY

    return [
        identifier
        for kind, key in KEY.items()
        for path in sorted((folder / "store").glob(f"*/{kind}s-*.parquet"))
        for identifier in pq.ParquetFile(path).read([key], use_threads=False).column(key).to_pylist()
    ]


def figure(title: str, found: dict[str, Any], folder: Path, wanted: int) -> Figure:
    """What one intake came to, after every row in the store was counted."""
    ids = stored_ids(folder)
    seconds = found.pop("seconds")
    notes = {**found, "seconds": round(seconds, 1), "lost": wanted - len(set(ids)), "doubled": len(ids) - len(set(ids))}
    rate = found["rows_taken"] / seconds
    print(f"{title}: {notes}", file=sys.stderr)
    return Figure(title, wanted, 1, found["rows_taken"], (rate,), rate, rate, rate, notes)


def measure(folder: Path, rows: int, files: int) -> list[Figure]:
    """The three intakes, one after the other, into one store; a fourth call takes the last file once more."""
    inbox = folder / "inbox"
    write_parquet(inbox / "first.parquet", rows, 0)
    figures = [figure(f"{rows:,} rows of Parquet, empty store", measured(folder), folder, rows)]
    write_parquet(inbox / "second.parquet", rows, rows)
    title = f"{rows:,} rows of Parquet, {rows:,} rows in the store"
    figures.append(figure(title, measured(folder), folder, 2 * rows))
    write_jsonl(inbox, files, 2 * rows)
    wanted = 2 * rows + files * ROWS_OF_A_FILE
    figures.append(
        figure(f"{files:,} JSONL files of {ROWS_OF_A_FILE} rows in one call", measured(folder), folder, wanted)
    )
    return figures


def section(content: dict[str, Any]) -> str:
    """The figures as a table in Markdown."""
    lines = [
        "| intake | seconds | processor seconds | rows/s | peak memory | lost | doubled |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for each in content["figures"]:
        notes = each["notes"]
        rate = f"{each['median']:,.0f}"
        lines.append(
            f"| {each['name']} | {notes['seconds']} | {notes['processor_seconds']} | {rate} | {notes['peak_gb']} GB |"
            f" {notes['lost']} | {notes['doubled']} |"
        )
    asked = f"{LIMITS['seconds']:.0f} s and {LIMITS['gigabytes']:.0f} GB"
    return "\n".join([*lines, "", f"Asked for a million rows of Parquet: under {asked}."])


def main(arguments: Sequence[str] | None = None) -> Path | None:
    """``python -m benchmarks.feedback_intake [--smoke] [--out DIR]``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.feedback_intake", description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="a thousandth of everything: only shows that it works")
    parser.add_argument("--out", type=Path, help="folder of the results; of a smoke run by default a temporary one")
    parser.add_argument("--intake", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.intake:
        print(json.dumps(intake(given.intake)))
        return None
    out = results_folder(given.out, smoke=given.smoke)
    rows, files = (1_100, 10) if given.smoke else (ROWS, FILES)
    origin = stamp("python -m benchmarks.feedback_intake", PACKAGES)
    with tempfile.TemporaryDirectory(prefix="agentpipe-feedback-") as name_:
        figures = measure(Path(name_), rows, files)
    out.mkdir(parents=True, exist_ok=True)
    path = store("feedback_intake", origin, figures, out, smoke=given.smoke, limits=LIMITS)
    print(section(json.loads(path.read_text())))
    return path


if __name__ == "__main__":
    main()
