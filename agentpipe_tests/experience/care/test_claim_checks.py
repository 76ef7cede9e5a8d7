"""Every claim of materialisations, checkpoints and packages is checked; what is gone is named, with what to type."""

from __future__ import annotations

import shutil

import pytest

from agentpipe.experience.care.check import check_home
from agentpipe.experience.care.claims import find_claims
from agentpipe.experience.care.holdings import find_shards
from agentpipe.experience.care.inventory import inventory
from agentpipe.experience.care.operations import check, retention
from agentpipe.experience.care.retention import Rules
from agentpipe.storage import write_json

from .homes import checkpoint, edit_json, make_home, package, record_line

TRAINING = "policy_checkpoint/2026-01-01_manual/feedfacefeedface"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A home as a run leaves it: two cells, a training with two shards of rollouts, its checkpoint and package."""
    home = tmp_path_factory.mktemp("claimed") / "home"
    shards = make_home(home)
    first = record_line(home / TRAINING / "experience/updates-000001", purpose="TRAIN")
    record_line(home / TRAINING / "experience/running-000020", purpose="TRAIN", first_episode=60)
    checkpoint(home, first)
    package(home, *shards.values(), counted=2)
    write_json(home / "last_run.json", {"home": str(home), "profile": "demo", "seed": 7})
    return home


@pytest.fixture
def home(made, tmp_path):
    return shutil.copytree(made, tmp_path / "home")


def problems(home):
    return [(problem.shard, problem.message, problem.remedy) for problem in check_home(home).problems]


def run(home, *more):
    return " ".join(["agentpipe run --home", str(home), "--profile demo --seed 7", *more])


def again(home):
    day = run(home, "--day 2026-01-01")
    return f"put it back from a copy, or move {TRAINING} away and train again: {day}"


def test_a_home_as_a_run_leaves_it_has_no_problem(home):
    assert problems(home) == []


def test_the_last_rollouts_of_a_training_which_only_its_package_claims_are_missed(home):
    shutil.rmtree(home / TRAINING / "experience/running-000020")
    text = "package of 2026-01-01_manual counts 2 shards of live rollouts, 1 are there"
    assert problems(home) == [(f"{TRAINING}/experience/running-000020", text, again(home))]


def test_rollouts_that_a_checkpoint_names_are_reported_once(home):
    shutil.rmtree(home / TRAINING / "experience/updates-000001")
    text = "checkpoint update-000020-abc of 2026-01-01_manual names it, and it is gone"
    assert problems(home) == [(f"{TRAINING}/experience/updates-000001", text, again(home))]


def test_checkpoints_that_are_gone_are_missed_once(home):
    shutil.rmtree(home / TRAINING / "checkpoints")
    text = "package of 2026-01-01_manual and live rollouts are there, the checkpoints are gone"
    assert problems(home) == [(TRAINING, text, again(home))]
    shutil.rmtree(home / TRAINING / "experience")
    assert [message for _, message, _ in problems(home)] == [
        "the checkpoints of policy_checkpoint[2026-01-01_manual] are gone",
        "package of 2026-01-01_manual counts 2 shards of live rollouts, 0 are there",
    ]


def test_a_checkpoint_that_the_pointer_lists_and_that_is_gone_is_missed(home):
    write_json(
        home / TRAINING / "checkpoints/checkpoints.json",
        {"format": 2, "checkpoints": ["update-000010-abc", "update-000020-abc"]},
    )
    assert problems(home) == [(TRAINING, "the checkpoint update-000010-abc is gone", again(home))]


def test_a_training_that_was_removed_on_purpose_leaves_nothing_but_its_reference(home):
    shutil.rmtree(home / TRAINING)
    reference = "references/policy_checkpoint/2026-01-01_manual.json"
    remedy = f"{again(home)}; where it was removed on purpose, remove {reference} too"
    assert problems(home) == [(TRAINING, "policy_checkpoint[2026-01-01_manual] is gone", remedy)]
    (home / reference).unlink()
    assert problems(home) == []


def test_trajectories_that_are_gone_are_missed_by_their_reference_and_by_the_package(home):
    digest = find_claims(home).learned[-1].digest
    shutil.rmtree(home / "trajectories/sensor-1/0123456789abcdef")
    text = f"package of 2026-01-01_manual names trajectories of sensor-1 with the digest {digest[:16]}"
    assert problems(home) == [
        ("trajectories/sensor-1/0123456789abcdef", "trajectories[sensor-1] is gone", run(home)),
        ("trajectories/sensor-1", f"{text}, and they are gone", run(home)),
    ]


def test_older_trajectories_that_only_a_package_names_come_back_from_a_copy_alone(home):
    write_json(home / TRAINING / "package/package.json", {"provenance": {"trajectories": {"sensor-1": "f" * 64}}})
    assert [remedy for _, _, remedy in problems(home)] == [
        "put the shard back from a copy; the policy is whole without it"
    ]


def test_a_cell_that_was_recorded_and_has_no_current_trajectories_is_said(home):
    (home / "references/trajectories/load-2.json").unlink()
    assert problems(home) == [("trajectories/load-2", "the cell load-2 has no current trajectories", run(home))]
    with record_line(home / "trajectories/load-2/fedcba.open", cell="load-2", seal=False):
        assert problems(home) == []  # it is being recorded


def test_a_reference_to_another_digest_is_taken_back_and_the_cell_recorded_again(home):
    edit_json(home / "references/trajectories/sensor-1.json", data_version="f" * 64)
    assert problems(home)[0][2] == f"agentpipe buffer check --fix --home {home}"
    report = check(home, fix=True)
    assert report.repairs == ["trajectories[sensor-1]: a reference to another digest is taken back"]
    assert [problem.remedy for problem in report.problems] == [run(home)]
    assert report.lost == []


def test_a_reference_to_a_candidate_that_cannot_be_read_is_a_problem_and_blocks_nothing(home):
    (home / "references/policy_checkpoint/2026-01-01_manual.json").write_text("{")
    assert problems(home)[0][2] == f"remove it, then make this candidate again: {run(home)}"
    assert retention(home, Rules(budget=0), dry_run=True).plan.actions


@pytest.mark.parametrize(
    ("partition", "trigger"), [("2026-01-02_nightly", "nightly"), ("2026-01-02_feedback", "feedback")]
)
def test_a_training_that_no_line_makes_again_names_the_ui(home, partition, trigger):
    gone = record_line(home / f"policy_checkpoint/{partition}/feed/experience/updates-000001", purpose="TRAIN")
    index = [{"name": gone.path.name, "digest": "0" * 64, "steps": 1}]
    manifest = home / f"policy_checkpoint/{partition}/feed/checkpoints/update-000001-a/manifest.json"
    write_json(manifest, {"content": {"trajectory_index": index}})
    shutil.rmtree(gone.path)
    assert problems(home)[0][2] == (
        f"put it back from a copy, or materialise policy_checkpoint[2026-01-02|{trigger}] again: "
        f"agentpipe ui --home {home}"
    )


def test_rollouts_of_a_retraining_that_labels_follow_belong_to_the_home(home):
    folder = home / "policy_checkpoint/2026-01-02_nightly/feed"
    shard = record_line(folder / "retraining/experience/updates-000001", purpose="TRAIN", first_episode=99)
    assert shard.path in [holding.path for holding in find_shards(home)]
    write_json(folder / "retraining/package/package.json", {"provenance": {}})
    figures = next(one for one in inventory(home) if one.path == shard.path)
    assert (figures.training, figures.claims) == ("2026-01-02_nightly", ("package of 2026-01-02_nightly",))
    verbs = {
        action.candidate.path: action.verb for action in retention(home, Rules(budget=0), dry_run=True).plan.actions
    }
    assert verbs[shard.path] == "shrink"
