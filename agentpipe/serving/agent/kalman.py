r"""What a lost sensor would read: a Kalman filter over the five readings of one machine.

During one order a machine's true readings ``x`` are constant; a received sample of channel ``c`` is ``z = x_c + v``
with ``v ~ N(0, r_c)``. A lost channel's true value may wander on unseen, a random walk that adds ``q·t`` to its
variance ``t`` after the loss. With prior ``x ~ N(0, P₀)`` and ``n_c`` accepted samples of mean ``z̄_c``, the filter's
recursion (Kalman, "A New Approach to Linear Filtering and Prediction Problems", 1960) has the closed form of the
information filter (Bar-Shalom, Li and Kirubarajan, "Estimation with Applications to Tracking and Navigation", 2001,
chapter 7)::

    P⁻¹ = (P₀ + G)⁻¹ + diag(1 / (r_c / n_c + g_c))      x̂ = P · diag(1 / (r_c / n_c + g_c)) · z̄

where ``g_c = q·t`` for lost channels, zero for others, and ``G = diag(g)``. ``P₀`` holds how channels move together
under the line's faults, so a lost channel is also told by those of its machine that are left. All in healthy standard
deviations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from agentpipe.environments.physics import (
    AMPLITUDE_LOW,
    AMPLITUDE_RISE,
    OPERATING_SCATTER,
    PROCESS_NOISE,
    TYPE_NOISE,
)

if TYPE_CHECKING:
    from agentpipe.environments.line_profile import LineProfile

Vector = npt.NDArray[np.float64]
Matrix = npt.NDArray[np.float64]

FAULT_SHARE: Final = 0.3
"""of orders in which one given machine shows a fault, its own or a neighbour's"""


@dataclass(frozen=True)
class ReadingModel:
    """``covariance`` f64[C, C] of a machine's true readings in an order (P₀), ``noise`` f64[C] of one sample (r)."""

    covariance: Matrix
    noise: Vector

    @classmethod
    def of(cls, profile: LineProfile) -> ReadingModel:
        """The model of a line: the scatter of healthy machines and, in a share of orders, a fault's signature."""
        share = 1.0 - sum(profile.structural_prevalence.values())
        amplitude = AMPLITUDE_LOW + 0.5 * AMPLITUDE_RISE
        faults = sum(
            mode.prevalence * amplitude**2 * (np.outer(mode.shift, mode.shift) + mode.covariance)
            for mode in profile.modes
        )
        covariance = OPERATING_SCATTER**2 * profile.healthy_covariance + FAULT_SHARE / max(share, 1e-9) * faults
        noise = PROCESS_NOISE**2 * np.diag(profile.healthy_covariance) + (TYPE_NOISE.astype(np.float64) ** 2).mean(0)
        return cls(np.asarray(covariance, np.float64), noise)


@dataclass(frozen=True)
class Estimate:
    """``value`` f64[C] and ``variance`` f64[C] of a machine's readings."""

    value: Vector
    variance: Vector


def estimate(model: ReadingModel, samples: Vector, means: Vector, growth: Vector) -> Estimate:
    """The readings of one machine.

    Args:
        model: prior and noise.
        samples: f64[C], accepted samples of each channel, 0 or more.
        means: f64[C], their means; anything finite where there are none.
        growth: f64[C], the variance that a lost channel has gained since it was lost; 0 for the others.
    """
    heard = samples > 0
    gain = np.where(heard, 1.0 / (model.noise / np.where(heard, samples, 1.0) + growth), 0.0)
    covariance = np.linalg.inv(np.linalg.inv(model.covariance + np.diag(growth)) + np.diag(gain))
    return Estimate(covariance @ (gain * means), np.diag(covariance).copy())


def effective_samples(model: ReadingModel, variance: Vector) -> Vector:
    """f64[C]: how many samples would know as much: noise over variance."""
    return model.noise / variance
