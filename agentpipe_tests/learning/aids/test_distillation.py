"""The hardest environments are fine-tuned on alone, and only what helps is kept."""

import json
from dataclasses import replace

import numpy as np
import pytest

from agentpipe.errors import CheckpointError, LearningError
from agentpipe.learning.aids.distillation import HARDEST, distil, distillation_due, distillation_options, nothing_met
from agentpipe.learning.aids.options import AidOptions
from agentpipe.learning.gates import GateFigure
from agentpipe.learning.policy.package import PolicyPackage
from agentpipe.learning.result import TrainingResult
from agentpipe.learning.trainer import train
from agentpipe_tests.learning.tiny import ACTION_NAMES, CHOICES, SEGMENTS, TinyPool, tiny_options, tiny_statistics

SIZE, HARD = 64, 8
NAMES = tuple(f"tiny-{index}" for index in range(SIZE))
AIDS = AidOptions(
    curiosity="off",
    dynamic_lambda="off",
    layer_rates="off",
    distillation="always",
    hardest=HARD,
    least_episodes=5,
    distillation_steps=64 * 40,
    distillation_rate_share=1.0,
    distillation_kl_weight=0.05,
    distillation_tolerance=0.05,
)


class UnlikePool(TinyPool):
    """A tiny pool in which some environments ask for the next choice, and say so in the last feature.

    Args:
        rows: of the :data:`SIZE` environments; the last :data:`HARD` of them are unlike the others.
        seed: of targets and noise.
    """

    def __init__(self, rows, seed=0):
        self.unlike = np.asarray(rows) >= SIZE - HARD
        super().__init__(len(rows), seed)
        self.names = tuple(NAMES[row] for row in rows)

    def _look(self):
        super()._look()
        self.observation[:, -1] = np.where(self.unlike, 3.0, 0.0)

    def step(self, actions):
        shown = self.target.copy()
        self.target[:] = np.where(self.unlike, (shown + 1) % CHOICES, shown)
        ended = self.segment == SEGMENTS - 1
        super().step(actions)
        self.target[:] = np.where(ended, self.target, shown)
        self._look()


def success(rows, seed=99):
    """What scores a package: its share of right decisions in these environments."""

    def score(package):
        pool, right = UnlikePool(rows, seed), []
        for _ in range(20):
            action = package.act(pool.observation, pool.last_action, pool.time, pool.mask).action
            right.append(action % CHOICES == (pool.target + pool.unlike) % CHOICES)
            pool.step(action)
        return float(np.mean(right))

    return score


EASY = np.arange(SIZE - HARD)
OPTIONS = tiny_options(budget_steps=512 * 30, validate_every=5, aids=AIDS)


@pytest.fixture(scope="module")
def main(tmp_path_factory):
    return train_main(tmp_path_factory.mktemp("main"), OPTIONS)


def train_main(folder, options):
    pool = UnlikePool(np.arange(SIZE))
    return train(pool, tiny_statistics(), options, directory=folder, validate=success(EASY), action_names=ACTION_NAMES)


def run(main, folder, options=OPTIONS, **changes):
    given = {
        "names": NAMES,
        "pool_for": lambda rows: UnlikePool(rows, seed=5),
        "judge_for": success,
        "validate": success(EASY),
        "directory": folder,
    }
    return distil(main, options, **{**given, **changes})


def test_the_hardest_are_found_and_learned_at_no_cost_to_validation(main, tmp_path):
    found = run(main, tmp_path)
    assert set(found.environments) == set(NAMES[-HARD:])
    assert found.hard_before < 0.6
    assert found.hard_after > found.hard_before + 0.1
    assert found.validation_before > 0.85
    assert found.validation_after >= found.validation_before - AIDS.distillation_tolerance
    assert found.kept
    assert found.finished
    assert found.explanation.startswith("kept: hard ones")
    assert found.package is found.trained.package
    assert found.package.provenance["distilled_from"] == main.package.digest
    assert PolicyPackage.load(found.package_path).digest == found.package.digest
    told = json.loads((tmp_path / HARDEST).read_text())
    assert [entry["environment"] for entry in told] == list(found.environments)
    assert [entry["success"] for entry in told] == sorted(entry["success"] for entry in told)
    assert min(entry["episodes"] for entry in told) >= AIDS.least_episodes


def test_what_validation_would_pay_for_is_not_kept(main, tmp_path):
    looks = iter([0.9, *[0.8] * 99])
    found = run(main, tmp_path, validate=lambda _: next(looks))
    assert not found.kept
    assert found.package is main.package
    assert found.package_path == main.package_path
    assert found.explanation == "not kept: every look lacked more than 0.05 of validation 0.9000"


