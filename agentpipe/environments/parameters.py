"""The parameters of a disturbance: name, unit, permitted range and meaning (S4).

Names carry kind and unit. Readings are in healthy standard deviations ("SD") of their channel unless said otherwise.
"""

from __future__ import annotations

from typing import NamedTuple

KINDS = ("sensor", "network", "load")
INTENSITIES = (1, 2, 3, 4, 5)


class Parameter(NamedTuple):
    """One column of the disturbance table; ``low`` and ``high`` are both permitted."""

    name: str
    unit: str
    low: float
    high: float
    doc: str


PARAMETERS: tuple[Parameter, ...] = (
    Parameter("sensor_sigma", "SD", 0.0, 5.0, "Gaussian noise added to every reading"),
    Parameter("sensor_cycle_amplitude", "share", 0.0, 0.5, "gain ripple: reading × (1 + amplitude·sin(2πt/period))"),
    Parameter("sensor_cycle_period_s", "s", 1.0, 3600.0, "period of the gain ripple"),
    Parameter(
        "sensor_step_amplitude", "share", 0.0, 0.5, "gain step: reading × (1 + amplitude·Bernoulli(probability))"
    ),
    Parameter("sensor_step_probability", "per reading", 0.0, 1.0, "chance of the gain step"),
    Parameter("sensor_impulse_sigma", "SD", 0.0, 20.0, "scale of an impulse"),
    Parameter(
        "sensor_impulse_probability", "per reading", 0.0, 1.0, "chance of an impulse while the current is steady"
    ),
    Parameter(
        "sensor_impulse_coupling", "per SD", 0.0, 1.0, "chance added per SD of motor-current jump on the same machine"
    ),
    Parameter(
        "sensor_drift_sigma_per_min", "SD/√min", 0.0, 5.0, "bias drift: random-walk scale per square root of a minute"
    ),
    Parameter("sensor_stuck_probability", "per reading", 0.0, 1.0, "chance that a channel repeats its last value"),
    Parameter("network_rtt_ms", "ms", 0.0, 10_000.0, "mean round-trip time, Poisson delay included"),
    Parameter("network_jitter_ms", "ms", 0.0, 10_000.0, "mean of the random part of the delay"),
    Parameter("network_bandwidth_khz", "kHz", 0.1, 1_000_000.0, "bandwidth B of Shannon-Hartley: C = B·log2(1 + SNR)"),
    Parameter("network_snr_db", "dB", -20.0, 60.0, "signal-to-noise ratio of Shannon-Hartley"),
    Parameter("network_loss_good", "per packet", 0.0, 1.0, "loss in the good state of the Gilbert-Elliott chain"),
    Parameter("network_loss_bad", "per packet", 0.0, 1.0, "loss in the bad state of the Gilbert-Elliott chain"),
    Parameter("network_to_bad_probability", "per packet", 0.0, 1.0, "chance of going from the good to the bad state"),
    Parameter("network_to_good_probability", "per packet", 0.0, 1.0, "chance of going from the bad to the good state"),
    Parameter("load_sigma", "share", 0.0, 1.0, "σ of ε in the scan-period offset Δn = 0.7·Δn-1 + 0.2·Δn-2 + ε"),
    Parameter("load_spike_probability", "per scan", 0.0, 1.0, "chance of a random load spike"),
    Parameter("load_spike_offset", "share", 0.0, 5.0, "scan-period offset added by a spike"),
    Parameter("load_cycle_amplitude", "share", 0.0, 2.0, "amplitude of the periodic load"),
    Parameter("load_cycle_period_s", "s", 1.0, 86_400.0, "period of the periodic load"),
)
PARAMETER_NAMES: tuple[str, ...] = tuple(parameter.name for parameter in PARAMETERS)
PARAMETER_INDEX: dict[str, int] = {name: index for index, name in enumerate(PARAMETER_NAMES)}


def cell_name(kind: str, intensity: int) -> str:
    """The partition key of a cell, such as ``network-3``."""
    return f"{kind}-{intensity}"


CELLS: tuple[str, ...] = tuple(cell_name(kind, intensity) for kind in KINDS for intensity in INTENSITIES)
CELL_INDEX: dict[str, int] = {cell: index for index, cell in enumerate(CELLS)}
