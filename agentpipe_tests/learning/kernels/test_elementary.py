"""Functions of one number, in float32, against the library's in float64."""

import numpy as np
import pytest

from agentpipe.learning.kernels import elementary
from agentpipe.learning.kernels.jit import entry


@entry
def exps(values, out):
    for i in range(len(values)):
        out[i] = elementary.exp(values[i])


@entry
def logs(values, out):
    for i in range(len(values)):
        out[i] = elementary.log(values[i])


@entry
def tanhs(values, out):
    for i in range(len(values)):
        out[i] = elementary.tanh(values[i])


def applied(function, values):
    out = np.empty(len(values), np.float32)
    function(np.asarray(values, np.float32), out)
    return out


def spread(low, high):
    return np.linspace(low, high, 200_001).astype(np.float32)


def test_exp_is_off_by_an_ulp_at_most():
    values = spread(-87.0, 87.0)
    exact = np.exp(values.astype(np.float64))
    assert np.abs(applied(exps, values) / exact - 1.0).max() < 1.2e-7


def test_exp_of_what_float32_cannot_hold_is_clamped():
    low, high = applied(exps, [-np.inf, np.inf])
    assert 0.0 < low < 1.3e-38
    assert 1e38 < high < np.inf
    assert applied(exps, [0.0])[0] == 1.0


def test_log_is_off_by_an_ulp_at_most():
    values = np.exp(np.linspace(-80.0, 80.0, 200_001)).astype(np.float32)
    exact = np.log(values.astype(np.float64))
    assert (np.abs(applied(logs, values) - exact) / np.maximum(np.abs(exact), 1.0)).max() < 1.2e-7
    assert applied(logs, [1.0])[0] == 0.0


def test_tanh_is_off_by_little():
    values = spread(-10.0, 10.0)
    assert np.abs(applied(tanhs, values) - np.tanh(values.astype(np.float64))).max() < 3e-7
    assert np.abs(applied(tanhs, values)).max() <= 1.0
    assert applied(tanhs, [0.0])[0] == 0.0


@pytest.mark.parametrize("function", [exps, logs, tanhs])
def test_nan_comes_out_as_nan(function):
    assert np.isnan(applied(function, [np.nan, 1.0])).tolist() == [True, False]
