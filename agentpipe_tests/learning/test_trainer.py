"""The whole run on a tiny pool: it learns, it stops, it resumes bit for bit, it leaves good states behind."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from agentpipe.errors import CheckpointError, HomeError, LearningError, NonFiniteError, SettingsError, VersionError
from agentpipe.learning import checkpoint as checkpoints
from agentpipe.learning.gates import Breaker, training_gate, warm_up_gate
from agentpipe.learning.metrics import Events
from agentpipe.learning.options import (
    GateOptions,
    NetworkOptions,
    StreamOptions,
    WarmUpOptions,
    share_at,
    training_options,
)
from agentpipe.learning.policy.package import PolicyPackage
from agentpipe.learning.trainer import train
from agentpipe.settings import Settings
from agentpipe_tests.learning.tiny import (
    ACTION_NAMES,
    NAMES,
    TinyExpert,
    TinyPool,
    tiny_options,
    tiny_score,
    tiny_statistics,
    tiny_warm_up,
)


def run(directory, options=None, pool=None, **changes):
    changes.setdefault("action_names", ACTION_NAMES)
    return train(pool or TinyPool(), tiny_statistics(), options or tiny_options(), directory=directory, **changes)


def test_learns_the_right_decisions(tmp_path):
    result = run(tmp_path, validate=tiny_score)
    assert result.reason == "budget"
    assert result.best_validation > 0.9
    assert tiny_score(result.package, seed=123) > 0.9
    assert result.environment_steps == 10_240
    assert tiny_score(PolicyPackage.load(result.package_path), seed=123) == tiny_score(result.package, seed=123)


def test_learns_nothing_from_shuffled_rewards(tmp_path):
    """Negative control: a third of the decisions is right by chance."""
    result = run(tmp_path, pool=TinyPool(shuffled=True))
    assert tiny_score(result.package) < 0.55


def test_warm_up_clones_the_expert(tmp_path):
    options = tiny_options(warm_up=tiny_warm_up(episodes=3_000), budget_steps=512)
    result = run(tmp_path, options, expert=TinyExpert(), validate=tiny_score)
    assert result.validations[0][0] == 0
    assert result.validations[0][1] > 0.85
    assert result.warm_up.samples == 4 * result.warm_up.episodes
    assert result.warm_up.episodes >= 3_000
    assert result.warm_up.accuracy > 0.85
    assert [figure.name for figure in result.gates if figure.gate == "2"] == [
        "actor loss",
        "critic mean absolute error",
        "gradient norm median",
    ]


def test_warm_up_is_not_repeated_when_the_run_breaks_off_after_it(tmp_path):
    options = tiny_options(warm_up=tiny_warm_up(), budget_steps=1_024)

    def refuse(stage, *_):
        if stage == "training":
            raise RuntimeError("broken off")

    with pytest.raises(RuntimeError, match="broken off"):
        run(tmp_path, options, expert=TinyExpert(), progress=refuse)
    found = checkpoints.latest(tmp_path / "checkpoints")
    assert found.name.startswith("update-000000")
    resumed = run(tmp_path, options, resume=found)
    whole = run(tmp_path / "whole", options, expert=TinyExpert())
    assert weights_of(resumed) == weights_of(whole)
    assert resumed.warm_up == whole.warm_up


def test_best_weights_are_restored_not_the_last(tmp_path):
    scores = iter([0.1, 0.9, 0.2, 0.3, 0.4, 0.5])
    seen = []

    def validate(package):
        seen.append(package.digest)
        return next(scores)

    result = run(tmp_path, tiny_options(budget_steps=5_000, patience=3), validate=validate)
    assert result.reason == "patience"
    assert result.package.digest == seen[1]
    assert result.best_validation == 0.9
    assert result.package.provenance["update"] == 2


def test_the_latest_look_within_the_tolerance_counts(tmp_path):
    """0.897 lacks 0.004 of the best look and counts; 0.89 lacks more and does not."""
    scores = iter([0.9, 0.901, 0.897, 0.89])
    seen = []

    def validate(package):
        seen.append(package.digest)
        return next(scores)

    result = run(tmp_path, tiny_options(budget_steps=512 * 6, validate_every=2, tolerance=0.005), validate=validate)
    assert [score for _, score in result.validations] == [0.9, 0.901, 0.897, 0.89]
    assert result.package.digest == seen[2]
    assert result.best_validation == 0.897


def test_target_stops_the_run(tmp_path):
    result = run(tmp_path, tiny_options(target=0.8, budget_steps=10**6), validate=tiny_score)
    assert result.reason == "target"
    assert result.best_validation >= 0.8
    assert result.updates < 20


def weights_of(result):
    return {name: tensor.numpy().tobytes() for name, tensor in result.package.network.state_dict().items()}


RESUME = """
import sys
from pathlib import Path
from agentpipe_tests.learning.test_trainer import *
options = tiny_options(budget_steps=512 * 5, checkpoint_every=2, warm_up=tiny_warm_up())
found = checkpoints.latest(Path(sys.argv[1]) / "checkpoints")
assert found.name.startswith("update-000003"), found
result = run(Path(sys.argv[1]), options, validate=tiny_score, expert=TinyExpert(), resume=found)
print(checkpoints.load(result.checkpoint).digest, result.package.digest)
"""


def test_resume_in_a_fresh_process_equals_an_uninterrupted_run_bit_for_bit(tmp_path):
    """Three updates, a checkpoint, two more in another process, against five at once."""
    options = tiny_options(budget_steps=512 * 5, checkpoint_every=2, warm_up=tiny_warm_up())
    arguments = {"validate": tiny_score, "expert": TinyExpert()}
    whole = run(tmp_path / "whole", options, **arguments)
    asked = iter([False, False, False, True])
    part = run(tmp_path / "part", options, stop=lambda: next(asked), **arguments)
    assert (part.reason, part.updates) == ("interrupted", 3)
    done = subprocess.run(
        [sys.executable, "-c", RESUME, str(tmp_path / "part")], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [checkpoints.load(whole.checkpoint).digest, whole.package.digest]


def test_same_seed_same_run_other_seed_other_run(tmp_path):
    short = {"budget_steps": 1_024}
    first, again = (run(tmp_path / name, tiny_options(**short)) for name in "ab")
    assert weights_of(first) == weights_of(again)
    assert first.checkpoint.name == again.checkpoint.name
    assert weights_of(run(tmp_path / "c", tiny_options(**short, seed=2))) != weights_of(first)


def test_run_does_not_depend_on_the_number_of_threads(tmp_path):
    one, two = (run(tmp_path / str(threads), tiny_options(budget_steps=1_024, threads=threads)) for threads in (1, 2))
    assert weights_of(one) == weights_of(two)


def test_resuming_a_finished_run_changes_nothing(tmp_path):
    options = tiny_options(budget_steps=1_024)
    first = run(tmp_path, options)
    again = run(tmp_path, options, resume=first.checkpoint)
    assert again.reason == "budget"
    assert again.package.digest == first.package.digest
    assert again.checkpoint == first.checkpoint


def test_resume_under_other_options_is_refused(tmp_path):
    first = run(tmp_path, tiny_options(budget_steps=512))
    with pytest.raises(CheckpointError, match="other training options"):
        run(tmp_path, tiny_options(budget_steps=1_024), resume=first.checkpoint)
    with pytest.raises(CheckpointError, match="another configuration"):
        run(tmp_path, tiny_options(budget_steps=512), resume=first.checkpoint, configuration_digest="other")


def test_what_changes_no_result_may_change_between_two_parts_of_a_run(tmp_path):
    whole = run(tmp_path / "whole", tiny_options(budget_steps=512 * 4))
    part = run(tmp_path / "part", tiny_options(budget_steps=512 * 4, max_seconds=0.0))
    assert part.reason == "time"
    rest = tiny_options(budget_steps=512 * 4, threads=2, keep_checkpoints=5)
    resumed = run(tmp_path / "part", rest, resume=part.checkpoint)
    assert resumed.package.digest == whole.package.digest
    assert checkpoints.load(resumed.checkpoint).digest == checkpoints.load(whole.checkpoint).digest


def test_nan_leaves_the_last_checkpoint_untouched(tmp_path):
    class Breaks(TinyPool):
        def step(self, actions):
            super().step(actions)
            if self.episode[0] >= 5:
                self.observation[7, 2] = np.nan

    with pytest.raises(NonFiniteError) as caught:
        run(tmp_path, tiny_options(checkpoint_every=1), pool=Breaks())
    assert caught.value.where["environment"] == "tiny-7"
    last = checkpoints.latest(tmp_path / "checkpoints")
    assert last.name.startswith("update-000002")
    assert checkpoints.load(last).content["update"] == 2
    assert not list(tmp_path.rglob(".staging-*"))


def test_checkpoints_of_a_process_that_died_between_two_renames_do_not_stay(tmp_path):
    left = tmp_path / "checkpoints/update-000001-0123456789ab"
    left.mkdir(parents=True)
    (left / "manifest.json").write_text("{}")
    result = run(tmp_path, tiny_options(checkpoint_every=1, budget_steps=1_024))
    assert not left.exists()
    assert result.checkpoint.exists()


def test_how_live_rollouts_are_kept_is_no_part_of_a_policys_digest(tmp_path):
    packages = []
    for name, stream in (
        ("none", None),
        ("small", StreamOptions(shard_steps=64)),
        ("power", StreamOptions(durability="power")),
    ):
        packages.append(run(tmp_path / name, tiny_options(budget_steps=512, stream=stream)).package.digest)
    assert len(set(packages)) == 1


def flip(file, where=-1):
    data = bytearray(file.read_bytes())
    data[where] ^= 4
    file.write_bytes(data)


@pytest.mark.parametrize(
    "name", ["network.safetensors", "optimiser.safetensors", "pool.safetensors", "updates.arrow", "utilisation.arrow"]
)
def test_flipped_byte_in_a_checkpoint_is_found(tmp_path, name):
    result = run(tmp_path, tiny_options(budget_steps=512))
    flip(result.checkpoint / name)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        run(tmp_path, tiny_options(budget_steps=512), resume=result.checkpoint)


def test_manifest_of_a_checkpoint_is_checked_too(tmp_path):
    result = run(tmp_path, tiny_options(budget_steps=512))
    manifest = result.checkpoint / "manifest.json"
    content = json.loads(manifest.read_text())
    content["content"]["environment_steps"] += 1
    manifest.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="digest"):
        checkpoints.load(result.checkpoint)
    manifest.write_text(json.dumps({**content, "format": 99}))
    with pytest.raises(VersionError):
        checkpoints.load(result.checkpoint)


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    run(tmp_path, tiny_options(budget_steps=512 * 5, checkpoint_every=1, keep_checkpoints=2))
    names = sorted(path.name[:13] for path in (tmp_path / "checkpoints").iterdir() if path.is_dir())
    assert names == ["update-000004", "update-000005"]


def test_checkpoint_digest_knows_no_times(tmp_path):
    options = tiny_options(budget_steps=512)
    first, second = (checkpoints.load(run(tmp_path / name, options).checkpoint) for name in "ab")
    assert first.digest == second.digest
    assert first.utilisation[0]["seconds"] != second.utilisation[0]["seconds"]


def test_update_log_holds_norms_and_the_range_of_samples(tmp_path):
    rows = checkpoints.load(run(tmp_path, tiny_options(budget_steps=1_024)).checkpoint).updates
    assert [(row["samples/live_first"], row["samples/live_last"]) for row in rows] == [(0, 511), (512, 1_023)]
    assert rows[0]["gradient_norms/actor_head.weight"] > 0
    assert {"losses/approx_kl", "losses/policy_loss", "losses/approx_kl/execute", "charts/success_rate"} <= set(rows[1])


def test_tensorboard_events_can_be_read_back(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = run(tmp_path, tiny_options(budget_steps=1_024), validate=tiny_score)
    events = EventAccumulator(str(result.tensorboard))
    events.Reload()
    assert {"losses/approx_kl", "losses/value_loss", "charts/SPS", "charts/validation"} <= set(events.Tags()["scalars"])
    assert [event.step for event in events.Scalars("losses/entropy")] == [512, 1_024]


def test_breaker_stops_and_keeps_the_last_good_weights(tmp_path):
    gates = GateOptions(entropy_stop=5.0, breaker_patience=2)
    result = run(tmp_path, tiny_options(gates=gates))
    assert result.reason == "gate"
    assert result.explanation.startswith("gate 4: entropy 1.09")
    assert result.updates == 2
    fresh = run(tmp_path / "fresh", tiny_options(budget_steps=1, gates=gates), stop=lambda: True)
    assert weights_of(result) == weights_of(fresh)
    assert [result.package.provenance[name] for name in ("update", "environment_steps")] == [0, 0]


def test_provenance_names_the_update_and_the_steps_of_the_weights(tmp_path):
    scores = iter([0.1, 0.9, 0.2])
    chosen = tiny_options(budget_steps=512 * 2, validate_every=1)
    best = run(tmp_path / "best", chosen, validate=lambda _: next(scores)).package.provenance
    last = run(tmp_path / "last", tiny_options(budget_steps=512 * 3)).package.provenance
    assert (best["update"], best["environment_steps"]) == (1, 512)
    assert (last["update"], last["environment_steps"]) == (3, 512 * 3)


def test_failing_warm_up_gate_stops_before_the_policy_gradient(tmp_path):
    options = tiny_options(warm_up=tiny_warm_up(), gates=GateOptions(critic_mae_warn=0.01, warm_up_breaks=True))
    result = run(tmp_path, options, expert=TinyExpert())
    assert (result.reason, result.updates) == ("gate", 0)
    assert "gate 2: critic mean absolute error" in result.explanation


def test_breaker_needs_consecutive_complaints():
    breaker = Breaker(GateOptions(entropy_stop=0.1, breaker_patience=2))
    bad, good = ({"losses/entropy": value, "losses/value_loss": 0.0} for value in (0.01, 0.5))
    assert [breaker.observe(losses) is None for losses in (bad, good, bad, bad)] == [True, True, True, False]


def test_plateau_warns():
    losses = {"losses/entropy": 1.0, "losses/advantage_mean": 0.0}
    rising = training_gate(losses, [(1, 0.1), (2, 0.2), (3, 0.3)], GateOptions())
    flat = training_gate(losses, [(1, 0.1), (2, 0.3), (3, 0.3)], GateOptions())
    assert [figures[-1].status for figures in (rising, flat)] == ["pass", "warn"]


def test_warm_up_gate_has_three_verdicts(tmp_path):
    figures = run(tmp_path, tiny_options(warm_up=tiny_warm_up(), budget_steps=1), expert=TinyExpert()).warm_up
    gate = warm_up_gate(
        figures, GateOptions(actor_loss=10, critic_mae=1e-9, critic_mae_warn=10, gradient_norm_warn=1e-9)
    )
    assert [figure.status for figure in gate] == ["pass", "warn", "warn"]


def test_starts_from_a_parent(tmp_path):
    parent = run(tmp_path / "parent", tiny_options(budget_steps=512)).package
    child = run(
        tmp_path / "child", tiny_options(budget_steps=1), initial=parent, parent=parent.digest, stop=lambda: True
    )
    assert child.package.digest == parent.digest
    assert child.package.provenance["parent"] == parent.digest
    with pytest.raises(LearningError, match="another network"):
        run(tmp_path / "other", tiny_options(network=NetworkOptions(hidden=(4, 4))), initial=parent)


TERMINATE = """
import os, signal, sys
from pathlib import Path
from agentpipe_tests.learning.test_trainer import *
def tell(stage, done, total, note=""):
    if stage == "training" and done >= 1024:
        os.kill(os.getpid(), signal.SIGTERM)
