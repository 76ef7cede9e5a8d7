"""Drawing from masked categorical distributions: one compiled pass, no intermediate arrays."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from agentpipe.environments.jit import entry


def sample_categorical(
    probabilities: npt.NDArray[np.float32], uniforms: npt.NDArray[np.float64]
) -> npt.NDArray[np.int64]:
    """Inverse of the cumulative distribution: the first action whose cumulated probability exceeds u times the total.

    Args:
        probabilities: f32[N, A]; need not sum to one exactly; actions of probability zero are never drawn.
        uniforms: f64[N] in [0, 1).

    Returns:
        i64[N]; -1 where all probabilities are zero.
    """
    chosen = np.empty(len(probabilities), np.int64)
    _invert(probabilities, uniforms, chosen)
    return chosen


@entry
def _invert(
    probabilities: npt.NDArray[np.float32], uniforms: npt.NDArray[np.float64], chosen: npt.NDArray[np.int64]
) -> None:
    rows, actions = probabilities.shape
    for row in range(rows):
        total = 0.0
        for action in range(actions):
            total += probabilities[row, action]
        threshold = uniforms[row] * total
        cumulated = 0.0
        pick = -1
        for action in range(actions):
            if probabilities[row, action] > 0.0:
                pick = action
                cumulated += probabilities[row, action]
                if cumulated > threshold:
                    break
        chosen[row] = pick
