"""What production serves: one more version by rename, back by rename, and what is served never goes away."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import threading

import pytest
from typer.testing import CliRunner

from agentpipe.cli.main import app
from agentpipe.errors import BundleError, CorruptError, InputError
from agentpipe.learning.succession.champion import ChampionStore
from agentpipe.serving import layout
from agentpipe.serving.check_records import CheckRecords
from agentpipe.serving.deployment import list_published, serve_champion, serving_repository
from agentpipe.serving.publish import published_versions
from agentpipe.serving.repository import ServingRepository
from agentpipe.serving.server_check import FAILED, PASSED, ServerCheck
from agentpipe.serving.triton_config import config_text, read_config
from agentpipe.settings import load_settings
from agentpipe.storage import write_bytes, write_json
from agentpipe_tests.bundles import save_bundle

ANN = {"who": "ann", "reason": "a test"}


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    """Eight bundles, and their digests."""
    folder = tmp_path_factory.mktemp("bundles")
    return [(folder / f"bundle-{seed}", save_bundle(folder / f"bundle-{seed}", seed)) for seed in range(8)]


def publish(repository, bundle, **options):
    with repository.changing():
        return repository.publish(bundle[0], **ANN, **options)


def rollback(repository, to=None):
    with repository.changing():
        return repository.rollback(to=to)


def states(repository):
    return {entry.version: repository.state(entry) for entry in repository.history()}


def test_each_bundle_is_the_next_version_and_the_newest_is_served(tmp_path, bundles):
    repository = ServingRepository(tmp_path / "serving")
    assert repository.served() is None
    for number in (1, 2, 3):
        assert publish(repository, bundles[number]).version == number
    assert states(repository) == {1: "kept", 2: "previous", 3: "served"}
    assert repository.served().bundle == bundles[3][1]
    graph = repository.models / "policy" / "3" / "model.onnx"
    assert graph.read_bytes() == (bundles[3][0] / "policy" / "1" / "model.onnx").read_bytes()
    assert [path.name for path in repository.models.iterdir()] == ["policy"]
    assert not (tmp_path / "serving" / "drafts").exists()


def test_what_is_served_already_is_not_published_again(tmp_path, bundles):
    repository = ServingRepository(tmp_path)
    assert publish(repository, bundles[0]) == publish(repository, bundles[0])
    assert states(repository) == {1: "served"}


def test_rolling_back_withdraws_and_rolling_on_brings_it_back(tmp_path, bundles):
    repository = ServingRepository(tmp_path)
    for bundle in bundles[:3]:
        publish(repository, bundle)
    assert rollback(repository).version == 2
    assert states(repository) == {1: "previous", 2: "served", 3: "withdrawn"}
    assert rollback(repository, 3).version == 3
    assert states(repository) == {1: "kept", 2: "previous", 3: "served"}
    assert rollback(repository, 1).version == 1
    assert states(repository) == {1: "served", 2: "withdrawn", 3: "withdrawn"}
    # a number is never used for another policy
    assert publish(repository, bundles[3]).version == 4
    assert states(repository) == {1: "previous", 2: "withdrawn", 3: "withdrawn", 4: "served"}


def test_the_newest_version_is_the_last_to_go(tmp_path, bundles, monkeypatch):
    """Killed at any point of a rollback, a server serves the newest version or the one that was asked for."""
    from agentpipe.serving import repository as module

    repository = ServingRepository(tmp_path)
    for bundle in bundles[:5]:
        publish(repository, bundle)
    seen = []

    def watched(*arguments, **options):
        seen.append(published_versions(repository.models / "policy")[-1])
        return withdraw(*arguments, **options)

    withdraw = module.withdraw_version
    monkeypatch.setattr(module, "withdraw_version", watched)
    rollback(repository, 2)
    assert seen == [5, 5, 5]
    assert repository.served().version == 2


def test_a_rollback_to_nothing_is_refused(tmp_path, bundles):
    repository = ServingRepository(tmp_path)
    publish(repository, bundles[0])
    with pytest.raises(InputError, match="no version before"):
        rollback(repository)
    publish(repository, bundles[1])
    with pytest.raises(InputError, match="served already"):
        rollback(repository, 2)
    with pytest.raises(InputError, match="version 9 of policy is not on record"):
        rollback(repository, 9)
    assert states(repository) == {1: "previous", 2: "served"}


def test_a_version_whose_graph_was_changed_is_not_served_again(tmp_path, bundles):
    repository = ServingRepository(tmp_path)
    for bundle in bundles[:2]:
        publish(repository, bundle)
    graph = repository.models / "policy" / "1" / "model.onnx"
    graph.write_bytes(graph.read_bytes()[:-1] + b"!")
    with pytest.raises(BundleError, match="version 1 is not what was published"):
        rollback(repository)
    assert repository.served().version == 2


def test_retention_removes_the_oldest_but_nothing_served_and_not_the_champion(tmp_path, bundles):
    repository = ServingRepository(tmp_path, keep=2)
    for bundle in bundles[:6]:
        publish(repository, bundle, protect={bundles[1][1]})
    assert states(repository) == {1: "removed", 2: "kept", 3: "removed", 4: "removed", 5: "previous", 6: "served"}
    with pytest.raises(InputError, match="version 3 was removed"):
        rollback(repository, 3)
    one = ServingRepository(tmp_path, keep=1)
    publish(one, bundles[6])
    assert states(one)[6] == "previous"  # loaded still: kept, though one is asked for


def test_withdrawn_versions_are_removed_as_well(tmp_path, bundles):
    repository = ServingRepository(tmp_path, keep=1)
    publish(repository, bundles[0])
    for bundle in bundles[1:4]:
        publish(repository, bundle)
        rollback(repository)
    publish(repository, bundles[4])
    assert list(states(repository).values()) == ["previous", "removed", "removed", "withdrawn", "served"]


def other_signature(bundle, folder):
    """A bundle whose configuration is another one."""
    shutil.copytree(bundle[0], folder)
    file = folder / "policy" / layout.CONFIG
    config = read_config(file)
    config.dynamic_batching.max_queue_delay_microseconds = 1
    write_bytes(file, config_text(config).encode())
    write_bytes(folder / layout.SUMS, layout.sums_text(layout.hash_files(folder)))
    return folder, layout.content_digest(layout.hash_files(folder))


def test_another_configuration_needs_a_word_and_then_takes_the_place(tmp_path, bundles):
    repository = ServingRepository(tmp_path / "serving")
    publish(repository, bundles[0])
    other = other_signature(bundles[0], tmp_path / "other")
    with pytest.raises(BundleError, match="another configuration"):
        publish(repository, other)
    assert repository.served().version == 1
    assert publish(repository, other, replace=True).version == 2
    assert published_versions(repository.models / "policy") == [2]
    config = read_config(repository.models / "policy" / layout.CONFIG)
    assert config.dynamic_batching.max_queue_delay_microseconds == 1


def servable(repository):
    """The served version, if the repository is one that a server can load: whole versions, nothing else."""
    versions = sorted(path.name for path in (repository.models / "policy").iterdir())
    assert versions.pop() == layout.CONFIG
    for version in versions:
        assert [path.name for path in (repository.models / "policy" / version).iterdir()] == ["model.onnx"]
    return repository.served()


KILLED = """
import os, shutil, signal, sys
from pathlib import Path
from agentpipe.serving.repository import ServingRepository

