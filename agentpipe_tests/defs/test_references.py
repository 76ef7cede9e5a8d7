from __future__ import annotations

import json

import pytest

from agentpipe.defs.references import MISSING, Reference, References
from agentpipe.errors import CorruptError
from agentpipe.storage import read_json, write_json


def reference(partition: str | None = None, version: str = "v1") -> Reference:
    return Reference("trajectories", partition, version, "trajectories/x", {"up": "u"}, "c", "1", 0.5, {"episodes": 3})


def test_a_reference_comes_back_as_it_was_left(tmp_path) -> None:
    references = References(tmp_path)
    references.save(reference("2026-01-01|manual"))
    assert references.load("trajectories", "2026-01-01|manual") == reference("2026-01-01|manual")
    assert references.artefact("trajectories", "2026-01-01|manual") == tmp_path / "trajectories/x"


def test_what_was_never_materialised_is_missing_not_empty(tmp_path) -> None:
    references = References(tmp_path)
    assert references.find("trajectories", "load-1") is None
    assert references.version("trajectories", "load-1") == MISSING
    assert references.version_of_all("trajectories", ("load-1", "load-2")) == MISSING
    with pytest.raises(CorruptError, match=r"trajectories\[load-1\] was never materialised"):
        references.load("trajectories", "load-1")


def test_the_version_of_all_changes_with_any_of_them(tmp_path) -> None:
    references = References(tmp_path)
    seen = set()
    for key, version in (("a", "1"), ("b", "1"), ("b", "2"), ("a", "2")):
        references.save(reference(key, version))
        seen.add(references.version_of_all("trajectories", ("a", "b")))
    assert len(seen) == 4


@pytest.mark.parametrize("content", ["{}", "[]", '{"asset": "x"}', "half", ""])
def test_a_damaged_reference_names_its_file(tmp_path, content: str) -> None:
    path = References(tmp_path).path("trajectories", "load-1")
    path.parent.mkdir(parents=True)
    path.write_text(content)
    with pytest.raises(CorruptError) as caught:
        References(tmp_path).find("trajectories", "load-1")
    assert caught.value.where["file"] == path


def test_a_reference_of_another_version_with_more_fields_is_refused(tmp_path) -> None:
    references = References(tmp_path)
    references.save(reference())
    path = references.path("trajectories")
    path.write_text(json.dumps({**json.loads(path.read_text()), "later": 1}))
    with pytest.raises(CorruptError, match="later"):
        references.find("trajectories")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("consumed", None),
        ("consumed", {"a": 1}),
        ("figures", []),
        ("path", None),
        ("data_version", 7),
        ("seconds", "x"),
    ],
)
def test_a_field_of_another_type_is_a_typed_error(tmp_path, field, value):
    references = References(tmp_path)
    references.save(Reference("a", None, "v", "p", {}, "c", "1", 0.0))
    path = references.path("a")
    write_json(path, {**read_json(path), field: value})
    with pytest.raises(CorruptError, match="of another type"):
        references.find("a")


@pytest.mark.parametrize(
    "figures",
    [
        {"parent": None},
        {"champion": 5},
        {"status": []},
        {"table_version": 1},
        {"fate": None},
        {"reason": {}},
        {"package_bytes": "7"},
        {"package_bytes": True},
        {"behaviour_ordinal": 1.5},
        {"decisions": None},
        {"success": "0.9"},
        {"success": True},
        {"promoted": 1},
        {"verdicts": []},
        {"reasons": "it is a demo"},
        {"reasons": [5]},
        {"gates": {}},
        {"gates": [5]},
        {"gates": [{"name": "success", "severity": "error"}]},
        {"gates": [{"name": "success", "severity": "error", "passed": "yes"}]},
        {"gates": [{"name": 5, "severity": "error", "passed": True}]},
    ],
)
def test_a_figure_of_another_type_is_a_typed_error(tmp_path, figures):
    references = References(tmp_path)
    references.save(Reference("a", None, "v", "p", {}, "c", "1", 0.0, figures))
    with pytest.raises(CorruptError, match="of another type") as caught:
        references.find("a")
    assert caught.value.where["file"] == references.path("a")


def test_a_figure_that_is_missing_is_a_typed_error_that_names_it():
    with pytest.raises(CorruptError, match=r"trajectories\[load-1\] lacks a figure \[field parent\]"):
        reference("load-1").figure("parent")
    assert reference("load-1").figure("episodes") == 3
