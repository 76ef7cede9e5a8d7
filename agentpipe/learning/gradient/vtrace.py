"""V-trace: values and advantages of the current policy from episodes that another policy played.

Notation of Espeholt et al. (2018, "IMPALA"), section 4.1. For the steps s of one recorded episode, with the behaviour
mu that played it, the current policy pi and the critic V,

    rho_s     = min(rho_bar, pi(a_s|x_s) / mu(a_s|x_s))
    c_s       = min(c_bar, pi(a_s|x_s) / mu(a_s|x_s))
    delta_s V = rho_s (r_s + gamma V(x_s+1) - V(x_s))
    v_s       = V(x_s) + sum over t >= s of gamma^(t-s) (c_s ... c_t-1) delta_t V        (eq. 1, to the episode's end)
              = V(x_s) + delta_s V + gamma c_s (v_s+1 - V(x_s+1))                        (remark 1, computed backwards)
    A_s       = r_s + gamma v_s+1 - V(x_s)                                               (of the policy gradient, eq. 4)

Behind the last step stands v = V = 0 where the episode terminated and V of its final observation where it was cut.
rho_bar decides which policy the values belong to (pi for infinity, between mu and pi else), c_bar how far a later
surprise reaches back. The policy gradient is rho_s A_s grad log pi(a_s|x_s): rho is returned, not multiplied in.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from agentpipe.environments.jit import entry
from agentpipe.errors import LearningError
from agentpipe.learning.kernels.segmented import LOG_RATIO_LIMIT

Floats = npt.NDArray[np.float32]
Positions = npt.NDArray[np.int64]


class Targets(NamedTuple):
    """What V-trace says of M recorded steps."""

    value: Floats
    """f32[M], v_s: what the critic shall say"""
    advantage: Floats
    """f32[M], A_s, without rho_s"""
    rho: Floats
    """f32[M], the clipped ratio rho_s"""
    clipped: int
    """steps whose ratio was above rho_bar"""


def vtrace(  # noqa: PLR0913 - as many symbols as the equations have
    r_s: Floats,
    v_s: Floats,
    log_ratio_s: Floats,
    first: Positions,
    length: Positions,
    v_final: Floats,
    discount: float,
    *,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
) -> Targets:
    """V-trace targets of n episodes whose steps lie one after another, M in total.

    Args:
        r_s: f32[M] rewards.
        v_s: f32[M] values V(x_s) under the current critic.
        log_ratio_s: f32[M], log pi(a_s|x_s) - log mu(a_s|x_s); clamped to ±:data:`LOG_RATIO_LIMIT` before the
            exponential.
        first: i64[n], first step of each episode; the rest of the episode follows it.
        length: i64[n] steps of each episode, at least one.
        v_final: f32[n], 0 where the episode terminated, V of its final observation where it was cut.
        discount: gamma.
        rho_bar: clips the ratio in delta and in the policy gradient.
        c_bar: clips the ratio in the trace.

    Raises:
        LearningError: shapes or types do not fit, or an episode reaches beyond the steps.
    """
    floats = {"r_s": (r_s, r_s.shape), "v_s": (v_s, r_s.shape), "log_ratio_s": (log_ratio_s, r_s.shape)}
    floats["v_final"] = (v_final, first.shape)
    whole = {"first": (first, first.shape), "length": (length, first.shape)}
    for kind, arrays in (("float32", floats), ("int64", whole)):
        for name, (array, expected) in arrays.items():
            if array.shape != expected or array.dtype != kind or array.ndim != 1:
                text = f"{name} is {array.dtype}{array.shape}, expected {kind}{expected} of rank 1"
                raise LearningError(text, field=name)
    if len(first) and (first.min() < 0 or length.min() < 1 or (first + length).max() > len(r_s)):
        raise LearningError(f"an episode reaches beyond the {len(r_s)} steps", field="length")
    value, advantage, rho = np.zeros_like(r_s), np.zeros_like(r_s), np.zeros_like(r_s)
    limits = (np.float32(discount), np.float32(rho_bar), np.float32(c_bar))
    clipped = _targets(r_s, v_s, log_ratio_s, first, length, v_final, *limits, value, advantage, rho)
    return Targets(value, advantage, rho, int(clipped))


@entry
def _targets(  # type: ignore[no-untyped-def]  # noqa: ANN202, PLR0913, PLR0917 - a kernel
    r_s,  # noqa: ANN001
    v_s,  # noqa: ANN001
    log_ratio_s,  # noqa: ANN001
    first,  # noqa: ANN001
    length,  # noqa: ANN001
    v_final,  # noqa: ANN001
    discount,  # noqa: ANN001
    rho_bar,  # noqa: ANN001
    c_bar,  # noqa: ANN001
    value,  # noqa: ANN001
    advantage,  # noqa: ANN001
    rho,  # noqa: ANN001
):
    limit = np.float32(LOG_RATIO_LIMIT)
    clipped = 0
    for e in range(len(first)):
        critic_next = v_final[e]  # V(x_s+1)
        target_next = v_final[e]  # v_s+1
        for back in range(length[e]):
            s = first[e] + length[e] - 1 - back
            ratio = np.float32(math.exp(min(max(log_ratio_s[s], -limit), limit)))
            clipped += ratio > rho_bar
            rho[s] = min(rho_bar, ratio)
            advantage[s] = r_s[s] + discount * target_next - v_s[s]
            delta = rho[s] * (r_s[s] + discount * critic_next - v_s[s])
            value[s] = v_s[s] + delta + discount * min(c_bar, ratio) * (target_next - critic_next)
            critic_next, target_next = v_s[s], value[s]
    return clipped
