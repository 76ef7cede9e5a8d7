"""Whole runs with every aid on: they resume bit for bit, do not fight, and stop at the first nonsense."""

import dataclasses
import subprocess
import sys

import numpy as np
import pytest

from agentpipe.errors import CheckpointError, EmptyMaskError, NonFiniteError, SettingsError
from agentpipe.learning import checkpoint as checkpoints
from agentpipe.learning.aids.base import Knobs
from agentpipe.learning.aids.chosen import chosen_aids
from agentpipe.learning.aids.curiosity import Curiosity
from agentpipe.learning.aids.options import AidOptions
from agentpipe.learning.options import GateOptions, PpoOptions
from agentpipe.learning.trainer import train
from agentpipe_tests.learning.aids.told import CALM, rollout_of, warning
from agentpipe_tests.learning.tiny import (
    ACTION_NAMES,
    NAMES,
    TinyExpert,
    TinyPool,
    tiny_options,
    tiny_statistics,
    tiny_warm_up,
)

ALWAYS = AidOptions(
    curiosity="always", dynamic_lambda="always", layer_rates="always", distillation="always", lambda_updates=1
)
TOUCHY = AidOptions(patience=1, calm=1, longest=2, lambda_updates=1, distillation="always")
"""remedies that come and go all the time, under :data:`ALARMED`"""
ALARMED = GateOptions(entropy_min=5.0, advantage_mean_warn=0.0, gradient_norm_warn=0.0)
UPDATES = 6


def run(directory, options, pool=None, **changes):
    return train(
        pool or TinyPool(), tiny_statistics(), options, directory=directory, action_names=ACTION_NAMES, **changes
    )


def options_with(aids, updates=UPDATES, **changes):
    gates = ALARMED if aids is TOUCHY else GateOptions()
    return tiny_options(budget_steps=512 * updates, checkpoint_every=2, aids=aids, gates=gates, **changes)


def ended(result):
    """All that a run ends with: its last checkpoint holds weights, optimiser, counts, log and all."""
    return checkpoints.load(result.checkpoint).digest, result.package.digest, result.aid_log


class KilledError(Exception):
    """Ends a run as a dead process would: nothing is saved any more."""


def killed_in(update):
    def tell(stage, done, *_):
        if stage == "training" and done >= 512 * update:
            raise KilledError

    return tell


@pytest.fixture(scope="module", params=["always", "touchy"])
def whole(request, tmp_path_factory):
    """Aids, and an uninterrupted run with them on one thread and on two."""
    aids = ALWAYS if request.param == "always" else TOUCHY
    folder = tmp_path_factory.mktemp("whole")
    return aids, {n: run(folder / str(n), options_with(aids, threads=n)) for n in (1, 2)}


def test_threads_make_no_difference(whole):
    _, results = whole
    assert ended(results[1])[1:] == ended(results[2])[1:]


def test_every_remedy_did_something(whole):
    aids, results = whole
    names = {entry.aid for entry in results[1].aid_log}
    assert names == ({"dynamic lambda"} if aids is ALWAYS else {"curiosity", "dynamic lambda", "layer rates"})
    assert all(entry.reason and np.isfinite(entry.value) for entry in results[1].aid_log)


@pytest.mark.parametrize(("update", "threads"), [(1, 1), (3, 2), (4, 1)])
def test_an_interrupted_run_ends_as_an_uninterrupted_one(whole, tmp_path, update, threads):
    """Stopped with a checkpoint after an update, whether or not one was due."""
    aids, results = whole
    asked = iter([False] * update + [True])
    part = run(tmp_path, options_with(aids, threads=threads), stop=lambda: next(asked))
    assert (part.reason, part.updates) == ("interrupted", update)
    resumed = run(tmp_path, options_with(aids, threads=threads), resume=part.checkpoint)
    assert ended(resumed) == ended(results[threads])


@pytest.mark.parametrize(("update", "threads"), [(3, 1), (5, 2)])
def test_a_killed_run_ends_as_an_uninterrupted_one(whole, tmp_path, update, threads):
    """Killed in update 3 or 5, it goes on from the checkpoint of update 2 or 4."""
    aids, results = whole
    with pytest.raises(KilledError):
        run(tmp_path, options_with(aids, threads=threads), progress=killed_in(update))
    last = checkpoints.latest(tmp_path / "checkpoints")
    assert last.name.startswith(f"update-{update - 1:06d}")
    assert ended(run(tmp_path, options_with(aids, threads=threads), resume=last)) == ended(results[threads])


