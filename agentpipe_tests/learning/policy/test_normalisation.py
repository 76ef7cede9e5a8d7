"""Observation statistics keep their digits, survive storage, and refuse damage."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentpipe.errors import CheckpointError, LearningError, NonFiniteError
from agentpipe.learning.policy.normalisation import ObservationStatistics, gather_statistics
from agentpipe_tests.learning.tiny import NAMES, TinyExpert, TinyPool


def of(*batches, width=1):
    statistics = ObservationStatistics.empty([f"x{i}" for i in range(width)])
    for batch in batches:
        statistics.update(np.asarray(batch))
    return statistics


def test_large_offset_keeps_its_variance():
    """1e4 + {0, 1, 2} in float32: the naive sum of squares in float32 gives anything but 2/3."""
    values = np.float32(1e4) + np.array([[0], [1], [2]], np.float32)
    statistics = of(*[values] * 1_000)
    assert statistics.mean[0] == pytest.approx(10_001.0, abs=1e-9)
    assert statistics.variance[0] == pytest.approx(2 / 3, abs=1e-9)


def test_constant_column_is_neither_blown_up_nor_nan():
    statistics = of(np.full((100, 1), 0.1, np.float32), np.full((50, 1), 0.1, np.float32))
    assert statistics.variance[0] == pytest.approx(0.0, abs=1e-15)
    assert statistics.scale.tolist() == [1.0]
    assert of(np.full((7, 1), 1e8, np.float32)).scale.tolist() == [1.0]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=8), min_size=1, max_size=6))
def test_batches_merge_to_the_statistics_of_all(batches):
    statistics = of(*[np.array(batch)[:, None] for batch in batches])
    together = np.concatenate([np.array(batch) for batch in batches])
    assert statistics.count == len(together)
    assert statistics.mean[0] == pytest.approx(together.mean(), rel=1e-9, abs=1e-6)
    assert statistics.variance[0] == pytest.approx(together.var(), rel=1e-6, abs=1e-3)


def test_nothing_seen_changes_nothing():
    statistics = ObservationStatistics.empty(["a", "b"])
    assert statistics.scale.tolist() == [1.0, 1.0]
    assert statistics.mean.tolist() == [0.0, 0.0]
    statistics.update(np.zeros((0, 2), np.float32))
    assert statistics.count == 0


def test_first_nan_is_named_and_nothing_is_added():
    statistics = of([[1.0, 2.0]], width=2)
    with pytest.raises(NonFiniteError) as caught:
        statistics.update(np.array([[0.0, 0.0], [0.0, np.nan]]))
    assert caught.value.where == {"environment": 1, "field": "x1"}
    assert statistics.count == 1


def test_wrong_width_is_refused():
    with pytest.raises(LearningError, match="expected"):
        of([[1.0, 2.0]], width=3)


def test_saved_statistics_load_equal(tmp_path):
    statistics = of(np.random.default_rng(0).normal(size=(9, 3)), width=3)
    statistics.save(tmp_path / "statistics")
    loaded = ObservationStatistics.load(tmp_path / "statistics")
    assert loaded.digest() == statistics.digest()
    assert loaded.mean.tolist() == statistics.mean.tolist()
    assert loaded.names == statistics.names


def test_flipped_byte_is_found(tmp_path):
    of([[1.0]]).save(tmp_path / "statistics")
    file = tmp_path / "statistics" / "statistics.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match="digest"):
        ObservationStatistics.load(tmp_path / "statistics")


def test_gathering_is_reproducible():
    def gather():
        return gather_statistics(TinyPool(size=32, seed=3), TinyExpert(), 50, names=NAMES)

    assert gather().digest() == gather().digest()
    assert gather().count == 32 * 50


def test_random_share_is_spread_evenly_over_the_pool():
    actions = []

    class Watched(TinyPool):
        def step(self, chosen):
            actions.append(chosen % 3 == self.target)
            super().step(chosen)

    gather_statistics(Watched(size=300, seed=3), TinyExpert(), 20, names=NAMES, random_share=0.5)
    right = np.mean(actions, axis=0)
    assert (right[0::2] == 1.0).all()
    assert right[1::2].mean() == pytest.approx(1 / 3, abs=0.05)
