"""Which way a candidate is made, and from what; the learning itself is other tests'."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from agentpipe.defs.learning import assets, training
from agentpipe.defs.learning.training import NothingLearnedError, make
from agentpipe.defs.resources import Workspace
from agentpipe.defs.scene import Scene
from agentpipe.defs.steps import Step
from agentpipe.environments.layout import ACTION_COUNT, OBSERVATION_SIZE
from agentpipe.environments.parameters import CELLS
from agentpipe.errors import LearningError
from agentpipe.learning import trainer
from agentpipe.learning.policy.normalisation import ObservationStatistics
from agentpipe.learning.policy.package import PolicyPackage
from agentpipe.learning.succession import finetuning
from agentpipe.learning.succession.finetuning import NotTrained
from agentpipe.progress import silent
from agentpipe_tests.defs.homes import leave, promote

DAY = dt.date(2026, 11, 24)
NOTHING = NotTrained("too_few_labels", "3 new labelled decisions, 50 are needed", 3)


@dataclass(frozen=True)
class PlayedScene(Scene):
    """A scene whose pools say only which cells and seed they are of."""

    pools: list[tuple[int, list[str]]] = field(default_factory=list)

    def pool(self, environments: Any, purpose: str, threads: int | None = None) -> Any:
        self.pools.append((self.seed, sorted({spec.cell for spec in environments})))
        return f"pool for {purpose}"


class Stand:
    """Stands in for training and fine-tuning, and keeps what each was asked."""

    def __init__(self, workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
        self.workspace, self.trained, self.tuned = workspace, [], []  # type: ignore[var-annotated]
        self.reason, self.tuning = "budget", SimpleNamespace(package="tuned", package_path=Path("tuned"))
        self.pools: list[tuple[int, list[str]]] = []
        monkeypatch.setattr(trainer, "train", self._train)
        monkeypatch.setattr(finetuning, "fine_tune", self._tune)
        monkeypatch.setattr(training, "scene", self._scene)
        monkeypatch.setattr(training, "validator", lambda _: "validator")
        monkeypatch.setattr(training, "expert", lambda: "expert")
        monkeypatch.setattr(ObservationStatistics, "load", lambda _: "statistics")
        monkeypatch.setattr(
            PolicyPackage, "load", lambda path: SimpleNamespace(name=path.name, statistics="the champion's")
        )
        monkeypatch.setattr("agentpipe.experience.store.shard.open_shard", lambda path: path.name)
        monkeypatch.setattr("agentpipe.learning.samples.stream.line_source", lambda *_: "source")

    def _scene(self, workspace: Workspace) -> Scene:
        table, profile = SimpleNamespace(version="table-1"), SimpleNamespace(digest="profile-1")
        return PlayedScene(workspace.catalog(), table, profile, 0, 1, self.pools)  # type: ignore[arg-type]

    def _train(self, *arguments: Any, **options: Any) -> SimpleNamespace:
        self.trained.append((arguments, options))
        return SimpleNamespace(package="trained", package_path=Path("trained"), reason=self.reason)

    def _tune(self, *arguments: Any, **options: Any) -> Any:
        self.tuned.append((arguments, options))
        return self.tuning

    def make(self, trigger: str, day: dt.date = DAY) -> training.Made:
        key = f"{day}|{trigger}"
        return make(Step("policy_checkpoint", key, self.workspace, silent, {}, "configuration", "key" * 8))


@pytest.fixture
def stand(home: Workspace, monkeypatch: pytest.MonkeyPatch) -> Stand:
    return Stand(home, monkeypatch)


@pytest.mark.parametrize(("trigger", "champion"), [("manual", False), ("manual", True), ("nightly", False)])
def test_by_hand_and_before_the_first_champion_a_candidate_begins_from_random_weights(
    stand: Stand, trigger: str, champion: bool
) -> None:
    if champion:
        promote(stand.workspace, "first")
    made = stand.make(trigger)
    assert (made.package, made.tuned, made.untuned) == ("trained", None, "")
    [(arguments, options)] = stand.trained
    assert arguments[:2] == ("pool for TRAIN", "statistics")
    assert (options["initial"], options["expert"]) == (None, "expert")
    assert options["parent"] == ("first" if champion else None)
    assert options["directory"] == (
        stand.workspace.root / "policy_checkpoint" / f"{DAY}_{trigger}" / "keykeykeykeykeyk"
    )
    assert stand.tuned == []


def test_a_night_begins_from_the_champion_and_then_learns_the_day_s_labels(stand: Stand) -> None:
    promote(stand.workspace, "first")
    made = stand.make("nightly")
    [(arguments, options)] = stand.trained
    assert arguments[1] == "the champion's"
    assert (options["initial"].name, options["expert"], options["parent"]) == ("first", None, "first")
    assert options["directory"].name == "retraining"
    [(tuned, more)] = stand.tuned
    assert (tuned[0], more["parent"]) == ("trained", "first")
    assert len(tuned[1].label_id) == 0
    assert (made.package, made.trained is not None) == ("tuned", True)


def test_no_two_nights_meet_the_same_episodes_and_a_night_run_again_meets_its_own(stand: Stand) -> None:
    promote(stand.workspace, "first")
    for day in (DAY, DAY + dt.timedelta(days=1), DAY):
        stand.make("nightly", day)
    seeds = [seed for seed, _ in stand.pools]
    assert seeds[0] == seeds[2] != seeds[1]
    assert [options.seed for (_, _, options), _ in stand.trained] == seeds


def test_a_night_whose_day_has_no_labels_is_the_retrained_policy_and_says_so(stand: Stand) -> None:
    promote(stand.workspace, "first")
    stand.tuning = NOTHING  # type: ignore[assignment]
    made = stand.make("nightly")
    assert (made.package, made.tuned, made.untuned) == ("trained", None, NOTHING.explanation)


def test_a_feedback_candidate_is_the_champion_and_the_labels_alone(stand: Stand) -> None:
    promote(stand.workspace, "first")
    made = stand.make("feedback")
    [(tuned, more)] = stand.tuned
    assert (tuned[0].name, more["parent"]) == ("first", "first")
    assert (made.package, made.trained) == ("tuned", None)
    assert stand.trained == []


def test_a_feedback_candidate_that_learned_nothing_is_a_typed_error(stand: Stand) -> None:
    promote(stand.workspace, "first")
    stand.tuning = NOTHING  # type: ignore[assignment]
    with pytest.raises(LearningError, match=rf"nothing was learned from the labels of {DAY}: 3 new") as caught:
        stand.make("feedback")
    assert caught.value.where == {"reason": "too_few_labels"}
    assert isinstance(caught.value, NothingLearnedError)


def test_a_feedback_candidate_that_forgot_too_much_is_an_error_that_somebody_should_see(stand: Stand) -> None:
    promote(stand.workspace, "first")
    stand.tuning = NotTrained("forgetting", "validation fell from 0.9 to 0.8", 60)  # type: ignore[assignment]
    with pytest.raises(LearningError, match="validation fell") as caught:
        stand.make("feedback")
    assert not isinstance(caught.value, NothingLearnedError)


def test_without_a_champion_feedback_has_nothing_to_start_from(stand: Stand) -> None:
    with pytest.raises(LearningError, match="no champion yet") as caught:
        stand.make("feedback")
    assert caught.value.remedy
    assert stand.tuned == []


@pytest.mark.parametrize("trigger", ["manual", "nightly", "feedback"])
def test_a_failed_cell_s_environments_and_shard_are_left_out(stand: Stand, trigger: str) -> None:
    promote(stand.workspace, "first")
    leave(stand.workspace, "disturbance_table", "load-1", "rows that its trajectories were not recorded under")
    kept = [cell for cell in CELLS if cell != "load-1"]
    stand.make(trigger)
    for _, options in [*stand.trained, *stand.tuned]:
        assert options["recorded"] == kept  # the name of each shard's folder here
        assert list(options["provenance"]["trajectories"]) == kept
    assert [cells for _, cells in stand.pools] == ([] if trigger == "feedback" else [sorted(kept)])


@pytest.mark.parametrize("trigger", ["manual", "nightly", "feedback"])
def test_with_twelve_fresh_cells_nothing_is_trained(stand: Stand, trigger: str) -> None:
    promote(stand.workspace, "first")
    for cell in ("load-1", "load-2", "network-5"):
        leave(stand.workspace, "disturbance_table", cell, "other rows")
    with pytest.raises(LearningError, match="12 of 15 cells are fresh, 13 are needed") as caught:
        stand.make(trigger)
    assert caught.value.where == {"cells": "network-5, load-1, load-2"}
    assert stand.trained == stand.tuned == []


@pytest.mark.parametrize("trigger", ["manual", "nightly"])
def test_an_interrupted_training_is_no_candidate(stand: Stand, trigger: str) -> None:
    promote(stand.workspace, "first")
    stand.reason = "interrupted"
    with pytest.raises(LearningError, match="training was interrupted"):
        stand.make(trigger)
    assert stand.tuned == []


@pytest.fixture
def distilled(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What each distillation was asked; they are due, and this one is kept."""
    asked: list[Any] = []
    result = SimpleNamespace(
        package="distilled", package_path=Path("distilled"), finished=True, kept=True, environments=("a", "b"),
        hard_before=0.4, hard_after=0.5, validation_before=0.9, validation_after=0.91, explanation="kept: so",
    )  # fmt: skip

    def distil(*arguments: Any, **options: Any) -> Any:
        asked.append((arguments, options, result))
        return result

    monkeypatch.setattr("agentpipe.learning.aids.distillation.distillation_due", lambda *_: "always")
    monkeypatch.setattr("agentpipe.learning.aids.distillation.nothing_met", lambda *_: "")
    monkeypatch.setattr("agentpipe.learning.aids.distillation.distil", distil)
    return asked