made, bundle, places = Path(sys.argv[1]), Path(sys.argv[2]), range(1, int(sys.argv[3]), 2)

def publish_and_die(home, kill):
    calls = 0
    def dying(event, arguments):
        nonlocal calls
        if event in ("open", "os.rename", "os.mkdir", "os.rmdir", "os.remove") and str(home) in str(arguments):
            calls += 1
            if calls == kill:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(dying)
    repository = ServingRepository(home / "serving", keep=1)
    with repository.changing():
        repository.publish(bundle, who="ann", reason="a test")

for place in places:
    home = made.parent / str(place)
    shutil.copytree(made, home)
    child = os.fork()
    if child == 0:
        try:
            publish_and_die(home, place)
        finally:
            os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_publisher_that_is_killed_anywhere_leaves_the_old_version_or_the_new(tmp_path, bundles):
    made = ServingRepository(tmp_path / "made" / "serving", keep=1)
    for bundle in bundles[:3]:
        publish(made, bundle)
    command = [sys.executable, "-c", KILLED, str(tmp_path / "made"), str(bundles[3][0]), "40"]
    codes = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout.split()
    assert codes.count(str(-signal.SIGKILL)) > 5
    served = set()
    for place in range(1, 40, 2):
        repository = ServingRepository(tmp_path / str(place) / "serving", keep=1)
        found = servable(repository)
        served.add(found.bundle)
        publish(repository, bundles[3])
        assert servable(repository).bundle == bundles[3][1]
        assert repository.state(found) in ("served", "previous")
    assert served == {bundles[2][1], bundles[3][1]}


