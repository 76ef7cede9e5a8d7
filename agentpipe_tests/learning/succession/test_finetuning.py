"""Fine-tuning from a day's labels: corrects a planted weakness, forgets nothing, trains each label once."""

import dataclasses
import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from agentpipe.errors import LearningError, NonFiniteError, SettingsError
from agentpipe.experience.store.shard import open_shard
from agentpipe.feedback.labelled import EXECUTION
from agentpipe.learning.options import FineTuningOptions, StreamOptions, fine_tuning_options
from agentpipe.learning.policy.lineage import labels_digest, trained_labels
from agentpipe.learning.policy.package import PolicyPackage
from agentpipe.learning.succession.finetuning import FineTuned, NotTrained, fine_tune
from agentpipe.learning.succession.rehearsal import discounted_returns
from agentpipe.settings import Settings
from agentpipe_tests.learning.recorded import tiny_shard
from agentpipe_tests.learning.succession.labelled import (
    ACTION_SEGMENT,
    WEAK_SEGMENT,
    WEAK_TARGET,
    judged,
    labelled,
    played,
    success,
    tuning,
)
from agentpipe_tests.learning.test_trainer import run
from agentpipe_tests.learning.tiny import CHOICES, tiny_options, tiny_score


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A good policy of the tiny pool and the shards of its rollouts."""
    options = tiny_options(budget_steps=10_000, stream=StreamOptions())
    made = run(tmp_path_factory.mktemp("champion"), options, validate=tiny_score)
    return made.package, [open_shard(path) for path in made.shards]


def tune(directory, champion, labels, shards, **changes):
    options = changes.pop("options", tuning())
    return fine_tune(
        champion,
        labels,
        recorded=shards,
        options=options,
        directory=directory,
        action_segment=ACTION_SEGMENT,
        **changes,
    )


def few(rows=40, **columns):
    return labelled(rows, **columns)


QUICK = tuning(epochs=2, minibatch=16)


@pytest.fixture(scope="module")
def weak(trained, tmp_path_factory):
    """The policy, made to misjudge one target in one segment, by labels that are wrong there."""
    champion, shards = trained
    columns, target, segment = played(champion, rounds=12)
    there = (target == WEAK_TARGET) & (segment == WEAK_SEGMENT)
    wrong = np.where(there, 0, target) + CHOICES * segment
    options = tuning(learning_rate=3e-3, epochs=15)
    made = tune(tmp_path_factory.mktemp("weak"), champion, judged(columns, wrong, "poison"), shards, options=options)
    package = dataclasses.replace(made.package, labels=frozenset())
    assert success(package, weak=True) < 0.2
    assert success(package, weak=False) > 0.85
    return package


@pytest.mark.slow
def test_labels_of_a_day_correct_a_planted_weakness_and_shuffled_ones_do_not(tmp_path, trained, weak):
    """At least half of the gap is closed, the rest falls by at most a point. Control: corrections at random."""
    champion, shards = trained
    options = tuning(learning_rate=3e-3)
    columns, target, segment = played(weak, rounds=12, seed=51)
    wrong = columns["action"] % CHOICES != target
    columns = {name: column[wrong] for name, column in columns.items()}
    right = (target + CHOICES * segment)[wrong]
    assert 200 < len(right) < 2_000
    corrected = tune(
        tmp_path / "right", weak, judged(columns, right, "day"), shards, validate=tiny_score, options=options
    )
    gap = success(champion, weak=True) - success(weak, weak=True)
    assert success(corrected.package, weak=True) > success(weak, weak=True) + 0.5 * gap
    assert success(corrected.package, weak=False) > success(weak, weak=False) - 0.01
    random = CHOICES * (right // CHOICES) + np.random.default_rng(0).integers(0, CHOICES, len(right))
    other = np.where(random == right, CHOICES * (right // CHOICES) + (right + 1) % CHOICES, random)
    free = tune(tmp_path / "shuffled", weak, judged(columns, other, "day"), shards, options=options)
    assert success(free.package, weak=True) < success(weak, weak=True) + 0.25 * gap


def test_each_label_trains_once_in_a_lineage(tmp_path, trained):
    champion, shards = trained
    labels = few(40)
    first = tune(tmp_path / "1", champion, labels.take(range(25)), shards, options=QUICK, parent="p" * 64)
    assert isinstance(first, FineTuned)
    assert first.labels == set(labels.label_id[:25])
    again = tune(tmp_path / "again", first.package, labels.take(range(25)), shards, options=QUICK)
    assert again == NotTrained("no_new_labels", "all of 25 labels were trained on before", 0)
    assert not (tmp_path / "again").exists()
    second = tune(tmp_path / "2", first.package, labels, shards, options=QUICK, already=labels.label_id[25:30])
    assert second.labels == set(labels.label_id[30:])
    assert trained_labels(second.package_path) == set(labels.label_id[:25]) | set(labels.label_id[30:])
    provenance = PolicyPackage.load(second.package_path).provenance
    assert provenance["labels"] == {"count": 10, "digest": labels_digest(labels.label_id[30:]), "useful": 10}
    assert provenance["lineage_labels"]["count"] == 35
    assert provenance["fine_tuned_from"] == first.package.digest
    assert first.package.provenance["parent"] == "p" * 64


def test_no_labels_are_a_reason_and_no_package(tmp_path, trained):
    champion, shards = trained
    assert tune(tmp_path, champion, few(0), shards).explanation == "there are no labels"
    made = tune(tmp_path, champion, few(5), shards, options=tuning(minimum_labels=6))
    assert (made.reason, made.new_labels) == ("too_few_labels", 5)
    labels = few(30)
    labels = dataclasses.replace(
        labels.take(labels.action < 9),
        verdict=np.ones((labels.action < 9).sum(), np.int8),
        error_type=np.full((labels.action < 9).sum(), EXECUTION, np.int8),
    )
    assert tune(tmp_path, champion, labels, shards).reason == "nothing_to_move"
    assert list(tmp_path.iterdir()) == []


def test_labels_beyond_the_most_stay_new(tmp_path, trained):
    champion, shards = trained
    labels, most = few(40), dataclasses.replace(QUICK, most_labels=15)
    first = tune(tmp_path / "1", champion, labels, shards, options=most)
    second = tune(tmp_path / "2", first.package, labels, shards, options=most)
    assert len(first.labels) == len(second.labels) == 15
    assert not first.labels & second.labels
    assert first.labels != set(labels.label_id[:15])


def test_result_depends_on_neither_threads_nor_the_order_of_labels(tmp_path, trained):
    champion, shards = trained
    labels = few(40)
    one = tune(tmp_path / "1", champion, labels, shards, options=QUICK, threads=1)
    two = tune(tmp_path / "2", champion, labels.take(range(39, -1, -1)), shards, options=QUICK, threads=2)
    assert one.package.digest == two.package.digest
    assert one.log == two.log
    assert (one.package_path / "package.json").read_bytes() == (two.package_path / "package.json").read_bytes()
    other = tune(tmp_path / "3", champion, labels, shards, options=QUICK, seed=1)
    assert other.package.digest != one.package.digest


def test_normalisation_and_names_stay_the_champions_and_it_is_not_changed(tmp_path, trained):
    champion, shards = trained
    before = champion.digest
    made = tune(tmp_path, champion, few(), shards, options=QUICK)
    assert champion.digest == before != made.package.digest
    assert made.package.statistics.to_bytes() == champion.statistics.to_bytes()
    assert made.package.action_names == champion.action_names
    assert made.package.simulator_version == champion.simulator_version


def test_a_label_that_is_not_finite_is_named_and_leaves_the_old_package(tmp_path, trained):
    champion, shards = trained
    old = tune(tmp_path, champion, few(), shards, options=QUICK)
    observation = few().observation.copy()
    observation[7, 1] = np.nan
    with pytest.raises(NonFiniteError) as caught:
        tune(tmp_path, champion, few(observation=observation), shards, options=QUICK)
    assert caught.value.where == {"label": "label-00007", "field": "observation"}
    assert PolicyPackage.load(old.package_path).digest == old.package.digest


def test_a_label_that_comes_twice_is_refused(tmp_path, trained):
    champion, shards = trained
    with pytest.raises(LearningError, match="comes twice") as caught:
        tune(tmp_path, champion, few(4).take([0, 1, 2, 1]), shards)
    assert caught.value.where["label"] == "label-00001"


def test_without_anything_to_rehearse_it_is_refused_unless_asked_for(tmp_path, trained):
    champion, _ = trained
    with pytest.raises(LearningError, match="nothing to rehearse"):
        tune(tmp_path, champion, few(), [])
    made = tune(tmp_path, champion, few(), [], options=dataclasses.replace(QUICK, rehearsal=0.0))
    assert "losses/anchor_kl" not in made.log[0]


def test_fewer_rehearsed_steps_than_minibatches_are_no_error(tmp_path, trained):
    champion, shards = trained
    options = dataclasses.replace(QUICK, rehearsal=0.03, minibatch=8)
    assert isinstance(tune(tmp_path, champion, few(), shards, options=options), FineTuned)


def scripted(scores):
    remaining = iter(scores)
    return lambda _: next(remaining)


@pytest.mark.parametrize(
    ("scores", "kept", "score"),
    [
        ([0.8, 0.82, 0.816, 0.817, 0.818], 4, 0.818),  # within the tolerance: the latest
        ([0.8, 0.82, 0.81, 0.816, 0.8], 3, 0.816),  # beyond it: the latest within
        ([0.8, 0.81, 0.79, 0.79, 0.82], 1, 0.81),  # two beyond in a row: stopped
        ([0.8, 0.797, 0.796, 0.7, 0.7], 2, 0.796),
    ],
)
def test_the_latest_look_within_the_tolerance_is_kept(tmp_path, trained, scores, kept, score):
    champion, shards = trained
    options = dataclasses.replace(QUICK, epochs=4, validate_every=1)
    made = tune(tmp_path, champion, few(), shards, options=options, validate=scripted(scores))
    assert (made.kept_epoch, made.best_validation) == (kept, score)
    assert made.package.provenance["epoch"] == kept
    plain = tune(tmp_path / "plain", champion, few(), shards, options=options)
    assert (plain.package.digest == made.package.digest) == (kept == 4)


def test_forgetting_leaves_no_package_and_the_labels_new(tmp_path, trained):
    champion, shards = trained
    options = dataclasses.replace(QUICK, epochs=6, validate_every=1)
    made = tune(tmp_path, champion, few(), shards, options=options, validate=scripted([0.8, 0.7, 0.6]))
    assert (made.reason, made.new_labels, made.validations) == ("forgetting", 40, ((0, 0.8), (1, 0.7), (2, 0.6)))
    assert "0.8000 to 0.6000" in made.explanation
    assert not (tmp_path / "package").exists()


def test_a_score_that_is_no_number_is_no_forgetting(tmp_path, trained):
    champion, shards = trained
    options = dataclasses.replace(QUICK, epochs=4, validate_every=1)
    with pytest.raises(NonFiniteError, match="validation score") as caught:
        tune(tmp_path, champion, few(), shards, options=options, validate=scripted([0.8, float("nan")]))
    assert caught.value.where["step"] == 1
    assert not (tmp_path / "package").exists()


def test_the_anchor_holds_what_is_rehearsed(tmp_path, trained):
    champion, shards = trained
    labels = judged(*_contrary(champion))
    loose, held = (
        tune(tmp_path / str(weight), champion, labels, shards, options=tuning(learning_rate=1e-2, kl_weight=weight))
        for weight in (0.0, 20.0)
    )
    assert held.log[-1]["losses/anchor_kl"] < loose.log[-1]["losses/anchor_kl"] / 2


def _contrary(champion):
    columns, target, segment = played(champion, rounds=1)
    return columns, (target + 1) % CHOICES + CHOICES * segment, "contrary"


def test_planning_errors_train_the_critic_in_their_segment(tmp_path, trained):
    champion, shards = trained
    labels = judged(*_contrary(champion))
    planned = dataclasses.replace(labels, error_type=np.ones(len(labels), np.int8))
    made = tune(tmp_path, champion, planned, shards, options=QUICK)
    assert made.useful == len(labels)
    first = [package.network.first.weight.detach().numpy() for package in (champion, made.package)]
    assert not np.array_equal(*first)  # by the rehearsal; the labels' part is in the tests of their gradients


def test_discounted_returns_begin_anew_with_each_episode():
    shard = tiny_shard(rounds=1, size=3)
    shard.records["reward"] = np.arange(12)
    expected = [0, 1, 2.5, 4.25, 4, 7, 9.5, 11.75, 8, 13, 16.5, 19.25]
    assert discounted_returns([shard], 0.5).tolist() == expected
    assert discounted_returns([], 0.5).tolist() == []


def test_settings_become_options():
    settings = Settings(
        seed=3, feedback={"minimum_labels": 9}, finetuning={"epochs": 5, "minibatch": 7, "learning_rate_share": 0.5}
    )
    options = fine_tuning_options(settings)
    assert (options.epochs, options.minibatch, options.minimum_labels) == (5, 7, 9)
    assert options.learning_rate == pytest.approx(0.5 * settings.training.learning_rate)
    assert options.ppo.discount == settings.training.gamma
    assert options.replay.sampler == "uniform"
    with pytest.raises(SettingsError, match="minibatch is 0"):
        FineTuningOptions(minibatch=0)


KILLED = """
import os, signal, sys
from pathlib import Path
from agentpipe import storage
from agentpipe.experience.store.shard import open_shard
from agentpipe.learning.policy import package
from agentpipe_tests.learning.succession.test_finetuning import *
root, when = Path(sys.argv[1]), int(sys.argv[2])
champion = PolicyPackage.load(root / "champion")
rename, calls = storage.replace_directory, 0
def killing(source, final, **more):
    if when == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    rename(source, final, **more)
    os.kill(os.getpid(), signal.SIGKILL)
