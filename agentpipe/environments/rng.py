"""Counter-based random numbers: every draw is a pure function of its key and counter.

A key is folded from (root seed, purpose, environment, episode); a draw adds the counter (step, channel) and mixes.
Nothing is stored between draws, so an episode can be replayed alone, on any thread, and a draw that is not used changes
no other. The mixer is the finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014), whose increment is the odd constant nearest to 2**64 / golden ratio.
"""

from __future__ import annotations

import hashlib
from typing import Final

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri

from agentpipe.environments.jit import inlined

CHANNELS_A_STEP: Final = 2048
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_M1: Final = np.uint64(0xBF58476D1CE4E5B9)
_M2: Final = np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31, _S11, _S32 = (np.uint64(shift) for shift in (30, 27, 31, 11, 32))
_LOW: Final = np.uint64(0xFFFFFFFF)

# Inverse normal distribution function on 4,096 equal cells, linear in between; the two outermost knots stand at
# half a cell from 0 and 1, so |z| <= 3.67.
_CELLS: Final = 4096
NORMAL_TABLE: Final[npt.NDArray[np.float32]] = ndtri(
    np.clip(np.arange(_CELLS + 1) / _CELLS, 0.5 / _CELLS, 1 - 0.5 / _CELLS)
).astype(np.float32)
_CELL_SHIFT: Final = np.uint64(20)
_CELL_MASK: Final = np.uint64((1 << 20) - 1)
_CELL_SCALE: Final = np.float32(1.0 / (1 << 20))


@inlined
def mix(x: np.uint64) -> np.uint64:
    """SplitMix64's finaliser: a bijection of 64-bit words."""
    x = (x ^ (x >> _S30)) * _M1
    x = (x ^ (x >> _S27)) * _M2
    return x ^ (x >> _S31)


@inlined
def fold(key: np.uint64, word: np.uint64) -> np.uint64:
    """A key made of ``key`` and one more ``word``."""
    return mix((key ^ mix(word + _GOLDEN)) + _GOLDEN)


@inlined
def bits(key: np.uint64, step: int, channel: int) -> np.uint64:
    """The 64 random bits at counter (``step``, ``channel``), ``channel`` below 2,048."""
    return mix(key + np.uint64(step * CHANNELS_A_STEP + channel + 1) * _GOLDEN)


@inlined
def uniform(word: np.uint64) -> float:
    """A float64 in [0, 1) from the upper 53 bits of ``word``."""
    return np.float64(word >> _S11) * (1.0 / 9007199254740992.0)


@inlined
def _normal32(word: np.uint64) -> np.float32:
    cell = np.int64(word >> _CELL_SHIFT)
    share = np.float32(np.int64(word & _CELL_MASK)) * _CELL_SCALE
    low = NORMAL_TABLE[cell]
    return low + (NORMAL_TABLE[cell + 1] - low) * share


@inlined
def normal_high(word: np.uint64) -> np.float32:
    """A standard normal float32 from the upper 32 bits of ``word``."""
    return _normal32(word >> _S32)


@inlined
def normal_low(word: np.uint64) -> np.float32:
    """A standard normal float32 from the lower 32 bits of ``word``, independent of :func:`normal_high`."""
    return _normal32(word & _LOW)


@inlined
def episode_key(root: np.uint64, environment: np.uint64, episode: int) -> np.uint64:
    """Key of one episode of one environment under ``root`` (see :func:`root_key`)."""
    return fold(fold(root, environment), np.uint64(episode))


def root_key(seed: int, purpose: int) -> np.uint64:
    """Key of all draws made for ``purpose`` under ``seed`` (0 <= seed < 2**63)."""
    return np.uint64(fold(np.uint64(seed), np.uint64(purpose)))


def stable_hash(text: str) -> np.uint64:
    """The first eight bytes of SHA-256 of ``text``, big-endian: equal in every process and on every machine."""
    return np.uint64(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big"))