def test_two_publishers_at_once_wait_for_one_another(tmp_path, bundles):
    repository = ServingRepository(tmp_path)
    threads = [threading.Thread(target=publish, args=(repository, bundle)) for bundle in bundles[:6]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(entry.version for entry in repository.history()) == [1, 2, 3, 4, 5, 6]
    assert len({entry.bundle for entry in repository.history()}) == 6
    assert published_versions(repository.models / "policy") == [1, 2, 3, 4, 5, 6]


# ------------------------------------------------------------------------------------ what lies there is looked at

HARM = {
    "a graph of garbage": lambda model: (model / "2" / "model.onnx").write_bytes(b"garbage"),
    "a graph cut short": lambda model: (model / "2" / "model.onnx").write_bytes(
        (model / "2" / "model.onnx").read_bytes()[:-1]
    ),
    "no graph": lambda model: (model / "2" / "model.onnx").unlink(),
    "no configuration": lambda model: (model / layout.CONFIG).unlink(),
    "a configuration of garbage": lambda model: (model / layout.CONFIG).write_bytes(b"\xff{{"),
    "another configuration": lambda model: (model / layout.CONFIG).write_bytes(b"name: 'policy'"),
}


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("harm", HARM)
def test_what_is_damaged_is_said_and_published_again(tmp_path, bundles, harm, recorded):
    repository = ServingRepository(tmp_path)
    for bundle in bundles[:2]:
        publish(repository, bundle)
    if not recorded:  # written before configurations were noted
        record = json.loads((tmp_path / "published.json").read_text())
        for entry in record["versions"]:
            del entry["config"]
        write_json(tmp_path / "published.json", record)
    HARM[harm](repository.models / "policy")
    if (harm, recorded) == ("another configuration", False):
        with pytest.raises(BundleError, match="the model there has another configuration"):
            publish(repository, bundles[2])
        return
    everything = "configuration" in harm
    assert states(repository) == {1: "damaged" if everything else "previous", 2: "damaged"}
    if everything:
        with pytest.raises(BundleError, match=r"version 1 is not what was published: config\.pbtxt"):
            rollback(repository)
    assert publish(repository, bundles[1]).version == 3
    assert servable(repository).bundle == bundles[1][1]
    left = {1: "kept", 2: "previous"} if everything else {1: "previous", 2: "removed"}
    assert states(repository) == {**left, 3: "served"}
    assert publish(repository, bundles[1]).version == 3


def test_a_rollback_behind_a_version_whose_graph_is_gone_takes_it_away(tmp_path, bundles):
    repository = ServingRepository(tmp_path)
    for bundle in bundles[:2]:
        publish(repository, bundle)
    (repository.models / "policy" / "2" / "model.onnx").unlink()
    assert rollback(repository).version == 1
    assert servable(repository).version == 1
    assert states(repository) == {1: "served", 2: "removed"}


def test_a_withdrawn_version_that_is_damaged_does_not_come_back(tmp_path, bundles):
    repository = ServingRepository(tmp_path)
    for bundle in bundles[:2]:
        publish(repository, bundle)
    rollback(repository)
    (tmp_path / "withdrawn" / "policy-2" / "model.onnx").write_bytes(b"")
    assert states(repository) == {1: "served", 2: "damaged"}
    assert repository.find_again(bundles[1][1]) is None
    with pytest.raises(BundleError, match="version 2 is not what was published"):
        rollback(repository, 2)


@pytest.mark.parametrize("name", ["²", "٣", "007", "0", "9" * 30, "-4", "4.0"])
def test_folders_that_no_server_takes_for_versions_are_passed_over(tmp_path, bundles, name):
    repository = ServingRepository(tmp_path)
    publish(repository, bundles[0])
    foreign = repository.models / "policy" / name / "model.onnx"
    foreign.parent.mkdir()
    foreign.write_bytes(b"x")
    assert publish(repository, bundles[1]).version == 2
    assert rollback(repository).version == 1
    assert foreign.exists()


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_what_lies_where_the_next_version_goes_is_named_and_no_number_is_used_up(tmp_path, bundles, kind):
    repository = ServingRepository(tmp_path)
    publish(repository, bundles[0])
    place = repository.models / "policy" / "2"
    {"file": place.touch, "folder": place.mkdir, "link": lambda: place.symlink_to("nowhere")}[kind]()
    with pytest.raises(BundleError, match=r"something else lies where version 2 of policy goes.*move it away"):
        publish(repository, bundles[1])
    assert len(repository.history()) == 1
    assert repository.served().version == 1
    shutil.move(place, tmp_path / "aside")
    assert publish(repository, bundles[1]).version == 2


@pytest.mark.parametrize("place", ["models/policy", "models/policy/config.pbtxt"])
def test_a_file_in_place_of_a_folder_and_the_reverse_use_up_no_number(tmp_path, bundles, place):
    repository = ServingRepository(tmp_path)
    publish(repository, bundles[0])
    path = tmp_path / place
    if path.is_dir():
        shutil.rmtree(path)
        path.touch()
    else:
        path.unlink()
        path.mkdir()
    with pytest.raises(BundleError, match=r"something else lies where (model|the configuration of) policy .*move it"):
        publish(repository, bundles[1])
    assert len(repository.history()) == 1


def test_what_killed_publishers_left_is_removed_by_the_next(tmp_path, bundles):
    (tmp_path / ".staging-models-x" / "model").mkdir(parents=True)
    (tmp_path / ".staging-y").touch()
    (tmp_path / "drafts").mkdir()
    (tmp_path / "mine").touch()
    publish(ServingRepository(tmp_path), bundles[0])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "mine", "models", "published.json"]


