"""exp, log and tanh of float32 as a few products: whole vectors of them at once, unlike the library's.

Coefficients of exp and log are those of Cephes (Moshier, ``expf`` and ``logf``), those of tanh the rational function of
Eigen. The tests hold them against the library's: exp and log are off by at most 1e-7 (relative, or absolute below one),
tanh by 3e-7. NaN goes in and comes out.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from agentpipe.learning.kernels.jit import inlined

_F, _I = np.float32, np.int32
_LOWEST, _HIGHEST = _F(-87.3), _F(88.0)
_LOG2_E, _LN2_HIGH, _LN2_LOW = _F(1.44269504088896341), _F(0.693359375), _F(-2.12194440e-4)
_ROUND = _F(12_582_912.0)  # 1.5 * 2^23: a number added to it is rounded, and stands in the low bits of the sum
_SQRT_HALF = _F(0.707106781186547524)
_ONE_BITS, _HALF_BITS, _FRACTION = _I(0x3F800000), _I(0x3F000000), _I(0x007FFFFF)
_TANH_LIMIT = _F(7.90531110763549805)
E0, E1, E2 = _F(1.9875691500e-4), _F(1.3981999507e-3), _F(8.3334519073e-3)
E3, E4, E5 = _F(4.1665795894e-2), _F(1.6666665459e-1), _F(5.0000001201e-1)
L0, L1, L2 = _F(7.0376836292e-2), _F(-1.1514610310e-1), _F(1.1676998740e-1)
L3, L4, L5 = _F(-1.2420140846e-1), _F(1.4249322787e-1), _F(-1.6668057665e-1)
L6, L7, L8 = _F(2.0000714765e-1), _F(-2.4999993993e-1), _F(3.3333331174e-1)
A1, A3, A5, A7 = _F(4.89352455891786e-03), _F(6.37261928875436e-04), _F(1.48572235717979e-05), _F(5.12229709037114e-08)
A9, A11, A13 = _F(-8.60467152213735e-11), _F(2.00018790482477e-13), _F(-2.76076847742355e-16)
B0, B2, B4, B6 = _F(4.89352518554385e-03), _F(2.26843463243900e-03), _F(1.18534705686654e-04), _F(1.19825839466702e-06)


@inlined
def exp(x: Any) -> Any:
    """e^x; x is clamped to -87.3 and 88."""
    x = _LOWEST if x < _LOWEST else x
    x = _HIGHEST if x > _HIGHEST else x
    shifted = x * _LOG2_E + _ROUND
    n = shifted - _ROUND
    r = x - n * _LN2_HIGH - n * _LN2_LOW
    p = ((((E0 * r + E1) * r + E2) * r + E3) * r + E4) * r + E5
    power = _I(_I(_F(shifted).view(np.int32) << _I(23)) + _ONE_BITS)
    return (p * r * r + r + _F(1.0)) * _I(power).view(np.float32)


@inlined
def log(x: Any) -> Any:
    """Natural logarithm of a positive, finite x."""
    bits = _F(x).view(np.int32)
    m = _I((bits & _FRACTION) | _HALF_BITS).view(np.float32)
    small = m < _SQRT_HALF
    n = _F(_I((bits >> _I(23)) - _I(126))) - (_F(1.0) if small else _F(0.0))
    m = m + (m if small else _F(0.0)) - _F(1.0)
    y = (((((((L0 * m + L1) * m + L2) * m + L3) * m + L4) * m + L5) * m + L6) * m + L7) * m + L8
    y = y * m * m * m + n * _LN2_LOW - _F(0.5) * m * m
    return m + y + n * _LN2_HIGH + (x - x)  # x - x: nothing, but NaN for NaN


@inlined
def tanh(x: Any) -> Any:
    """(e^x - e^-x) / (e^x + e^-x)."""
    x = -_TANH_LIMIT if x < -_TANH_LIMIT else x
    x = _TANH_LIMIT if x > _TANH_LIMIT else x
    s = x * x
    p = (((((A13 * s + A11) * s + A9) * s + A7) * s + A5) * s + A3) * s + A1
    return x * p / (((B6 * s + B4) * s + B2) * s + B0)
