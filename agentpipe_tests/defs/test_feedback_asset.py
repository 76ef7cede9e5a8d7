"""``production_feedback``: what its materialisation says of files that were not taken."""

from __future__ import annotations

import datetime as dt
import json
from typing import Any

import dagster as dg
import pytest

from agentpipe.defs.feedback import assets
from agentpipe.defs.partitions import last_closed_day
from agentpipe.defs.resources import Workspace
from agentpipe.environments.datafiles import data_dir
from agentpipe.environments.layout import ACTION_COUNT, OBSERVATION_SIZE
from agentpipe.feedback.store import days, decisions_of, quarantine_counts
from agentpipe.serving.agent.deciders import RulesDecider
from agentpipe.serving.signature import policy_signature
from agentpipe_tests.defs.homes import QUIET
from agentpipe_tests.feedback.examples import drop
from agentpipe_tests.serving.agent.questions import LINE

DAY = last_closed_day().isoformat()


def metadata(workspace: Workspace) -> dict[str, Any]:
    done = dg.materialize(
        [assets.production_feedback], partition_key=DAY, resources={"workspace": workspace}, run_config=QUIET
    )
    [event] = done.asset_materializations_for_node("production_feedback")
    return dict(event.metadata)


def table(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [dict(record.data) for record in found["inbox"].records]


@pytest.fixture
def workspace(tmp_path: Any) -> Workspace:
    made = Workspace(home=str(tmp_path), profile="demo")
    (made.root / "feedback" / "inbox").mkdir(parents=True)
    return made


def test_what_was_not_taken_is_listed_with_the_reason(workspace: Workspace) -> None:
    inbox = workspace.root / "feedback" / "inbox"
    (inbox / "x.jsonl").mkdir()
    for name, text in {"cut.jsonl": '{"kind": ', ".hidden.csv": "x", "a.json": "{}", "bad.csv": "a,b\n"}.items():
        (inbox / name).write_text(text)
    (inbox / "good.jsonl").write_text((data_dir() / "feedback_sample.jsonl").read_text())
    found = metadata(workspace)
    assert [(row["file"], row["what"]) for row in table(found)] == [
        ("bad.csv", "refused"),
        ("x.jsonl", "refused"),
        ("cut.jsonl", "waits"),
        (".hidden.csv", "ignored"),
        ("a.json", "ignored"),
    ]
    assert all(row["why"] for row in table(found))
    counts = {name: found[f"files_{name}"].value for name in ("taken", "refused", "waiting", "ignored")}
    assert counts == {"taken": 1, "refused": 2, "waiting": 1, "ignored": 2}
    assert [row["what"] for row in table(metadata(workspace))] == ["waits", "ignored", "ignored"]


def test_of_many_files_some_are_listed(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assets, "MOST_FILES", 3)
    for number in range(5):
        (workspace.root / "feedback" / "inbox" / f"{number}{'x' * 240}.txt").write_text("x")
    listed = table(metadata(workspace))
    assert len(listed) == 4
    assert listed[-1]["why"].startswith("2 more; agentpipe feedback status")
    assert max(len(row["file"]) for row in listed) == 200


def test_a_redis_that_cannot_be_used_is_said_and_the_inbox_is_taken_in(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://:geheim@localhost/x")
    (workspace.root / "feedback" / "inbox" / "good.jsonl").write_text("{}\n")
    found = metadata(workspace)
    assert "REDIS_URL is malformed" in found["stream"].value
    assert "geheim" not in found["stream"].value
    assert found["files_taken"].value == 1


def test_decisions_of_an_agent_s_rules_are_taken_on_every_line(workspace: Workspace) -> None:
    names = [f"x{number}" for number in range(OBSERVATION_SIZE)]
    other = policy_signature(OBSERVATION_SIZE, ACTION_COUNT, observation_names=names)
    versions = sorted(RulesDecider(signature).policy_version for signature in (LINE, other))
    sample = [json.loads(line) for line in (data_dir() / "feedback_sample.jsonl").read_text().splitlines()]
    decision = next(row for row in sample if row["kind"] == "decision")
    now = dt.datetime.now(dt.UTC).isoformat()
    rows = [
        {**decision, "decision_id": f"d-{name}", "time": now, "policy_version": name} for name in (*versions, "rules-x")
    ]
    drop(workspace.root / "feedback" / "inbox", "rules.jsonl", rows)
    metadata(workspace)
    store = workspace.root / "feedback" / "store"
    assert quarantine_counts(store) == {"unknown_policy_version": 1}
    taken = [row for table in decisions_of(store, days(store), ["policy_version"]) for row in table.to_pylist()]
    assert sorted(row["policy_version"] for row in taken) == versions
    assert "rules-hold" in versions