FIELDS = ("model", "version", "bundle", "source", "graph", "at", "who", "reason", "config")
WRONG = [(field, value) for field in FIELDS for value in (None, 7.5, [], {}, True)]
WRONG += [(field, 7) for field in FIELDS if field != "version"]
WRONG += [("version", 0), ("version", -2), ("version", "2"), ("model", "../../x"), ("model", ""), ("model", ".")]


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_a_field_of_another_type_is_a_typed_error(tmp_path, field, value):
    entry = dict.fromkeys(FIELDS, "x") | {"version": 1, "model": "policy"}
    write_json(tmp_path / "published.json", {"format": 1, "versions": [entry]})
    assert len(ServingRepository(tmp_path).history()) == 1
    write_json(tmp_path / "published.json", {"format": 1, "versions": [{**entry, field: value}]})
    with pytest.raises(CorruptError, match=r"published\.json"):
        ServingRepository(tmp_path).history()


@pytest.mark.parametrize("text", ["[]", '{"format": 9}', '{"format": 1, "versions": [{}]}', "{"])
def test_a_damaged_record_is_a_typed_error(tmp_path, bundles, text):
    repository = ServingRepository(tmp_path)
    publish(repository, bundles[0])
    (tmp_path / "published.json").write_text(text)
    with pytest.raises(CorruptError, match=r"published\.json"):
        publish(repository, bundles[1])
    assert published_versions(repository.models / "policy") == [1]


# ------------------------------------------------------------------------------------ the champion, the command


@pytest.fixture
def home(tmp_path, bundles, monkeypatch):
    """A home with three bundles, each of which passed its server check."""
    for name, (path, digest) in zip("abc", bundles, strict=False):
        shutil.copytree(path, tmp_path / "bundles" / name)
        CheckRecords(tmp_path).save(ServerCheck(PASSED, digest))
    monkeypatch.setenv("AGENTPIPE_HOME", str(tmp_path))
    return tmp_path


