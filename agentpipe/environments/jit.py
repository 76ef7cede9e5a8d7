"""The two decorators of all compiled code, and where its machine code is cached.

A cached kernel is found by the digest of every source that it is made of: constants of other modules are frozen into
machine code, so a file time alone would run yesterday's physics.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import numba
from numba import njit

_KERNELS = Path(__file__).parents[1] / "learning" / "kernels"
_SOURCES = ("begin", "jit", "kernel", "layout", "orders", "parameters", "physics", "rng", "sense", "state", "tokens")


def cache_directory() -> Path:
    """``$AGENTPIPE_CACHE`` or ``~/.cache/agentpipe``, then ``numba`` and the digest of the kernels' sources."""
    digest = hashlib.sha256(numba.__version__.encode())
    own = [Path(__file__).with_name(f"{name}.py") for name in _SOURCES]
    for path in (*own, *sorted(_KERNELS.glob("*.py"))):
        digest.update(path.read_bytes())
    root = os.environ.get("AGENTPIPE_CACHE") or Path.home() / ".cache" / "agentpipe"
    return Path(root) / "numba" / digest.hexdigest()[:16]


def compiled_before() -> bool:
    """False where the kernels are still to be compiled, by the first simulation of these sources on this machine."""
    return any(cache_directory().rglob("*.nbc"))


numba.config.CACHE_DIR = str(cache_directory())  # type: ignore[attr-defined]

# Without numba's reference counting (no kernel allocates): its atomic operations cost more than the simulation itself.
# Inlined by LLVM, so that passing tuples of arrays is free.
inlined: Any = njit(cache=True, forceinline=True, _nrt=False, error_model="numpy")  # type: ignore[call-overload]
# Entry points, called from Python threads without the interpreter lock.
entry: Any = njit(cache=True, nogil=True, _nrt=False, error_model="numpy")  # type: ignore[call-overload]
