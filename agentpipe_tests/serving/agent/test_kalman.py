"""The estimate of a lost reading against the filter's own recursion, sample by sample."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentpipe.environments.line_profile import default_profile
from agentpipe.serving.agent.kalman import ReadingModel, effective_samples, estimate

NONE = np.zeros(2)


def recursion(model, samples):
    """Kalman's own: predict (nothing moves), then correct by one sample of one channel at a time."""
    x, P = np.zeros(len(model.noise)), model.covariance.copy()
    for channel, value in samples:
        K = P[:, channel] / (P[channel, channel] + model.noise[channel])
        x = x + K * (value - x[channel])
        P = P - np.outer(K, P[channel])
    return x, P


def test_one_reading_alone_is_weighed_against_its_prior():
    """Prior variance 1, noise 0.5: two samples of mean 3 give 3·4/5 and variance 1/5."""
    model = ReadingModel(np.eye(2), np.array([0.5, 0.5]))
    found = estimate(model, np.array([2.0, 0.0]), np.array([3.0, 0.0]), NONE)
    assert found.value.tolist() == pytest.approx([2.4, 0.0])
    assert found.variance.tolist() == pytest.approx([0.2, 1.0])
    assert effective_samples(model, found.variance).tolist() == pytest.approx([2.5, 0.5])


def test_a_reading_that_is_lost_is_told_by_the_one_it_moves_with():
    """Correlation 0.8: what the other one knows exactly, times 0.8; 0.36 of the variance stays."""
    model = ReadingModel(np.array([[1.0, 0.8], [0.8, 1.0]]), np.array([0.5, 0.5]))
    found = estimate(model, np.array([0.0, 1e9]), np.array([0.0, 2.0]), NONE)
    assert found.value.tolist() == pytest.approx([1.6, 2.0])
    assert found.variance[0] == pytest.approx(0.36)


def test_the_variance_of_a_lost_reading_grows_by_what_it_may_have_wandered():
    model = ReadingModel(np.eye(2), np.array([0.5, 0.5]))
    variances = [
        estimate(model, np.array([1e9, 1.0]), np.zeros(2), np.array([growth, 0.0])).variance[0]
        for growth in (0.0, 1.0, 1e9)
    ]
    assert variances[0] == pytest.approx(0.0, abs=1e-6)
    assert variances[1] == pytest.approx(1 / (1 / 2.0 + 1 / 1.0))  # prior 1 + 1 wandered, sample 0 + 1 wandered
    assert variances[2] > 1e8


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.floats(-5, 5)), max_size=30))
def test_the_closed_form_is_the_recursion(samples):
    model = ReadingModel.of(default_profile())
    counts = np.array([sum(channel == c for channel, _ in samples) for c in range(5)], float)
    means = np.array([sum(value for channel, value in samples if channel == c) for c in range(5)])
    found = estimate(model, counts, means / np.maximum(counts, 1), np.zeros(5))
    x, P = recursion(model, samples)
    np.testing.assert_allclose(found.value, x, atol=1e-8)
    np.testing.assert_allclose(found.variance, np.diag(P), atol=1e-8)


def test_the_model_of_the_project_s_line_is_a_covariance():
    model = ReadingModel.of(default_profile())
    assert np.linalg.eigvalsh(model.covariance)[0] > 0.01
    assert ((model.noise > 0.3) & (model.noise < 0.5)).all()