def test_what_gains_nothing_is_not_kept(main, tmp_path):
    found = run(main, tmp_path, judge_for=lambda _: lambda _: 0.5)
    assert not found.kept
    assert found.explanation.startswith("not kept, nothing was gained: hard ones 0.5000 to 0.5000")


def test_the_oracles_returns_decide_where_they_are_known(main, tmp_path):
    oracle = np.full(SIZE, np.nan)
    oracle[:4] = [90.0, 70.0, 80.0, 60.0]
    found = run(main, tmp_path, oracle=oracle, judge_for=lambda _: lambda _: 0.5)
    assert found.environments == ("tiny-0", "tiny-2", "tiny-1", "tiny-3")


def test_one_that_was_broken_off_goes_on_where_it_was(main, tmp_path):
    asked = iter([False, False, False, True])
    part = run(main, tmp_path / "part", stop=lambda: next(asked))
    assert not part.finished
    assert not part.kept
    assert part.explanation.startswith("broken off: told to end after update 3")
    again, whole = run(main, tmp_path / "part"), run(main, tmp_path / "whole")
    assert again.package.digest == whole.package.digest
    assert again.explanation == whole.explanation


def test_without_a_book_nothing_can_be_chosen(tmp_path):
    options = replace(OPTIONS, aids=replace(AIDS, distillation="off"), budget_steps=512)
    plain = train_main(tmp_path / "main", options)
    with pytest.raises(LearningError, match="nothing is known of how hard each environment is"):
        run(plain, tmp_path)


def test_environments_that_were_hardly_met_are_not_chosen(main, tmp_path):
    few = replace(OPTIONS, aids=replace(AIDS, least_episodes=10_000))
    with pytest.raises(LearningError, match="no environment was met 10000 times"):
        distil(
            main,
            few,
            names=NAMES,
            pool_for=UnlikePool,
            judge_for=success,
            validate=success(EASY),
            directory=tmp_path,
        )


def test_options_of_the_fine_tuning():
    chosen = distillation_options(replace(OPTIONS, target=0.9, aids=replace(AIDS, distillation_rate_share=0.3)), HARD)
    assert chosen.ppo.learning_rate == pytest.approx(0.3 * OPTIONS.ppo.learning_rate)
    assert chosen.ppo.minibatch == 8 * HARD // 4
    assert (chosen.budget_steps, chosen.kl_weight, chosen.tolerance) == (64 * 40, 0.05, 0.05)
    assert (chosen.target, chosen.warm_up, chosen.orchestrator) == (None, None, None)
    assert chosen.aids.distillation == "off"


def ended(reason="budget", status="pass"):
    plateau = GateFigure("4", "plateau gain", 0.001, 0.005, float("-inf"), status, "")
    nothing = dict.fromkeys(TrainingResult.__dataclass_fields__)
    return TrainingResult(**{**nothing, "reason": reason, "explanation": "no gain in 12 looks", "gates": (plateau,)})


@pytest.mark.parametrize(
    ("mode", "reason", "status", "due"),
    [
        ("off", "patience", "warn", ""),
        ("always", "target", "pass", "always"),
        ("always", "interrupted", "warn", ""),
        ("always", "gate", "warn", ""),
        ("remedy", "budget", "pass", ""),
        ("remedy", "budget", "warn", "gate 4: plateau gain 0.001 short of 0.005"),
        ("remedy", "patience", "pass", "the training ended: no gain in 12 looks"),
        ("remedy", "interrupted", "warn", ""),
    ],
)
def test_when_it_is_due(mode, reason, status, due):
    options = replace(OPTIONS, aids=replace(AIDS, distillation=mode))
    assert distillation_due(ended(reason, status), options) == due


def test_a_score_that_is_no_number_keeps_nothing(main, tmp_path):
    found = run(main, tmp_path, judge_for=lambda _: lambda _: float("nan"))
    assert not found.kept


def test_why_there_are_no_hardest_environments_is_told_before(main):
    assert nothing_met(main, OPTIONS) == ""
    few = replace(OPTIONS, aids=replace(AIDS, least_episodes=10_000))
    assert nothing_met(main, few) == "not done: no environment was met 10000 times under its own disturbance"


@pytest.mark.parametrize("weight", [0.0, 0.05])
def test_one_that_began_from_another_policy_is_not_gone_on_with(main, tmp_path, weight):
    options = replace(OPTIONS, aids=replace(AIDS, distillation_kl_weight=weight))
    asked = iter([False, True])
    run(main, tmp_path / "part", options, stop=lambda: next(asked))
    other = train_main(tmp_path / "other", replace(OPTIONS, seed=1, budget_steps=512 * 8))
    with pytest.raises(CheckpointError, match="from another package"):
        run(other, tmp_path / "part", options)
