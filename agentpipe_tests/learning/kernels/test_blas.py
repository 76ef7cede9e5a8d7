"""Matrix products from compiled code, against numpy's in float64."""

import numpy as np
import pytest

from agentpipe.learning.kernels.blas import Call, multiply
from agentpipe.learning.kernels.jit import entry


@entry
def product(call, m, n, k, left, left_turned, right, right_turned, out, add):  # noqa: PLR0917 - as many as it has
    multiply(call, m, n, k, left, left_turned, right, right_turned, out, add)


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (5, 3, 7), (192, 64, 47), (3, 256, 192)])
@pytest.mark.parametrize("left_turned", [False, True])
@pytest.mark.parametrize("right_turned", [False, True])
@pytest.mark.parametrize("add", [False, True])
def test_product_equals_numpys(m, n, k, left_turned, right_turned, add):
    generator = np.random.default_rng(0)
    # Every matrix has rows that are longer than what is looked at.
    left = generator.normal(size=(k, m + 2) if left_turned else (m, k + 3)).astype(np.float32)
    right = generator.normal(size=(n, k + 1) if right_turned else (k, n + 4)).astype(np.float32)
    out = generator.normal(size=(m + 1, n + 5)).astype(np.float32)
    before = out.astype(np.float64)
    product(Call.allocate(), m, n, k, left, left_turned, right, right_turned, out, add)
    one = (left[:k, :m].T if left_turned else left[:m, :k]).astype(np.float64)
    other = (right[:n, :k].T if right_turned else right[:k, :n]).astype(np.float64)
    expected = before.copy()
    expected[:m, :n] = one @ other + (before[:m, :n] if add else 0.0)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(out[m:], before[m:])
    np.testing.assert_array_equal(out[:, n:], before[:, n:])
