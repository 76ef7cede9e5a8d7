"""The main job from end to end, as a user runs it; every test is named after the fault that must not happen."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from agentpipe.defs.graph import EXTERNAL
from agentpipe_tests.acceptance.conftest import Home
from agentpipe_tests.strategies import REPOSITORY, shared_data

pytestmark = pytest.mark.slow
CELL_ASSETS = ("disturbance_table", "environment_pool_health", "trajectories")


def instance(home: Home, monkeypatch: pytest.MonkeyPatch) -> dg.DagsterInstance:
    monkeypatch.setenv("DAGSTER_HOME", str(home.path / "dagster"))
    return dg.DagsterInstance.get()


def materialisations(found: dg.DagsterInstance) -> Counter[tuple[str, str | None]]:
    counts: Counter[tuple[str, str | None]] = Counter()
    for key in found.get_asset_keys():
        for record in found.fetch_materializations(key, limit=1000).records:
            counts[key.to_user_string(), record.partition_key] += 1
    return counts


def wait_for(process: subprocess.Popen[str], text: str) -> str:
    """Reads standard error until a line holds ``text``."""
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        if text in line:
            return line
    raise AssertionError(f"{text!r} never came:\n{''.join(seen)}")


# ------------------------------------------------------------------------------------------------ the document


def test_the_document_says_everything(finished: tuple[Home, dict[str, Any]]) -> None:
    home, document = finished
    assert document["ok"] is True
    assert document["splits"] == {"train": 30, "validation": 15, "holdout": 30}
    assert re.fullmatch(r"\d+\.\d+\.\d+", document["simulator_version"])
    assert re.fullmatch(r"[0-9a-f]{64}", document["table_version"])
    assert {"rows_used", "modes_fitted", "rows_set_aside"} <= set(document["line_profile"])
    assert set(document["players"]) == {"random", "rules", "diagnoser", "oracle", "policy"}
    for name, player in document["players"].items():
        low, high = player["ci95"]
        assert 0 <= low <= player["success"] <= high <= 1, name
        assert player["decision_seconds"] > 0, name
    assert document["players"]["oracle"]["success"] > document["players"]["random"]["success"]
    assert document["gates"]["parity"]["passed"] is True
    assert Path(document["package"]["path"]).is_dir()
    assert Path(document["bundle"]["path"]).is_dir()
    assert document["bundle"]["parity_max_abs_diff"] <= 1e-5
    assert document["bundle"]["promotable"] is False
    assert document["bundle"]["server_check"]["status"] in ("PASSED", "SKIPPED")
    assert document["bundle"]["server_check"]["status"] == "PASSED" or document["bundle"]["server_check"]["reason"]
    assert document["champion"]["promoted"] is False
    assert set(document["seconds"]) >= {"disturbance_table", "policy_checkpoint", "triton_bundle"}
    assert document["ui"] == f"agentpipe ui --home {home.path}"


def test_a_finished_partition_is_not_repeated(finished: tuple[Home, dict[str, Any]]) -> None:
    home, first = finished
    code, again, _ = home.call("run")
    assert code == 0
    assert again["runs"] == {"materialised": 0, "reused": 58}
    unchanged = {key: value for key, value in first.items() if key not in ("runs", "wall_seconds")}
    assert {key: value for key, value in again.items() if key not in ("runs", "wall_seconds")} == unchanged


def test_every_partition_has_one_event_and_one_data_version(
    finished: tuple[Home, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    home, _ = finished
    with instance(home, monkeypatch) as found:
        counts = materialisations(found)
        assert len([key for key in counts if key[0] in CELL_ASSETS]) == 45
        assert set(counts.values()) == {1}
        key = dg.AssetKey("trajectories")
        versions = {
            record.partition_key: record.asset_materialization.tags["dagster/data_version"]
            for record in found.fetch_materializations(key, limit=100).records
        }
    assert len(set(versions.values())) == 15


def test_metadata_of_megabytes_never_enters_an_event(
    finished: tuple[Home, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    home, _ = finished
    with instance(home, monkeypatch) as found:
        for key in found.get_asset_keys():
            outside = key.to_user_string() in EXTERNAL  # only told of
            for record in found.fetch_materializations(key, limit=100).records:
                for name, value in record.asset_materialization.metadata.items():
                    assert len(str(value.value)) <= 17_000, (key, name)
                metadata = set(record.asset_materialization.metadata)
                assert outside or {"consumed", "seconds", "artefact", "configuration"} <= metadata


def test_plots_are_shown_in_the_events(finished: tuple[Home, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    home, _ = finished
    with instance(home, monkeypatch) as found:
        [record] = found.fetch_materializations(dg.AssetKey("holdout_evaluation"), limit=1).records
    shown = record.asset_materialization.metadata
    for name in ("by_cell", "by_fault_mode", "failures", "decision_time"):
        assert "data:image/png;base64," in shown[name].value, name


def test_a_check_of_a_partition_belongs_to_that_partition(
    finished: tuple[Home, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    home, _ = finished
    with instance(home, monkeypatch) as found:
        events = found.fetch_materializations(dg.AssetKey("environment_pool_health"), limit=100).records
        by_run = {record.run_id: record.partition_key for record in events}
        for run_id, partition in by_run.items():
            checks = [
                entry.dagster_event.event_specific_data
                for entry in found.all_logs(run_id, of_type=dg.DagsterEventType.ASSET_CHECK_EVALUATION)
            ]
            assert len(checks) == 7  # pool health and buffer, in one run
            assert {check.partition for check in checks} == {partition}


def test_the_same_package_gives_the_same_figures_twice(finished: tuple[Home, dict[str, Any]]) -> None:
    home, document = finished
    arguments = (
        "evaluate",
        "--package",
        document["package"]["path"],
        "--environments",
        "30",
        "--episodes-per-env",
        "2",
    )
    first, second = home.call(*arguments), home.call(*arguments, AGENTPIPE_THREADS="2")
    assert first[0] == second[0] == 0
    assert first[1] == second[1]
    assert first[1]["players"]["policy"]["episodes"] == 60


def test_a_flipped_byte_in_a_bundle_is_found(finished: tuple[Home, dict[str, Any]], tmp_path: Path) -> None:
    home, document = finished
    bundle = tmp_path / "bundle"
    shutil.copytree(document["bundle"]["path"], bundle)
    assert home.call("bundle", "verify", str(bundle))[0] == 0
    [graph] = bundle.rglob("model.onnx")
    content = bytearray(graph.read_bytes())
    content[len(content) // 2] ^= 1
    graph.write_bytes(content)
    code, answer, _ = home.call("bundle", "verify", str(bundle))
    assert code == 1
    assert answer["error"]["type"] == "BundleError"
    assert "model.onnx" in answer["error"]["where"]["file"]


# ------------------------------------------------------------------------- the same home goes on: order matters


def test_one_edited_row_runs_exactly_its_cell_again(
    finished: tuple[Home, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    home = copy_of(finished[0], tmp_path)
    where = "kind = network and intensity = 2 and variant = 1"
    code, _, log = home.call("table", "set", "network_rtt_ms=77", "--where", where, "--who", "eve", "--why", "switch")
    assert code == 0, log
    code, document, log = home.call("run")
    assert code == 0, log
    with instance(home, monkeypatch) as found:
        counts = materialisations(found)
    repeated = sorted(key for key, count in counts.items() if count == 2 and key[0] in CELL_ASSETS)
    assert repeated == [(asset, "network-2") for asset in CELL_ASSETS]
    assert counts["line_profile", None] == counts["environment_catalog", None] == 1
    assert document["table_version"] != finished[1]["table_version"]


def test_a_failing_evaluation_makes_no_bundle_and_keeps_the_checkpoint(
    finished: tuple[Home, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = copy_of(finished[0], tmp_path)
    bundles = sorted((home.path / "bundles").iterdir())
    code, answer, _ = home.call("run", AGENTPIPE_GATES__RANDOM_MARGIN="2")
    assert code == 1
    assert answer["error"]["type"] == "GateError"
    assert "beats_random" in answer["error"]["message"]
    assert answer["error"]["remedy"]
    assert sorted((home.path / "bundles").iterdir()) == bundles
    assert len(list((home.path / "policy_checkpoint" / finished_key(finished)).iterdir())) == 2
    with instance(home, monkeypatch) as found:
        counts = materialisations(found)
    candidate = finished[1]["partition"]
    assert counts["policy_checkpoint", candidate] == counts["holdout_evaluation", candidate] == 2
    assert counts["failure_attribution", candidate] == counts["triton_bundle", candidate] == 1
    # asked again, it does not slip past the gate that already failed
    code, answer, _ = home.call("run", AGENTPIPE_GATES__RANDOM_MARGIN="2")
    assert (code, answer["error"]["type"]) == (1, "GateError")
    assert sorted((home.path / "bundles").iterdir()) == bundles


def test_a_broken_table_leaves_the_last_good_state(finished: tuple[Home, dict[str, Any]], tmp_path: Path) -> None:
    home = copy_of(finished[0], tmp_path)
    version = home.call("table", "show")[1]["version"]
    source = Path(home.call("table", "show")[1]["source"])
    lines = source.read_text().splitlines()
    lines[3] = lines[3].replace(lines[3].split(",")[3], "nan", 1)
    source.write_text("\n".join(lines) + "\n")
    code, answer, _ = home.call("run")
    assert code == 1
    assert answer["error"]["type"] == "TableError"
    assert {"file", "row", "field"} <= set(answer["error"]["where"])
    assert home.call("table", "show")[1]["version"] == version


def test_kill_leaves_nothing_half_done_and_the_next_run_goes_on_with_the_given_line(
    finished: tuple[Home, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = shared_data("pdm/ai4i2020.csv")
    home = Home(tmp_path / "home")
    process = home.start("run", "--machine-history", str(history))
    wait_for(process, "cell[sensor-4] done")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    code, document, log = home.call("run", "--machine-history", str(history))
    assert code == 0, log
    assert document["runs"]["reused"] >= 2 + 4 * 3
    assert document["runs"]["materialised"] + document["runs"]["reused"] == 58
    with instance(home, monkeypatch) as found:
        counts = materialisations(found)
        statuses = Counter(run.status for run in found.get_runs())
    assert all(counts[asset, f"sensor-{index}"] == 1 for asset in CELL_ASSETS for index in (1, 2, 3, 4))
    assert set(statuses) <= {dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE}
    assert not list(home.path.rglob(".staging-*"))
    line = document["line_profile"]
    assert line["rows_used"] > 9_900
    assert line["modes_fitted"]
    assert {str(entry["rows"]) for entry in line["rows_set_aside"]} >= {"9", "18"}
    assert line["digest"] != finished[1]["line_profile"]["digest"]


def test_a_signal_in_training_ends_whole_and_training_goes_on(
    finished: tuple[Home, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = copy_of(finished[0], tmp_path)
    longer = {"AGENTPIPE_TRAINING__TOTAL_STEPS": "200000", "AGENTPIPE_TRAINING__PATIENCE": "100000"}
    lines = []
    for number in (signal.SIGINT, signal.SIGTERM):
        process = home.start("run", **longer)
        lines.append(wait_for(process, "training: "))
        process.send_signal(number)
        out, log = process.communicate(timeout=300)
        assert process.returncode == 130, log
        assert json.loads(out)["error"]["type"] == "Interrupted"
    with instance(home, monkeypatch) as found:
        assert {run.status for run in found.get_runs()} <= {
            dg.DagsterRunStatus.SUCCESS,
            dg.DagsterRunStatus.FAILURE,
            dg.DagsterRunStatus.CANCELED,
        }
        assert materialisations(found)["policy_checkpoint", finished[1]["partition"]] == 1
    assert not re.search(r"training: 0 of", lines[1]), "training began again instead of going on"


def test_two_main_jobs_in_one_home_are_one_too_many(finished: tuple[Home, dict[str, Any]], tmp_path: Path) -> None:
    home = copy_of(finished[0], tmp_path)
    process = home.start("run", "--seed", "5")
    wait_for(process, "cell[sensor-1]")
    code, answer, _ = home.call("run")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert code == 1
    assert answer["error"]["type"] == "LockHeldError"
    assert f"process {process.pid}" in answer["error"]["message"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of three megabytes; needs the right to mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("no right to mount a small file system here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_is_said_plainly_and_what_is_finished_is_kept(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home(small_disk / "home")
    code, answer, _ = home.call("run")
    assert (code, answer["error"]["type"]) == (1, "DiskFullError")
    assert not list(home.path.rglob(".staging-*"))
    subprocess.run(["mount", "-o", "remount,size=500m", str(small_disk)], check=True)
    with instance(home, monkeypatch) as found:
        before = materialisations(found)
    process = home.start("run")
    wait_for(process, "cell[sensor-5] done")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    with instance(home, monkeypatch) as found:
        after = materialisations(found)
    assert {key: after[key] for key in before} == before
    assert before["line_profile", None] == 1
    assert all(after[asset, f"sensor-{index}"] == 1 for asset in CELL_ASSETS for index in range(1, 6))


def copy_of(home: Home, folder: Path) -> Home:
    shutil.copytree(home.path, folder / "home", symlinks=True)
    return Home(folder / "home")


def finished_key(finished: tuple[Home, dict[str, Any]]) -> str:
    return str(finished[1]["partition"]).replace("|", "_")


def test_feedback_of_other_days_does_not_train_again(finished: tuple[Home, dict[str, Any]], tmp_path: Path) -> None:
    home = copy_of(finished[0], tmp_path)
    inbox = home.path / "feedback" / "inbox"
    shutil.copy(REPOSITORY / "data" / "feedback_sample.jsonl", inbox)
    code, document, log = home.call("run")
    assert code == 0, log
    assert document["runs"] == {"materialised": 1, "reused": 57}
    assert not list(inbox.glob("*.jsonl"))
    assert home.call("run")[1]["runs"] == {"materialised": 0, "reused": 58}
