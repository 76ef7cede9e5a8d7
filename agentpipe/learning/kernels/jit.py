"""The decorators of the network's compiled code; machine code is cached where the simulator's is.

Products may be fused with the addition behind them (one rounding less) and the sign of a zero does not count; nothing
else is assumed, NaN and infinity go through.
"""

from __future__ import annotations

from typing import Any, Final

from numba import njit

from agentpipe.environments import jit  # noqa: F401 - says where the cache is

_OPTIONS: Final[Any] = {"cache": True, "error_model": "numpy", "fastmath": {"contract", "nsz"}}

inlined: Any = njit(forceinline=True, **_OPTIONS)
"""inlined by LLVM into the loops that call it, so that they can be vectorised"""
compiled: Any = njit(**_OPTIONS)
"""called by other compiled code"""
entry: Any = njit(nogil=True, **_OPTIONS)
"""called from Python threads, without the interpreter lock"""
