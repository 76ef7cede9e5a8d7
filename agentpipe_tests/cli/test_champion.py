"""``agentpipe champion`` as a person and as a script see it."""

from __future__ import annotations

import fcntl
import json
import shutil

import pytest
from typer.testing import CliRunner

from agentpipe.cli.main import app
from agentpipe.learning.succession.promotion import champion_stores
from agentpipe_tests.bundles import save_bundle, save_package

COMMANDS = ("show", "history", "rollback", "held", "approve", "reject")
SIGNED = ("--who", "ann", "--why", "looked at it")
runner = CliRunner()


def call(*arguments, home):
    result = runner.invoke(app, ["champion", *map(str, arguments), "--home", str(home), "--json"])
    return result.exit_code, json.loads(result.stdout)


def text(*arguments, home, ok=True):
    result = runner.invoke(app, ["champion", *map(str, arguments), "--home", str(home)])
    assert (result.exit_code == 0) == ok, result.output
    return result.stdout if ok else result.stderr


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with packages and bundles, and their digests by name."""
    folder = tmp_path_factory.mktemp("saved") / "home"
    names = ("first", "second", "new")
    packages = {name: save_package(folder / "packages" / name, seed) for seed, name in enumerate(names)}
    return folder, packages, {name: save_bundle(folder / "bundles" / name, seed) for seed, name in enumerate(names)}


@pytest.fixture
def home(saved, tmp_path):
    """Two champions and one held candidate; digests by name in ``names``."""
    folder, names, bundles = saved
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    champions, holds = champion_stores(tmp_path)
    figures = {"success": 0.9, "bundle": "bundles/first", "bundle_digest": bundles["first"]}
    champions.promote(names["first"], "packages/first", expected=None, reason="first", figures=figures)
    figures = {"success": 0.91, "difference": 0.0125, "bundle": "bundles/second", "bundle_digest": bundles["second"]}
    champions.promote(names["second"], "packages/second", expected=names["first"], reason="not worse", figures=figures)
    holds.hold(
        names["new"],
        package="packages/new",
        bundle="bundles/new",
        compared_with=names["second"],
        reasons=["drift is REVIEW"],
        figures={"kl": 0.21, "difference": -0.002, "by_cell": {}, "bundle_digest": bundles["new"]},
        who="publish[2026-01-01|nightly]",
    )
    (tmp_path / "names.json").write_text(json.dumps(names))
    return tmp_path


def names(home):
    return json.loads((home / "names.json").read_text())


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself_and_takes_home_and_json(command):
    result = runner.invoke(app, ["champion", command, "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert "--home" in result.stdout
    assert "--json" in result.stdout


def test_show_tells_the_champion_and_that_somebody_waits(home):
    shown = text("show", home=home)
    assert names(home)["second"][:16] in shown
    assert "promoted by agentpipe: not worse" in shown
    assert "hold-out success 91.0 %" in shown
    assert "1 candidate(s) wait" in shown


def test_history_lists_every_champion_with_the_sum_of_differences(home):
    text("approve", names(home)["new"], *SIGNED, home=home)
    lines = text("history", home=home).splitlines()
    assert [line.split()[2] for line in lines] == ["promotion", "promotion", "approval"]
    assert "+1.25 %  sum +1.25 %" in lines[1]
    assert "-0.20 %  sum +1.05 %  ann: looked at it" in lines[2]
    text("rollback", *SIGNED, home=home)
    code, document = call("history", home=home)
    assert (code, [entry["sequence"] for entry in document["history"]]) == (0, [1, 2, 3, 4])
    assert [entry["summed_difference"] for entry in document["history"]] == pytest.approx([0, 0.0125, 0.0105, 0.0125])


def test_held_shows_why_and_what_a_person_needs(home):
    code, document = call("held", home=home)
    assert code == 0
    (held,) = document["held"]
    assert (held["reasons"], held["decision"], held["figures"]["kl"]) == (["drift is REVIEW"], None, 0.21)
    shown = text("held", home=home)
    assert "publish[2026-01-01|nightly]: drift is REVIEW" in shown
    assert "kl: 0.21" in shown


def test_approval_by_the_first_characters_of_its_digest(home):
    code, document = call("approve", names(home)["new"][:8], *SIGNED, home=home)
    assert (code, document["ok"]) == (0, True)
    champion = document["champion"]
    assert (champion["digest"], champion["kind"], champion["who"], champion["reason"]) == (
        names(home)["new"],
        "approval",
        "ann",
        "looked at it",
    )
    assert call("show", home=home)[1]["champion"] == champion
    assert call("held", home=home)[1]["held"] == []
    assert call("held", "--all", home=home)[1]["held"][0]["decision"]["kind"] == "approved"
    assert text("held", home=home) == "Nothing waits.\n"
    assert "approved by ann" in text("held", "--all", home=home)
    assert call("approve", names(home)["new"], *SIGNED, home=home)[1]["champion"] == champion
    code, document = call("reject", names(home)["new"], *SIGNED, home=home)
    assert (code, document["error"]["type"]) == (1, "DecidedError")


def test_rejection_is_recorded(home):
    code, document = call("reject", names(home)["new"], *SIGNED, home=home)
    assert (code, document["held"]["decision"]["kind"], document["held"]["decision"]["who"]) == (0, "rejected", "ann")
    assert "rejected by ann" in text("reject", names(home)["new"], "--who", "bob", "--why", "b", home=home)
    assert call("show", home=home)[1]["champion"]["digest"] == names(home)["second"]


def test_approval_after_the_champion_changed_must_be_compared_again(home):
    text("rollback", *SIGNED, home=home)
    code, document = call("approve", names(home)["new"], *SIGNED, home=home)
    assert (code, document["error"]["type"]) == (1, "ChampionConflictError")
    assert "again" in document["error"]["remedy"]
    assert "must be compared again" in text("held", home=home)


def test_rollback_to_the_one_before_and_to_a_number(home):
    code, document = call("rollback", *SIGNED, home=home)
    assert (code, document["champion"]["digest"], document["champion"]["kind"]) == (0, names(home)["first"], "rollback")
    shown = text("rollback", "--to", "2", *SIGNED, home=home)
    assert f"{names(home)['second'][:16]}  since" in shown
    assert "brought back by ann: looked at it" in shown
    assert len(call("history", home=home)[1]["history"]) == 4


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("rollback",), "InputError", "a decision needs who"),
        (("rollback", "--who", "ann"), "InputError", "a decision needs why"),
        (("rollback", "--who", "a\nb", "--why", "c"), "InputError", "control characters"),
        (("reject", "ffffffff", "--who", "a", "--why", "\udcff"), "InputError", "control characters"),
        (("rollback", "--to", "9", *SIGNED), "InputError", "no champion 9"),
        (("rollback", "--to", "2", *SIGNED), "InputError", "is the champion already"),
        (("rollback", "--to", "ffffffff", *SIGNED), "InputError", "no champion ffffffff"),
        (("approve", "ffffffff", *SIGNED), "InputError", "no held candidate ffffffff"),
        (("approve", "ffffffff"), "InputError", "a decision needs who"),
        (("reject", "ffffffff", *SIGNED), "InputError", "no held candidate ffffffff"),
    ],
)
def test_what_cannot_be_done_is_a_typed_error_and_changes_nothing(home, arguments, error, message):
    before = (home / "champion" / "champion.json").read_bytes()
    code, document = call(*arguments, home=home)
    assert (code, document["ok"], document["error"]["type"]) == (1, False, error)
    assert message in document["error"]["message"]
    assert document["error"]["remedy"]
    assert error in text(*arguments, home=home, ok=False)
    assert (home / "champion" / "champion.json").read_bytes() == before


def test_a_lost_package_becomes_no_champion(home):
    (home / "packages/first").rename(home / "packages/gone")
    code, document = call("rollback", *SIGNED, home=home)
    assert (code, document["error"]["type"]) == (1, "CheckpointError")
    assert call("show", home=home)[1]["champion"]["digest"] == names(home)["second"]


@pytest.mark.parametrize(
    "arguments", [("rollback", *SIGNED), ("approve", "ffffff", *SIGNED), ("reject", "ffffff", *SIGNED)]
)
def test_without_a_home_nothing_is_decided_and_none_is_made(tmp_path, arguments):
    assert call(*arguments, home=tmp_path / "none")[0] == 1
    assert not (tmp_path / "none").exists()


def test_a_running_training_does_not_keep_anybody_from_rolling_back(home):
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert call("rollback", *SIGNED, home=home)[0] == 0