run(Path(sys.argv[1]), tiny_options(budget_steps=10**7), progress=tell)
"""


def test_sigterm_ends_the_run_with_a_checkpoint(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", TERMINATE, str(tmp_path)], capture_output=True, timeout=300, check=False
    )
    assert done.returncode == -signal.SIGTERM
    last = checkpoints.latest(tmp_path / "checkpoints")
    assert checkpoints.load(last).content["update"] == 2
    assert PolicyPackage.load(tmp_path / "package").observation_names == NAMES


def test_handlers_are_back_after_a_run(tmp_path):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    run(tmp_path, tiny_options(budget_steps=1))
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("linear", [1.0, 0.55, 0.1]), ("cosine", [1.0, 0.55, 0.1]), ("constant", [1.0, 1.0, 1.0])],
)
def test_learning_rate_schedules(schedule, expected):
    assert [share_at(schedule, done, 0.1) for done in (0.0, 0.5, 1.0)] == pytest.approx(expected)
    assert share_at("cosine", 0.25, 0.0) == pytest.approx((1 + np.sqrt(0.5)) / 2)


def test_learning_rate_follows_the_budget(tmp_path):
    rows = run(tmp_path, tiny_options(budget_steps=1_024)).update_log
    assert [row["charts/learning_rate"] for row in rows] == pytest.approx([3e-3, 3e-3 * (1 - 0.95 * 0.5)])


def test_settings_become_options():
    options = training_options(Settings(seed=5, threads=3))
    assert (options.seed, options.threads) == (5, 3)
    assert options.ppo.clip == (0.15, 0.08, 0.25, 0.12)
    assert options.digest() == training_options(Settings(seed=5, threads=3)).digest()
    assert training_options(Settings(training={"warmup_episodes": 0})).warm_up is None


def test_heavy_imports_stay_out_of_the_light_modules():
    code = (
        "import sys, agentpipe.learning.options, agentpipe.learning.succession.champion, agentpipe.learning.gates,"
        "agentpipe.learning.policy.normalisation; assert 'torch' not in sys.modules"
    )
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300, env=environment)


def test_tiny_pool_snapshot_restores_its_future():
    pool = TinyPool(8)
    snapshot = pool.snapshot()
    draws = [pool.generator.random() for _ in range(3)]
    pool.restore(snapshot)
    assert [pool.generator.random() for _ in range(3)] == draws


@pytest.mark.parametrize(("terminating", "expected"), [(False, 10.0), (True, 1 + 0.9 + 0.81 + 0.729)])
def test_critic_learns_one_over_one_minus_gamma_across_truncations(tmp_path, terminating, expected):
    """Reward 1 for ever, cut every four steps: a first step is worth 1/(1 - 0.9). Negative control: cuts that are
    told as terminations give the wrong number, the sum of four rewards."""

    class Endless(TinyPool):
        def step(self, actions):
            super().step(actions)
            for name in ("observation", "mask", "last_action", "time"):  # the cut is not to be seen
                getattr(self, f"final_{name}")[:] = getattr(self, name)
            if terminating:
                self.terminated[:], self.truncated[:] = self.truncated, False

    options = tiny_options(budget_steps=512 * 150, ppo={"schedule": "constant", "entropy_weight": 0.2})
    pool = Endless(truncating=True)
    result = run(tmp_path, options, pool=pool)
    assert result.reason == "budget"
    pool.reset()
    value = result.package.act(pool.observation, pool.last_action, pool.time, pool.mask).value.mean()
    assert value * result.update_log[-1]["rewards/deviation"] == pytest.approx(expected, rel=0.12)


@pytest.mark.parametrize(
    "changes",
    [
        {"learning_rate": 0.0},
        {"learning_rate": float("nan")},
        {"learning_rate": -1.0},
        {"minibatch": 0},
        {"episodes": -1},
        {"answer_weight": -1.0},
        {"answer_weight": float("inf")},
    ],
)
def test_a_warm_up_that_could_not_learn_is_refused(changes):
    with pytest.raises(SettingsError):
        WarmUpOptions(**changes)


@pytest.mark.parametrize("score", [float("nan"), float("inf"), np.float32("nan")])
def test_a_validation_score_that_is_not_finite_ends_the_run(tmp_path, score):
    with pytest.raises(NonFiniteError, match="validation score"):
        run(tmp_path, validate=lambda _: score)


@pytest.mark.parametrize("score", [None, "0.5", [0.5], 1j])
def test_a_validation_score_that_is_no_number_ends_the_run(tmp_path, score):
    with pytest.raises(LearningError, match="no number"):
        run(tmp_path, validate=lambda _: score)


@pytest.mark.parametrize("score", [1, 0.5, np.float32(0.5), np.int64(1)])
def test_a_validation_score_is_any_number(tmp_path, score):
    assert run(tmp_path, tiny_options(budget_steps=512), validate=lambda _: score).best_validation == float(score)


def test_weights_whose_actions_have_other_names_are_refused(tmp_path):
    first = run(tmp_path / "a", tiny_options(budget_steps=1_024))
    with pytest.raises(LearningError, match="names other actions"):
        run(tmp_path / "b", initial=first.package, action_names=ACTION_NAMES[::-1])


def test_events_that_cannot_be_written_are_a_typed_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(HomeError):
        Events(tmp_path / "file")
    with pytest.raises(HomeError):
        Events(tmp_path / "file" / "below")
