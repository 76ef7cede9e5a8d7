"""The table store: every version kept, every change signed, one writer, and never a half-made state."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import tempfile
from datetime import UTC, datetime, timedelta

import pytest

from agentpipe.environments import table_files, table_source, table_store
from agentpipe.environments.datafiles import data_dir
from agentpipe.environments.parameters import CELLS
from agentpipe.environments.table import load_table
from agentpipe.environments.table_store import TableStore
from agentpipe.errors import CorruptError, DiskFullError, HomeError, LockHeldError, TableError, VersionError
from agentpipe.storage import home_lock

DEFAULT = data_dir() / "disturbances.csv"


@pytest.fixture
def store(tmp_path):
    store = TableStore(tmp_path / "home")
    store.refresh()
    return store


def edit(store, old, new):
    text = store.source_path.read_text()
    assert old in text
    store.source_path.write_text(text.replace(old, new))


def state(store):
    """Every byte of the store but the lock."""
    files = (path for path in store.folder.rglob("*") if path.is_file() and path.name != "lock")
    return {str(path.relative_to(store.folder)): path.read_bytes() for path in files}


# --------------------------------------------------------------------------------------------------------------- use


def test_first_use_copies_the_default_and_signs_the_import(store):
    assert store.source_path.read_bytes() == DEFAULT.read_bytes()
    assert store.current() == load_table(DEFAULT)
    (entry,) = store.history()
    assert (entry.action, entry.before, entry.after) == ("import", None, store.current().version)
    assert entry.cells == CELLS


def test_refresh_of_an_unchanged_source_writes_nothing(store):
    before = state(store)
    assert store.refresh().version == store.current().version
    assert state(store) == before


def test_set_changes_the_selected_rows_only_and_rewrites_the_source(store):
    before = store.current()
    change = store.set(
        "kind = sensor and intensity >= 4 and variant in (0,1)", {"sensor_sigma": 0.4}, "ann", "too noisy"
    )
    after = store.current()
    assert change.version == after.version
    assert change.diff.cells == ("sensor-4", "sensor-5")
    assert [(c.intensity, c.variant, c.column, c.after) for c in change.diff.changed] == [
        (4, 0, "sensor_sigma", 0.4),
        (4, 1, "sensor_sigma", 0.4),
        (5, 0, "sensor_sigma", 0.4),
        (5, 1, "sensor_sigma", 0.4),
    ]
    assert load_table(store.source_path) == after
    assert store.load(before.version) == before
    entry = store.history()[-1]
    assert (entry.who, entry.why, entry.action, entry.cells) == ("ann", "too noisy", "set", ("sensor-4", "sensor-5"))
    assert entry.detail["set"] == {"sensor_sigma": 0.4}


def test_changes_are_stamped_in_utc(store):
    stamp = datetime.fromisoformat(store.history()[0].at)
    assert stamp.utcoffset() == timedelta(0)
    assert abs(datetime.now(UTC) - stamp) < timedelta(minutes=1)


def test_digests_and_versions_hold_no_time(tmp_path):
    """Two homes that made the same changes at different times have the same versions."""
    versions = []
    for name in ("a", "b"):
        store = TableStore(tmp_path / name)
        store.refresh()
        store.set("kind = load", {"load_sigma": 0.06}, name, "because")
        versions.append([entry.after for entry in store.history()])
    assert versions[0] == versions[1]


def test_rollback_is_a_new_change_and_keeps_all_versions(store):
    first = store.current().version
    second = store.set("kind = load", {"load_sigma": 0.06}, "ann", "x").version
    change = store.rollback(first[:8], "bob", "was better")
    assert change.version == first
    assert change.diff.cells == ("load-1", "load-2", "load-3", "load-4", "load-5")
    assert [entry.after for entry in store.history()] == [first, second, first]
    assert load_table(store.source_path).version == first
    assert store.load(second).version == second
    assert store.diff(first, second).cells == store.diff(second, first).cells


def test_setting_what_is_there_already_is_no_change(store):
    before = state(store)
    change = store.set("kind = load and intensity = 3 and variant = 0", {"load_sigma": 0.05}, "ann", "x")
    assert change.entry is None
    assert not change.diff
    assert state(store) == before


def test_edited_source_is_published_with_its_owner(store):
    edit(store, "sensor,1,0,0.15,", "sensor,1,0,0.2,")
    assert store.unpublished().cells == ("sensor-1",)
    table = store.refresh()
    assert table == store.current()
    entry = store.history()[-1]
    assert (entry.action, entry.cells, entry.values) == ("edit", ("sensor-1",), 1)
    assert "owner of the file" in entry.who
    assert store.unpublished() is None


def test_edit_that_nobody_published_is_not_lost_by_a_set(store):
    edit(store, "sensor,1,0,0.15,", "sensor,1,0,0.2,")
    store.set("kind = load", {"load_sigma": 0.06}, "ann", "x")
    assert [entry.action for entry in store.history()] == ["import", "edit", "set"]
    assert store.current().rows[0].values[0] == 0.2


def test_a_source_of_the_users_own_is_followed_and_rewritten(tmp_path):
    own = tmp_path / "mine.csv"
    own.write_bytes(DEFAULT.read_bytes())
    store = TableStore(tmp_path / "home", source=own)
    store.refresh()
    store.set("kind = load", {"load_sigma": 0.06}, "ann", "x")
    assert load_table(own) == store.current()
    assert not (tmp_path / "home" / "table" / "source.csv").exists()
    own.unlink()
    with pytest.raises(TableError, match="does not exist"):
        store.refresh()
    assert store.current().version == store.history()[-1].after


def test_history_of_an_environment_lists_only_its_own_changes(store):
    environment = "t0001.sensor-4"
    row = store.current().rows[store.current().row_for(environment)]
    store.set("kind = load", {"load_sigma": 0.06}, "ann", "not its cell")
    store.set(f"kind = sensor and intensity = 4 and variant = {row.variant}", {"sensor_sigma": 0.4}, "ann", "its row")
    store.set(f"kind = sensor and intensity = 4 and variant != {row.variant}", {"sensor_sigma": 0.4}, "ann", "others")
    changes = store.environment_history(environment)
    assert [change.entry.why for change in changes] == ["first use", "its row"]
    assert changes[-1].fingerprint == store.current().fingerprint(environment)


def test_deleted_home_copy_comes_back_as_the_current_version(store):
    store.set("kind = load", {"load_sigma": 0.06}, "ann", "x")
    store.source_path.unlink()
    assert store.refresh() == store.current()
    assert load_table(store.source_path) == store.current()


# ---------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("where", "values", "who", "why", "message"),
    [
        ("kind = heat", {"sensor_sigma": 0.4}, "ann", "x", "in the filter"),
        ("kind = load and kind = sensor", {"sensor_sigma": 0.4}, "ann", "x", "selects no row"),
        ("kind = load", {"sensor_sgima": 0.4}, "ann", "x", "unknown parameter"),
        ("kind = load", {"intensity": 3}, "ann", "x", "unknown parameter"),
        ("kind = load", {"sensor_sigma": 9}, "ann", "x", "out of range"),
        ("kind = load", {"sensor_sigma": float("nan")}, "ann", "x", "out of range"),
        ("kind = network", {"network_loss_good": 0.9}, "ann", "x", "exceeds"),
        ("kind = load", {}, "ann", "x", "nothing to set"),
        ("kind = load", {"load_sigma": 0.1}, " ", "x", "needs who"),
        ("kind = load", {"load_sigma": 0.1}, "ann", "", "needs why"),
    ],
)
def test_refused_set_leaves_every_byte(store, where, values, who, why, message):
    before = state(store)
    with pytest.raises(TableError, match=message):
        store.set(where, values, who, why)
    assert state(store) == before


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("sensor,1,0,0.15,", "sensor,1,0,NaN,"),
        ("sensor,1,0,0.15,", "sensor,1,0,1e400,"),
        ("sensor,1,0,", "sensor,1,1,"),
        ("sensor,1,0,", "heat,1,0,"),
        ("sensor,1,0,0.15,", "sensor,1,0,"),
        ("sensor_sigma", "sensor_sgima"),
        ("\nload,5,", "\nload,4,"),
    ],
)
def test_bad_edit_leaves_the_last_good_state(store, old, new):
    good, kept = store.current().version, {k: v for k, v in state(store).items() if k != "source.csv"}
    edit(store, old, new)
    with pytest.raises(TableError) as caught:
        store.refresh()
    assert caught.value.where["file"] == store.source_path
    assert store.current().version == good
    with pytest.raises(TableError):
        store.set("kind = load", {"load_sigma": 0.1}, "ann", "x")
    assert {k: v for k, v in state(store).items() if k != "source.csv"} == kept


def test_rollback_is_the_way_out_of_a_bad_edit(store):
    good = store.current().version
    store.source_path.write_text("nonsense\n")
    change = store.rollback("current", "ann", "broken file")
    assert change.version == good
    assert load_table(store.source_path).version == good
    (rejected,) = (store.folder / "rejected").iterdir()
    assert rejected.read_text() == "nonsense\n"


def test_unknown_and_ambiguous_versions(store):
    with pytest.raises(TableError, match="unknown version"):
        store.rollback("0123456789", "ann", "x")
    with pytest.raises(TableError, match="unknown version"):
        store.load("")
    for name in ("abcdef1", "abcdef2"):
        (store.folder / "versions" / f"{name}.parquet").write_bytes(b"")
    with pytest.raises(TableError, match="ambiguous"):
        store.load("abcdef")


def test_nothing_published_yet(tmp_path):
    store = TableStore(tmp_path)
    assert not store.started()
    assert store.history() == []
    with pytest.raises(TableError, match="no disturbance table yet"):
        store.current()


@pytest.mark.parametrize(("code", "error"), [(errno.ENOSPC, DiskFullError), (errno.EROFS, HomeError)])
def test_full_or_read_only_disk_leaves_every_byte(store, monkeypatch, code, error):
    before = state(store)

    def refuse(**_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    with pytest.raises(error) as caught:
        store.set("kind = load", {"load_sigma": 0.06}, "ann", "x")
    assert caught.value.remedy
    assert state(store) == before


def test_home_that_is_a_file(tmp_path):
    (tmp_path / "home").write_text("")
    with pytest.raises(HomeError):
        TableStore(tmp_path / "home").refresh()


# ------------------------------------------------------------------------------------------------- damage and crashes


@pytest.mark.parametrize("position", [0.0, 0.3, 0.6, 0.99])
def test_flipped_byte_in_a_version_is_never_read_as_content(store, position):
    path = table_files.path_of(store.folder, store.current().version)
    data = bytearray(path.read_bytes())
    data[int(position * len(data))] ^= 0xFF
    path.write_bytes(bytes(data))
    outcome = None
    try:
        outcome = store.current()  # the byte may carry no content
    except (CorruptError, VersionError) as error:
        outcome = error.where["file"]
    assert outcome in (path, load_table(DEFAULT))


def test_lost_version_file_is_a_typed_error_and_heals_from_the_source(store):
    path = table_files.path_of(store.folder, store.current().version)
    path.unlink()
    with pytest.raises(TableError, match="unknown version"):
        store.load("current")
    store.refresh()
    assert store.current() == load_table(DEFAULT)


def test_torn_pointer_and_changed_audit_entry_are_typed_errors(store):
    store.set("kind = load", {"load_sigma": 0.06}, "ann", "x")
    entry = store.folder / "audit" / "000001.json"
    text = entry.read_text()
    entry.write_text(text.replace("first use", "second use"))
    with pytest.raises(CorruptError, match="does not follow"):
        store.history()
    entry.write_text(text[:50])
    with pytest.raises(CorruptError):
        store.history()
    (store.folder / "current.json").write_text("{}")
    with pytest.raises(CorruptError):
        store.current()


class Killed(BaseException):
    """Stands for kill -9: nothing of ours runs after it."""


def test_killed_between_any_two_writes_leaves_old_or_new_and_the_next_writer_completes(tmp_path, monkeypatch):
    """A set makes some writes; it is killed before each of them in turn."""
    real = {"bytes": table_source.write_bytes, "json": table_store.write_json, "files": table_files.write_bytes}
    count, limit = [0], [None]

    def counted(function):
        def write(*arguments):
            if limit[0] is not None and count[0] >= limit[0]:
                raise Killed
            count[0] += 1
            return function(*arguments)

        return write

    monkeypatch.setattr(table_source, "write_bytes", counted(real["bytes"]))
    monkeypatch.setattr(table_store, "write_json", counted(real["json"]))
    monkeypatch.setattr(table_files, "write_bytes", counted(real["files"]))
    total = None
    for kill_at in range(20):
        store = TableStore(tmp_path / str(kill_at))
        limit[0] = None
        old = store.refresh()
        count[0], limit[0] = 0, kill_at
        killed = False
        try:
            store.set("kind = load", {"load_sigma": 0.06}, "ann", "x")
        except Killed:
            killed = True
        limit[0] = None
        seen = store.current()
        assert len(store.history()) == (1 if seen == old else 2)
        completed = store.refresh()
        history = store.history()
        assert completed == store.current() == load_table(store.source_path)
        assert [entry.after for entry in history][-1] == completed.version
        assert [entry.action for entry in history] in (["import"], ["import", "set"])
        assert (len(history) == 1) == (completed == old)
        if not killed:
            total = kill_at
            break
    assert total is not None
    assert total >= 4  # version, audit entry, pointer, source


def test_audit_files_are_never_rewritten(store):
    first = (store.folder / "audit" / "000001.json").stat()
    store.set("kind = load", {"load_sigma": 0.06}, "ann", "x")
    again = (store.folder / "audit" / "000001.json").stat()
    assert (first.st_ino, first.st_mtime_ns) == (again.st_ino, again.st_mtime_ns)


# ------------------------------------------------------------------------------------------------------- concurrency


def test_reader_needs_no_lock_and_writer_names_the_holder(store, monkeypatch):
    monkeypatch.setattr(table_store, "LOCK_PATIENCE_S", 0.1)
    with home_lock(store.folder, "somebody else"):
        assert store.current() == store.refresh()
        assert len(store.history()) == 1
        with pytest.raises(LockHeldError, match="somebody else"):
            store.set("kind = load", {"load_sigma": 0.06}, "ann", "x")


def _one_set(home, number):
    TableStore(home).set("kind = load and variant = 0", {"load_sigma": number / 1000}, f"w{number}", "race")


def test_concurrent_writers_lose_no_change(tmp_path):
    TableStore(tmp_path).refresh()
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_one_set, args=(tmp_path, n)) for n in (61, 62)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    store = TableStore(tmp_path)
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert sorted(entry.who for entry in store.history()) == ["agentpipe", "w61", "w62"]
    assert store.history()[-1].after == store.current().version


def test_version_written_with_other_columns_is_a_version_error(store):
    import pyarrow.parquet as pq

    path = table_files.path_of(store.folder, store.current().version)
    content = pq.ParquetFile(path).read(use_threads=False)
    pq.write_table(content.drop_columns(["load_sigma"]), path)
    with pytest.raises(VersionError, match="other columns"):
        store.current()


def test_pointer_is_plain_json(store):
    pointer = json.loads((store.folder / "current.json").read_text())
    assert pointer == {"format": 1, "number": 1, "source_pending": False, "version": store.current().version}
