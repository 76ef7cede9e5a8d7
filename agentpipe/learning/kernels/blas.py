"""Matrix products in compiled code, by the BLAS that scipy brings along (``sgemm``; Dongarra et al., 1990).

The routine is looked up under a name of its own, so that compiled code which calls it can be cached: an address is of
one process only.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple, Self

import numpy as np
from llvmlite import binding  # type: ignore[import-untyped]
from numba import types
from numba.extending import get_cython_function_address

from agentpipe.learning.kernels.jit import compiled

_NAME: Final = "agentpipe_sgemm"
binding.add_symbol(_NAME, get_cython_function_address("scipy.linalg.cython_blas", "sgemm"))
_sgemm: Any = types.ExternalFunction(_NAME, types.void(*([types.intp] * 13)))
_PLAIN, _TURNED = ord("N"), ord("T")
_NOTHING, _ONE = np.float32(0.0), np.float32(1.0)


class Call(NamedTuple):
    """Room for the arguments of one ``sgemm``, which takes addresses only; each thread has its own."""

    sizes: Any
    """i32[6]"""
    factors: Any
    """f32[2]"""
    letters: Any
    """u8[2]"""

    @classmethod
    def allocate(cls) -> Self:
        """Room for one thread."""
        return cls(np.zeros(6, np.int32), np.zeros(2, np.float32), np.zeros(2, np.uint8))


@compiled
def multiply(
    call: Call,
    m: int,
    n: int,
    k: int,
    left: Any,
    left_turned: bool,
    right: Any,
    right_turned: bool,
    out: Any,
    add: bool,
) -> None:
    """``out[:m, :n] = left @ right``, or ``+=`` where ``add`` is true; matrices f32, row after row.

    ``left`` holds m x k, or k x m where it is turned; ``right`` k x n, or n x k. Rows may be longer than what the
    product looks at.
    """
    # BLAS counts column by column: it is asked for the transposed product, of the operands in reversed order.
    sizes, factors, letters = call.sizes, call.factors, call.letters
    sizes[0], sizes[1], sizes[2] = n, m, k
    sizes[3], sizes[4], sizes[5] = right.strides[0] // 4, left.strides[0] // 4, out.strides[0] // 4
    factors[0], factors[1] = _ONE, _ONE if add else _NOTHING
    letters[0], letters[1] = _TURNED if right_turned else _PLAIN, _TURNED if left_turned else _PLAIN
    s, f, c = sizes.ctypes.data, factors.ctypes.data, letters.ctypes.data
    a, b, o = right.ctypes.data, left.ctypes.data, out.ctypes.data
    _sgemm(c, c + 1, s, s + 4, s + 8, f, a, s + 12, b, s + 16, f + 4, o, s + 20)
