"""Generalised advantage estimation over whole episodes, across truncation, termination and same-step auto-reset."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from agentpipe.environments.jit import entry
from agentpipe.errors import LearningError

Floats = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]


def generalised_advantages(  # noqa: PLR0913, PLR0917 - the terms of one recursion
    r_t: Floats,
    v_t: Floats,
    v_last: Floats,
    terminated_t: Flags,
    truncated_t: Flags,
    v_final_t: Floats,
    discount: float,
    lambda_: float,
    segment_t: npt.NDArray[np.int8] | None = None,
) -> tuple[Floats, Floats]:
    """Advantages and returns of T steps of N environments, time first.

    With d_t = terminated_t or truncated_t (Schulman et al., 2016, eqs. 11 and 16, cut at episode ends):

        v_tp1    = 0            where terminated_t (also when truncated_t is set: termination wins)
                 = v_final_t    where only truncated_t
                 = v_t at t+1   elsewhere (v_last at the end)
        delta_t  = r_t + discount * v_tp1 - v_t
        A_t      = delta_t + discount * lambda * (1 - d_t) * A_tp1

    The pool resets in the same step: where d_t, the next observation belongs to the next episode, and the value of the
    episode's own final observation is ``v_final_t``.

    Args:
        r_t: f32[T, N] rewards.
        v_t: f32[T, N] values of the observations acted on.
        v_last: f32[N] values of the observations after the last step.
        terminated_t: bool[T, N], the episode ended by itself.
        truncated_t: bool[T, N], the episode was cut off.
        v_final_t: f32[T, N] values of final observations; read only where truncated and not terminated.
        discount: gamma.
        lambda_: 0 = one-step, 1 = Monte Carlo.
        segment_t: i8[T, N]; where given, A_tp1 reaches back only within a segment: what a later segment earns is known
            to an earlier one by its value alone. Never used by default; it is what credit over the whole episode is
            held against.

    Returns:
        A_t f32[T, N], and the returns A_t + v_t f32[T, N] for the critic.

    Raises:
        LearningError: shapes or types do not fit.
    """
    shape = r_t.shape
    floats = {"r_t": (r_t, shape), "v_t": (v_t, shape), "v_final_t": (v_final_t, shape), "v_last": (v_last, shape[1:])}
    flags = {"terminated_t": (terminated_t, shape), "truncated_t": (truncated_t, shape)}
    for kind, arrays in (("float32", floats), ("bool", flags)):
        for name, (array, expected) in arrays.items():
            if array.shape != expected or array.dtype != kind or len(shape) != 2:
                raise LearningError(
                    f"{name} is {array.dtype}{array.shape}, expected {kind}{expected} of rank 2", field=name
                )
    advantages, returns = np.empty_like(r_t), np.empty_like(r_t)
    constants = (np.float32(discount), np.float32(discount * lambda_))
    cut_t = np.zeros((0, 0), np.bool_) if segment_t is None else _borders(segment_t)
    _recursion(r_t, v_t, v_last, terminated_t, truncated_t, v_final_t, cut_t, *constants, advantages, returns)
    return advantages, returns


def _borders(segment_t: npt.NDArray[np.int8]) -> Flags:
    """bool[T, N]: the next step is of another segment; false in the last row."""
    cut_t = np.zeros(segment_t.shape, np.bool_)
    cut_t[:-1] = segment_t[1:] != segment_t[:-1]
    return cut_t


@entry
def _recursion(  # type: ignore[no-untyped-def]  # noqa: ANN202, PLR0913, PLR0917 - a kernel
    r_t,  # noqa: ANN001
    v_t,  # noqa: ANN001
    v_last,  # noqa: ANN001
    terminated_t,  # noqa: ANN001
    truncated_t,  # noqa: ANN001
    v_final_t,  # noqa: ANN001
    cut_t,  # noqa: ANN001
    discount,  # noqa: ANN001
    decay,  # noqa: ANN001
    advantages,  # noqa: ANN001
    returns,  # noqa: ANN001
):
    zero = np.float32(0.0)
    steps, size = r_t.shape
    for back in range(steps):
        t = steps - 1 - back
        for n in range(size):
            done = terminated_t[t, n] or truncated_t[t, n]
            v_tp1 = v_last[n] if back == 0 else v_t[t + 1, n]
            a_tp1 = zero if back == 0 or done else advantages[t + 1, n]
            if cut_t.size > 0 and cut_t[t, n]:
                a_tp1 = zero
            if done:
                v_tp1 = zero if terminated_t[t, n] else v_final_t[t, n]
            a_t = r_t[t, n] + discount * v_tp1 - v_t[t, n] + decay * a_tp1
            advantages[t, n] = a_t
            returns[t, n] = a_t + v_t[t, n]


def segment_scale(
    a_t: Floats, segment_t: npt.NDArray[np.int8], segments: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Mean f64[S] of the advantages of each segment, and one over their standard deviation f64[S].

    A segment with fewer than two samples has no scale of its own: it takes mean and deviation of all samples.
    Where the deviation is zero the scale is zero. Never NaN, whatever the counts.
    """
    values = a_t.astype(np.float64)
    count = np.bincount(segment_t, minlength=segments)
    mean, deviation = segment_moments(values, segment_t, count)
    if values.size:
        few = count < 2
        mean[few], deviation[few] = values.mean(), values.std()
    return mean, np.where(deviation > 1e-8, 1.0 / np.maximum(deviation, 1e-8), 0.0)


def segment_moments(
    values: npt.NDArray[np.float64], segment_t: npt.NDArray[np.int8], count: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Mean and population standard deviation f64[S] of each segment; zero where ``count`` is zero."""
    safe = np.maximum(count, 1)
    mean = np.bincount(segment_t, values, len(count)) / safe
    centred = values - mean[segment_t]
    return mean, np.sqrt(np.bincount(segment_t, centred * centred, len(count)) / safe)


def explained_variance(v_t: Floats, return_t: Floats) -> float:
    """1 - Var(returns - values) / Var(returns); 0 when the returns do not vary."""
    variance = float(np.var(return_t, dtype=np.float64))
    if variance < 1e-12:
        return 0.0
    return 1.0 - float(np.var(return_t - v_t, dtype=np.float64)) / variance