RESUME = """
import sys
from pathlib import Path
from agentpipe_tests.learning.aids.test_every_aid import *
result = run(Path(sys.argv[1]), options_with(TOUCHY), resume=checkpoints.latest(Path(sys.argv[1]) / "checkpoints"))
print(*ended(result)[:2])
"""


@pytest.mark.slow
@pytest.mark.parametrize("whole", ["touchy"], indirect=True)
def test_a_fresh_process_goes_on_bit_for_bit(whole, tmp_path):
    aids, results = whole
    with pytest.raises(KilledError):
        run(tmp_path, options_with(aids), progress=killed_in(5))
    command = [sys.executable, "-c", RESUME, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == list(ended(results[1])[:2])


def test_resume_with_other_aids_is_refused(tmp_path):
    part = run(tmp_path, options_with(ALWAYS, updates=1))
    content, arrays = checkpoints.load(part.checkpoint).content["aids"], {}
    with pytest.raises(CheckpointError, match="made with other training aids"):
        chosen_aids(options_with(AidOptions()), NAMES).restore(content, arrays, part.checkpoint)
    with pytest.raises(CheckpointError, match="other training options"):
        run(tmp_path, options_with(AidOptions(), updates=1), resume=part.checkpoint)


def test_no_two_aids_turn_one_knob():
    """Every aid is provoked alone; what it changes is its own."""
    turned = []
    for name in ("curiosity", "dynamic_lambda", "layer_rates", "distillation"):
        modes = dict.fromkeys(("curiosity", "dynamic_lambda", "layer_rates", "distillation"), "off")
        options = AidOptions(**{**modes, name: "always"}, lambda_updates=1)
        aids = chosen_aids(tiny_options(aids=options), NAMES)
        seen = set()
        for update in range(3):
            knobs = Knobs(0.1, 0.2, 0.95)
            before = dict(vars(knobs))
            aids.before(knobs, None)
            seen |= {knob for knob, value in before.items() if getattr(knobs, knob) != value}
            rollout = rollout_of(3, 4, width=len(NAMES))
            rollout.segment[:] = 0
            if aids.collected(rollout, None) is not None:
                seen.add("bonus")
            aids.updated(update, {**CALM, "losses/advantage_mean": -0.9}, [warning("advantage mean", 0.9, 0.5)])
        turned.append(seen)
    assert turned == [{"bonus"}, {"gae_lambda"}, {"bottom_rate"}, set()]


def test_off_is_off(tmp_path):
    off = AidOptions(curiosity="off", dynamic_lambda="off", layer_rates="off", distillation="off")
    assert [aid.name for aid in chosen_aids(tiny_options(aids=off), NAMES).aids] == ["reward watch"]
    quiet = AidOptions(patience=10**6)
    plain, listening = (run(tmp_path / name, options_with(aids)) for name, aids in (("off", off), ("quiet", quiet)))
    assert plain.package.digest == listening.package.digest


def test_figures_and_log_are_where_they_are_looked_for(whole):
    aids, results = whole
    result = results[1]
    first = result.update_log[0]
    assert {"aids/curiosity", "aids/dynamic_lambda", "aids/credit_reach", "aids/layer_rates"} <= set(first)
    assert {"charts/gae_lambda", "charts/bottom_rate"} <= set(first)
    assert (first["aids/curiosity"], first["charts/bottom_rate"] < 1) == (1.0, aids is ALWAYS)
    kept = checkpoints.load(result.checkpoint).content["aids"]["log"]
    assert [entry["reason"] for entry in kept] == [entry.reason for entry in result.aid_log]


# -- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("field", "value"), [("observation", np.nan), ("observation", np.inf), ("reward", -np.inf)])
@pytest.mark.parametrize("aids", [ALWAYS, TOUCHY], ids=["always", "touchy"])
def test_the_first_value_that_is_not_finite_is_named_and_the_last_checkpoint_kept(tmp_path, aids, field, value):
    class Breaks(TinyPool):
        def step(self, actions):
            super().step(actions)
            if self.episode[0] == 5 and self.segment[0] == 2:
                (self.observation[:, 2] if field == "observation" else self.reward)[7] = value

    with pytest.raises(NonFiniteError) as caught:
        run(tmp_path, options_with(aids), Breaks())
    where = caught.value.where
    assert (where["environment"], where["field"]) == ("tiny-7", field)
    assert where["step"] == (22 if field == "observation" else 21)
    last = checkpoints.load(checkpoints.latest(tmp_path / "checkpoints"))
    assert last.content["update"] == 2
    assert all(np.isfinite(array).all() for array in last.arrays["network"].values())


def test_a_bonus_that_is_not_finite_is_named_before_anything_is_learned_from_it(tmp_path, monkeypatch):
    real = Curiosity.bonus

    def breaks(self, rollout):
        bonus = real(self, rollout)
        if self.counts.sum() == 3 * 512:
            bonus[4, 11] = np.inf
        return bonus

    monkeypatch.setattr(Curiosity, "bonus", breaks)
    with pytest.raises(NonFiniteError) as caught:
        run(tmp_path, options_with(ALWAYS))
    assert caught.value.where == {"environment": "tiny-11", "field": "bonus of curiosity", "step": 4}
    assert checkpoints.load(checkpoints.latest(tmp_path / "checkpoints")).content["update"] == 2


def test_a_mask_without_a_legal_action_is_named(tmp_path):
    class Breaks(TinyPool):
        def step(self, actions):
            super().step(actions)
            if self.episode[0] == 3:
                self.mask[9] = False

    with pytest.raises(EmptyMaskError) as caught:
        run(tmp_path, options_with(ALWAYS), Breaks())
    assert (caught.value.where["environment"], caught.value.where["step"]) == ("tiny-9", 12)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_a_learning_rate_that_cannot_learn_is_refused(rate):
    with pytest.raises(SettingsError, match="learning_rate"):
        PpoOptions(learning_rate=rate)


def test_a_learning_rate_beyond_all_measure_stops_and_leaves_the_last_good_weights(tmp_path):
    """Weights of 1e9 give gradients beyond float32: the first one is named, before another step is taken."""
    options = tiny_options(aids=ALWAYS, budget_steps=512 * 20, warm_up=tiny_warm_up())
    ppo = dataclasses.replace(options.ppo, learning_rate=1e9)
    options = dataclasses.replace(options, ppo=ppo)
    with pytest.raises(NonFiniteError, match="last checkpoint is good") as caught:
        run(tmp_path, options, expert=TinyExpert())
    assert caught.value.where["field"].startswith("gradient of ")
    last = checkpoints.load(checkpoints.latest(tmp_path / "checkpoints"))
    assert largest(last.arrays["good"]) < 10


def largest(weights):
    return max(float(abs(np.asarray(tensor)).max()) for tensor in weights.values())


def test_minibatches_of_one_sample_and_a_feature_that_never_moves(tmp_path):
    """65 samples in minibatches of 64 leave one over; a constant feature has no deviation to be divided by."""

    class Constant(TinyPool):
        def _look(self):
            super()._look()
            self.observation[:, 4] = 3.0

    pool, statistics = Constant(5), tiny_statistics(1)
    statistics.mean[4], statistics.m2[4] = 3.0, 0.0
    ppo = {"rollout_steps": 13, "epochs": 2, "minibatch": 64}
    options = tiny_options(aids=ALWAYS, budget_steps=65 * 3)
    options = type(options)(**{**vars(options), "ppo": PpoOptions(**{**vars(options.ppo), **ppo})})
    result = train(pool, statistics, options, directory=tmp_path, action_names=ACTION_NAMES)
    assert result.updates == 3
    assert all(np.isfinite(value) for row in result.update_log for value in row.values() if isinstance(value, float))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"curiosity": "sometimes"}, "curiosity"),
        ({"lambda_limits": (0.97, 0.92)}, "lambda_limits"),
        ({"lambda_limits": (0.5, 1.5)}, "lambda_limits"),
        ({"patience": 0}, "patience"),
        ({"curiosity_weight": -1.0}, "curiosity_weight"),
        ({"curiosity_weight": float("nan")}, "curiosity_weight"),
        ({"bottom_rate": 0.0}, "bottom_rate"),
        ({"bottom_rate": 2.0}, "bottom_rate"),
        ({"stall_updates": 1}, "stall_updates"),
        ({"hardest": 0}, "hardest"),
    ],
)
def test_options_that_make_no_sense_are_refused(changes, field):
    with pytest.raises(SettingsError) as caught:
        AidOptions(**changes)
    assert caught.value.where["field"] == field