def test_where_it_is_due_the_hardest_environments_are_learned_apart(stand: Stand, distilled: list[Any]) -> None:
    made = stand.make("manual")
    [((trained, _), options, _)] = distilled
    assert (made.package, made.trained, made.distilled is not None) == ("distilled", trained, True)
    assert options["directory"].name == "distillation"
    assert options["provenance"]["distillation_due"] == "always"
    assert len(options["names"]) == len(stand.workspace.catalog().environments("train"))
    options["pool_for"](np.array([0]))
    seeds = [seed for seed, _ in stand.pools]
    assert seeds[0] != seeds[1]  # its episodes are not those of the training
    shown = assets._distilled(made)
    assert (shown["hardest_success_before"], shown["hardest_success_after"]) == (0.4, 0.5)
    assert (shown["hardest_environments"], shown["best_validation"]) == (2, 0.91)


def test_an_interrupted_distillation_is_no_candidate(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = SimpleNamespace(finished=False)
    monkeypatch.setattr("agentpipe.learning.aids.distillation.distillation_due", lambda *_: "always")
    monkeypatch.setattr("agentpipe.learning.aids.distillation.nothing_met", lambda *_: "")
    monkeypatch.setattr("agentpipe.learning.aids.distillation.distil", lambda *_, **__: broken)
    with pytest.raises(LearningError, match="distillation was interrupted"):
        stand.make("manual")


def test_where_no_environment_was_met_the_main_policy_is_kept_and_it_is_said(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentpipe.learning.aids.distillation.distillation_due", lambda *_: "always")
    monkeypatch.setattr("agentpipe.learning.aids.distillation.nothing_met", lambda *_: "not done: none was met")
    made = stand.make("manual")
    assert made.distilled is None
    assert assets._distilled(made) == {"distillation": "due (always), not done: none was met"}


def test_without_distillation_nothing_is_shown_of_it(stand: Stand) -> None:
    assert assets._distilled(stand.make("manual")) == {}


def test_demonstrations_are_read_from_where_the_settings_say_and_too_few_are_refused(
    stand: Stand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = tmp_path / "episodes.parquet"
    given.write_bytes(b"no Parquet")
    monkeypatch.setenv("AGENTPIPE_TRAINING__DEMONSTRATIONS", str(given))
    read: list[Any] = []

    def reader(paths: Any, shape: Any, **options: Any) -> Any:
        read.append((paths, tuple(shape), options["least"]))
        return SimpleNamespace(digest="content")

    with monkeypatch.context() as patched:
        patched.setattr("agentpipe.learning.cloning.demonstrations.read_demonstrations", reader)
        stand.make("manual")
    assert read == [([given], (OBSERVATION_SIZE, ACTION_COUNT), 50)]
    [(_, options)] = stand.trained
    assert options["demonstrations"].digest == options["provenance"]["demonstrations"] == "content"
    with pytest.raises(LearningError, match="not a Parquet file"):
        stand.make("manual")


def test_the_figures_of_a_candidate_need_no_cell_that_was_left_out(home: Workspace) -> None:
    """A cell that was never made failed the candidate after hours of training."""
    leave(home, "trajectories", "load-1", episodes=10, success_share=0.5)
    leave(home, "trajectories", "load-2", episodes=30, success_share=0.9)
    home.references.path("trajectories", "load-3").unlink()
    assert assets._behaviour_success(home, ["load-1", "load-2"]) == pytest.approx(0.8)