storage.replace_directory = killing
tune(root / "tuned", champion, few(), [open_shard(Path(p)) for p in sys.argv[3:]], options=QUICK)
"""


@pytest.mark.slow
@pytest.mark.parametrize("when", [0, 1])
def test_killed_while_publishing_leaves_the_old_or_the_whole_new_package(tmp_path, trained, when):
    champion, shards = trained
    champion.save(tmp_path / "champion")
    old = tune(tmp_path / "tuned", champion, few(10), shards, options=QUICK)
    new = tune(tmp_path / "whole", champion, few(), shards, options=QUICK)
    paths = [str(shard.path) for shard in shards]
    command = [sys.executable, "-c", KILLED, str(tmp_path), str(when), *paths]
    done = subprocess.run(command, capture_output=True, timeout=300, check=False, env=dict(os.environ))
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert PolicyPackage.load(tmp_path / "tuned" / "package").digest == (new if when else old).package.digest
    again = tune(tmp_path / "tuned", champion, few(), shards, options=QUICK)
    assert again.package.digest == new.package.digest


def test_the_manifest_names_the_file_of_labels(tmp_path, trained):
    champion, shards = trained
    made = tune(tmp_path, champion, few(), shards, options=QUICK)
    manifest = json.loads((made.package_path / "package.json").read_text())
    assert "labels.txt" in manifest["files"]
