"""Digests tell that a checkpoint is what somebody wrote, not that this program did: content is held to its kind."""

import shutil

import numpy as np
import pytest

from agentpipe.errors import CheckpointError
from agentpipe.learning import checkpoint as checkpoints
from agentpipe.learning.aids.options import AidOptions
from agentpipe.learning.options import StreamOptions
from agentpipe.learning.tensors import adam_slots
from agentpipe_tests.learning.test_trainer import run
from agentpipe_tests.learning.tiny import tiny_options

AIDS = AidOptions(distillation="always", curiosity="always", dynamic_lambda="always", layer_rates="always")
OPTIONS = tiny_options(aids=AIDS, budget_steps=1_024, stream=StreamOptions())


@pytest.fixture(scope="module")
def broken_off(tmp_path_factory):
    folder, asked = tmp_path_factory.mktemp("whole"), iter([False, True])
    return folder, run(folder, OPTIONS, stop=lambda: next(asked)).checkpoint


def resumed(broken_off, tmp_path, change):
    """Goes on from a copy of the checkpoint whose content is another one, under good digests."""
    whole, found = broken_off
    folder = tmp_path / "copy"
    shutil.copytree(whole, folder)
    forged = checkpoints.load(folder / found.relative_to(whole))
    change(forged)
    return run(folder, OPTIONS, resume=checkpoints.save(forged, folder / "checkpoints"))


@pytest.mark.parametrize(
    "key",
    [
        "environment_steps", "looks", "validations", "streaks", "best_update", "stopped", "uniforms", "aids",
        "options_digest",
    ],
)  # fmt: skip
@pytest.mark.parametrize("value", [None, {"x": "y"}, -1])
def test_content_of_another_kind_is_refused(broken_off, tmp_path, key, value):
    with pytest.raises(CheckpointError) as caught:
        resumed(broken_off, tmp_path, lambda forged: forged.content.__setitem__(key, value))
    assert caught.value.where
    assert caught.value.remedy


@pytest.mark.parametrize("key", ["environment_steps", "aids", "options_digest", "warm_up"])
def test_what_is_missing_is_refused(broken_off, tmp_path, key):
    with pytest.raises(CheckpointError):
        resumed(broken_off, tmp_path, lambda forged: forged.content.pop(key))


ARRAYS = [
    ("optimiser", "first.bias/exp_avg"),
    ("optimiser", "first.bias/step"),
    ("network", "first.bias"),
    ("good", "first.bias"),
    ("rewards", "running"),
    ("random", "order"),
    ("aids", "curiosity/counts"),
    ("aids", "difficulty/success"),
]


@pytest.mark.parametrize(("group", "name"), ARRAYS)
def test_an_array_of_another_shape_is_refused(broken_off, tmp_path, group, name):
    """Compiled code and fused operations would read and write beyond it."""

    def change(forged):
        forged.arrays[group][name] = np.zeros(3, forged.arrays[group][name].dtype)

    with pytest.raises(CheckpointError):
        resumed(broken_off, tmp_path, change)


@pytest.mark.parametrize(("group", "name"), ARRAYS[:4])
def test_an_array_of_another_dtype_is_refused(broken_off, tmp_path, group, name):
    def change(forged):
        forged.arrays[group][name] = forged.arrays[group][name].astype(np.uint8)

    with pytest.raises(CheckpointError, match="uint8"):
        resumed(broken_off, tmp_path, change)


def test_moments_that_are_not_finite_are_refused(broken_off, tmp_path):
    with pytest.raises(CheckpointError, match="not finite"):
        resumed(broken_off, tmp_path, lambda forged: forged.arrays["rewards"]["moments"].fill(np.nan))


def test_slots_of_an_optimiser_are_all_there_or_none(tmp_path):
    shapes = {"a": (2, 3), "b": (4,)}
    one = {"a/step": np.float32(1), "a/exp_avg": np.zeros((2, 3), np.float32)}
    whole = {**one, "a/exp_avg_sq": np.ones((2, 3), np.float32)}
    whole = {name: np.asarray(array) for name, array in whole.items()}
    found = adam_slots(shapes, whole, tmp_path)
    assert set(found) == {0}
    assert set(found[0]) == {"step", "exp_avg", "exp_avg_sq"}
    assert adam_slots(shapes, {}, tmp_path) == {}
    for wrong in (
        one,
        {**whole, "a/more": np.zeros(1, np.float32)},
        {**whole, "a/exp_avg": np.zeros((2, 3))},
        {**whole, "a/exp_avg": np.zeros((3, 2), np.float32)},
        {**whole, "a/step": np.zeros(1, np.float32)},
    ):
        with pytest.raises(CheckpointError, match="optimiser state"):
            adam_slots(shapes, {name: np.asarray(array) for name, array in wrong.items()}, tmp_path)
