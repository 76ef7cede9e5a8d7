from __future__ import annotations

import base64

import dagster as dg
import pytest

from agentpipe.defs import steps
from agentpipe.defs.progress import listening, reporter
from agentpipe.defs.resources import hold_home
from agentpipe.errors import LockHeldError


def test_metadata_is_capped_and_says_that_it_is() -> None:
    text = steps.markdown("| row |\n" * 10_000).value
    assert len(text.encode()) <= steps.METADATA_LIMIT
    assert text.endswith("(cut; the whole is in the artefact)")


def test_a_plot_is_shown_inside_the_event_unless_it_is_too_large() -> None:
    assert base64.b64encode(b"png").decode() in steps.plot(b"png", "figure").value
    assert "data:image" not in steps.plot(bytes(steps.METADATA_LIMIT), "figure").value


def test_a_table_may_have_gaps_and_nested_values() -> None:
    table = steps.rows([{"a": 1, "b": [1, 2]}, {"a": 2.5}])
    assert isinstance(table, dg.TableMetadataValue)
    assert [dict(record.data) for record in table.records] == [{"a": 1, "b": "[1, 2]"}, {"a": 2.5, "b": ""}]


def test_an_empty_table_is_text() -> None:
    assert steps.rows([]) == dg.MetadataValue.text("none")


def test_progress_reaches_who_listens_and_the_log_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    heard, logged = [], []
    clock = iter([0.0, 1.0, 11.0, 12.0])
    monkeypatch.setattr("agentpipe.defs.progress.time.monotonic", lambda: next(clock))
    report = reporter("trajectories[load-1]", logged.append)
    with listening(lambda *content: heard.append(content)):
        for done in (1, 2, 3):
            report("play", done, 3, "rules")
    assert heard == [("trajectories[load-1]: play", done, 3, "rules") for done in (1, 2, 3)]
    assert logged == ["play: 2 of 3 (rules)"]


def test_one_process_holds_a_home_once_however_often_it_asks(tmp_path) -> None:
    with hold_home(tmp_path, "outer"), hold_home(tmp_path, "inner"):
        pass
    with hold_home(tmp_path, "again"):
        pass


def test_a_home_that_another_process_holds_is_not_waited_for_for_ever(tmp_path) -> None:
    import subprocess
    import sys

    code = (
        "import sys; from pathlib import Path; from agentpipe.storage import home_lock\n"
        f"with home_lock(Path({str(tmp_path)!r}), 'the other run'): print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(LockHeldError, match="the other run"), hold_home(tmp_path, "mine", patience=0.3):
            pass
        other.stdin.close()
    with hold_home(tmp_path, "mine"):
        pass
