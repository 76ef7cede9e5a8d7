"""Somebody saves the source of the table at any moment of a change: neither content is lost, and the change says so."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from agentpipe.environments import table_files, table_source, table_store
from agentpipe.environments.table import load_table
from agentpipe.environments.table_source import SourceEditedError, replace_source, set_aside
from agentpipe.environments.table_store import TableStore
from agentpipe.errors import TableError
from agentpipe.storage import digest_bytes, exchange

SIGN = ("ann", "a test")
EDITED = ("sensor,1,0,0.15,", "sensor,1,0,0.2,")


@pytest.fixture(params=["of the home", "of one's own"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> TableStore:
    made = TableStore(tmp_path / "home")
    made.refresh()
    if request.param == "of the home":
        return made
    own = tmp_path / "mine.csv"
    own.write_bytes(made.source_path.read_bytes())
    made = TableStore(tmp_path / "home", source=own)
    made.refresh()
    return made


def into_the_file(path: Path, text: str) -> None:
    path.write_text(text)


def by_rename(path: Path, text: str) -> None:
    path.with_name("editor.tmp").write_text(text)
    path.with_name("editor.tmp").rename(path)


SAVES = [into_the_file, by_rename]
Save = Callable[[Path, str], None]


class Person:
    """Saves the source once, with one value changed, when asked for the first time."""

    def __init__(self, store: TableStore, save: Save) -> None:
        self.store, self.save = store, save
        self.text = store.source_path.read_text().replace(*EDITED)
        self.saved = False

    def __call__(self) -> None:
        if not self.saved:
            self.saved = True
            self.save(self.store.source_path, self.text)


def during(monkeypatch: pytest.MonkeyPatch, module: object, name: str, person: Person, *, first: bool) -> None:
    """The person saves as ``name`` is called: before it does its work, or after."""
    real = getattr(module, name)

    def called(*arguments: object, **named: object) -> object:
        if first:
            person()
        found = real(*arguments, **named)
        person()
        return found

    monkeypatch.setattr(module, name, called)


MOMENTS = {
    # what is called at that moment; whether it is before the work; whether the change was made by then
    "while the table is edited": (table_store, "table_from_rows", False, False),
    "after the source was read": (table_files, "write", False, False),
    "while the audit entry is written": (table_store, "write_json", False, True),
    "before the new content is written aside": (table_source, "write_bytes", True, True),
    "after it was written aside": (table_source, "write_bytes", False, True),
    "between comparison and exchange": (table_source, "exchange", True, True),
}


def change(store: TableStore, way: str) -> None:
    if way == "set":
        store.set("kind = load", {"load_sigma": 0.06}, *SIGN)
    else:
        store.rollback(store.history()[0].after, *SIGN)


def changed(store: TableStore, way: str) -> bool:
    """Whether the current table is what the change makes, whatever the edit is."""
    if way == "set":
        table = store.current()
        return {round(float(table.column("load_sigma")[row]), 6) for row in table.cell_rows("load-1")} == {0.06}
    return store.current().version == store.history()[0].after


CASES = [("set", moment) for moment in MOMENTS]
CASES += [("rollback", moment) for moment in MOMENTS if moment != "while the table is edited"]


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize(("way", "moment"), CASES)
def test_an_edit_at_any_moment_of_a_change_stays_and_is_told(
    store: TableStore, monkeypatch: pytest.MonkeyPatch, way: str, moment: str, save: Save
) -> None:
    module, name, first, made = MOMENTS[moment]
    if way == "rollback":
        store.set("kind = load", {"load_sigma": 0.07}, *SIGN)
    person, before = Person(store, save), len(store.history())
    during(monkeypatch, module, name, person, first=first)
    with pytest.raises(SourceEditedError, match="run the command again") as caught:
        change(store, way)
    monkeypatch.undo()
    assert person.saved
    assert store.source_path.read_text() == person.text
    assert len(store.history()) == before + made
    assert changed(store, way) == made
    assert ("nothing is changed" if not made else store.current().version[:12]) in caught.value.message
    assert not list(store.source_path.parent.glob(".staging-*"))
    edited = load_table(store.source_path)
    change(store, way)
    assert store.load(edited.version) == edited
    assert changed(store, way)
    assert load_table(store.source_path) == store.current()
    assert [entry.action for entry in store.history()][-2:] == ["edit", way]


def test_a_save_of_the_same_bytes_is_no_edit(store: TableStore, monkeypatch: pytest.MonkeyPatch) -> None:
    person = Person(store, by_rename)
    person.text = store.source_path.read_text()
    during(monkeypatch, table_source, "exchange", person, first=True)
    change(store, "set")
    assert person.saved
    assert load_table(store.source_path) == store.current()


def test_another_text_of_the_same_table_is_an_edit(store: TableStore, monkeypatch: pytest.MonkeyPatch) -> None:
    person = Person(store, into_the_file)
    person.text = store.source_path.read_text().replace(",0.15,", ",0.150,")
    during(monkeypatch, table_source, "write_bytes", person, first=False)
    with pytest.raises(SourceEditedError):
        change(store, "set")
    assert store.source_path.read_text() == person.text


def test_a_source_that_is_removed_meanwhile_is_told(store: TableStore, monkeypatch: pytest.MonkeyPatch) -> None:
    person = Person(store, lambda path, _: path.unlink())
    during(monkeypatch, table_source, "exchange", person, first=True)
    with pytest.raises(SourceEditedError):
        change(store, "set")
    assert changed(store, "set")


def test_a_source_that_changes_at_every_look_is_not_read(store: TableStore, monkeypatch: pytest.MonkeyPatch) -> None:
    real, versions, entries = table_source.load_table, store.current().version, len(store.history())

    def growing(path: Path) -> object:
        found = real(path)
        path.write_text(path.read_text() + "\n")
        return found

    monkeypatch.setattr(table_source, "load_table", growing)
    for way in (lambda: change(store, "set"), lambda: change(store, "rollback")):
        with pytest.raises(SourceEditedError, match="changes while it is read"):
            way()
    monkeypatch.undo()
    assert (store.current().version, len(store.history())) == (versions, entries)
    assert not (store.folder / "rejected").exists()


def test_a_bad_source_that_is_saved_anew_while_it_is_set_aside_is_kept_twice(
    store: TableStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.source_path.write_text("nonsense\n")
    person = Person(store, into_the_file)
    person.text = "more nonsense\n"
    during(monkeypatch, table_source, "_keep", person, first=False)
    store.rollback("current", *SIGN)
    kept = {path.read_text() for path in (store.folder / "rejected").iterdir()}
    assert kept == {"nonsense\n", "more nonsense\n"}
    assert load_table(store.source_path) == store.current()


def test_a_source_that_appears_while_a_new_one_is_made_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = TableStore(tmp_path / "home")
    store.refresh()
    person = Person(store, into_the_file)
    store.source_path.unlink()
    during(monkeypatch, table_source, "write_bytes", person, first=False)
    assert store.refresh() == load_table(store.source_path)
    assert store.source_path.read_text() == person.text
    assert store.history()[-1].action == "edit"


def test_what_a_killed_change_left_undone_does_not_overwrite_an_edit_of_that_moment(
    store: TableStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(table_source, "replace_source", kill)
    with pytest.raises(KeyboardInterrupt):
        change(store, "set")
    monkeypatch.undo()
    person = Person(store, by_rename)
    during(monkeypatch, table_source, "exchange", person, first=True)
    assert store.refresh() == load_table(store.source_path)
    assert store.source_path.read_text() == person.text
    assert [entry.action for entry in store.history()] == ["import", "set", "edit"]


# ----------------------------------------------------------------------------------------------------- the file


def test_of_two_saves_within_the_exchange_the_later_is_kept_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "source.csv"
    path.write_bytes(b"read")
    saves = iter([b"first save", b"second save"])

    def saved_before(one: Path, other: Path) -> bool:
        other.write_bytes(next(saves))
        return exchange(one, other)

    monkeypatch.setattr(table_source, "exchange", saved_before)
    with pytest.raises(SourceEditedError) as caught:
        replace_source(path, b"new", digest_bytes(b"read"))
    kept = caught.value.where["kept"]
    assert isinstance(kept, Path)
    assert (path.read_bytes(), kept.read_bytes()) == (b"first save", b"second save")
    assert sorted(tmp_path.iterdir()) == [path, kept]


@pytest.mark.parametrize("swaps", [True, False])
def test_where_nobody_saves_the_new_content_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swaps: bool
) -> None:
    if not swaps:
        monkeypatch.setattr(table_source, "exchange", lambda *_: False)
    path = tmp_path / "source.csv"
    replace_source(path, b"one", None)
    replace_source(path, b"two", digest_bytes(b"one"))
    assert path.read_bytes() == b"two"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("code", table_source._NO_LINKS)
def test_a_file_system_without_links_gets_a_new_source_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    replace_source(tmp_path / "source.csv", b"one", None)
    assert (tmp_path / "source.csv").read_bytes() == b"one"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_link_in_place_of_the_source_leaves_what_it_points_to(tmp_path: Path) -> None:
    target, path = tmp_path / "shared.csv", tmp_path / "source.csv"
    target.write_bytes(b"one")
    path.symlink_to("shared.csv")
    replace_source(path, b"two", digest_bytes(b"one"))
    assert (path.read_bytes(), target.read_bytes(), path.is_symlink()) == (b"two", b"one", False)


def test_a_source_set_aside_is_named_by_its_content(tmp_path: Path) -> None:
    path = tmp_path / "source.csv"
    path.write_bytes(b"bad")
    set_aside(path, tmp_path / "rejected")
    assert not path.exists()
    assert [kept.read_bytes() for kept in (tmp_path / "rejected").iterdir()] == [b"bad"]


def test_it_is_a_table_error_for_those_who_catch_these() -> None:
    assert issubclass(SourceEditedError, TableError)