def promote(home, bundles, name, expected=None):
    figures = {"bundle": f"bundles/{name}", "bundle_digest": bundles["abc".index(name)][1]}
    ChampionStore(home / "champion").promote(name * 64, "p", expected=expected, reason="better", figures=figures)


def call(*arguments):
    result = CliRunner().invoke(app, ["bundle", *arguments, "--json"])
    return result.exit_code, json.loads(result.stdout)


def test_the_champion_s_bundle_is_what_is_served(home, bundles):
    settings = load_settings()
    assert serve_champion(settings) is None
    promote(home, bundles, "a")
    assert serve_champion(settings).version == 1
    promote(home, bundles, "b", expected="a" * 64)
    assert list_published(settings)["champion_served"] is False
    assert serve_champion(settings) == serve_champion(settings)
    assert list_published(settings)["champion_served"] is True
    ChampionStore(home / "champion").rollback(None, expected="b" * 64, reason="worse", who="ann")
    assert serve_champion(settings).version == 1
    assert states(serving_repository(settings)) == {1: "served", 2: "withdrawn"}


def test_a_champion_whose_files_are_damaged_is_not_called_served_and_is_published_again(home, bundles):
    promote(home, bundles, "a")
    serve_champion(load_settings())
    (home / "serving" / "models" / "policy" / "1" / "model.onnx").write_bytes(b"garbage")
    code, document = call("list")
    assert (code, document["champion_served"]) == (0, False)
    [entry] = document["versions"]
    assert (entry["state"], entry["damage"]) == ("damaged", "model.onnx holds something else")
    text = CliRunner().invoke(app, ["bundle", "list"]).stdout
    assert "policy/1    damaged" in text
    assert "agentpipe bundle publish publishes it again" in text
    code, document = call("publish")
    assert (code, document["published"]["version"], document["published"]["state"]) == (0, 2, "served")
    assert call("list")[1]["champion_served"] is True


def test_a_champion_whose_bundle_is_gone_is_an_error_and_the_old_one_is_served(home, bundles):
    promote(home, bundles, "a")
    serve_champion(load_settings())
    promote(home, bundles, "b", expected="a" * 64)
    shutil.rmtree(home / "bundles" / "b")
    with pytest.raises(BundleError, match="not there"):
        serve_champion(load_settings())
    assert serving_repository(load_settings()).served().version == 1


def test_the_command_publishes_lists_and_rolls_back(home, bundles):
    for name in "ab":
        code, document = call("publish", str(home / "bundles" / name), "--who", "ann", "--why", "a test")
        assert code == 0, document
    assert document["published"]["version"] == 2
    assert document["published"]["state"] == "served"
    code, document = call("rollback")
    assert (code, document["published"]["version"]) == (0, 1)
    code, document = call("list")
    assert [(entry["version"], entry["state"]) for entry in document["versions"]] == [(1, "served"), (2, "withdrawn")]
    assert document["repository"] == str(home / "serving" / "models")
    text = CliRunner().invoke(app, ["bundle", "list"]).stdout
    assert "policy/1    served" in text


def test_the_command_says_what_it_does_not_do(home, bundles, monkeypatch):
    path = str(home / "bundles" / "a")
    signed = ("--who", "ann", "--why", "a test")
    assert call("publish")[1]["error"]["message"] == "there is no champion yet"
    assert call("rollback")[1]["error"]["message"] == "nothing was published yet"
    assert call("publish", path)[1]["error"]["type"] == "InputError"
    monkeypatch.setenv("AGENTPIPE_TRITON_HOME", str(home / "none"))
    CheckRecords(home).path(bundles[0][1]).unlink()
    code, document = call("publish", path, *signed)
    assert code == 1
    assert "skipped" in document["error"]["message"]
    assert "install-triton" in document["error"]["message"]
    assert not (home / "serving").exists()
    assert call("publish", path, *signed, "--force")[0] == 0
    CheckRecords(home).save(ServerCheck(FAILED, bundles[1][1], "values: differ"))
    assert call("check", path)[1]["error"]["type"] == "NoServerError"
