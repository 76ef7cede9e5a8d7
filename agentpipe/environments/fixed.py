"""Builds what is fixed for each environment of a pool from catalogue, table and line profile."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from agentpipe.environments import physics
from agentpipe.environments.geometry import LineGeometry, downstream_matrices, line_geometry
from agentpipe.environments.layout import (
    CHANNELS,
    DISTURBANCE_KINDS,
    MODES,
    PHYSICAL_MODES,
    PROTOCOLS,
    SENSOR_TYPES,
    TOPOLOGIES,
    Purpose,
)
from agentpipe.environments.parameters import KINDS, PARAMETER_INDEX, PARAMETER_NAMES
from agentpipe.environments.rng import root_key, stable_hash
from agentpipe.environments.state import Fixed
from agentpipe.errors import SimulationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agentpipe.environments.catalog import EnvironmentSpec
    from agentpipe.environments.line_profile import LineProfile
    from agentpipe.environments.table import DisturbanceTable

# Values of a disturbance that is switched off; parameters not named here become 0.
_NEUTRAL = {
    "sensor_cycle_period_s": 60.0,
    "network_bandwidth_khz": 1_000.0,
    "network_snr_db": 40.0,
    "network_to_good_probability": 1.0,
    "load_cycle_period_s": 60.0,
}


def build_fixed(
    environments: Sequence[EnvironmentSpec],
    table: DisturbanceTable,
    profile: LineProfile,
    *,
    seed: int,
    purpose: Purpose,
    off: frozenset[str] = frozenset(),
) -> Fixed:
    """The fixed arrays of a pool; see :func:`agentpipe.environments.pool.build_pool` for the arguments.

    Raises:
        SimulationError: no environments, an unknown kind in ``off``, or a seed out of range.
    """
    _refuse(environments, seed, off)
    templates = [environment.template for environment in environments]
    lines = sorted({(t.line_id, t.topology, t.machines) for t in templates})
    line_row = {line: row for row, line in enumerate(lines)}
    geometries = [_geometry(*line) for line in lines]
    rows = table.rows_for([environment.environment_id for environment in environments])
    parameters = np.ascontiguousarray(table.parameters[rows], dtype=np.float32)
    switch_off(parameters, off)
    size, steerable = len(environments), len(environments) if purpose == Purpose.TRAIN else 0
    protocol = np.array([PROTOCOLS.index(t.protocol) for t in templates], np.int8)
    bandwidth, snr = (parameters[:, PARAMETER_INDEX[f"network_{name}"]] for name in ("bandwidth_khz", "snr_db"))
    signatures = _signatures(profile)
    return Fixed(
        root=np.array([root_key(seed, int(purpose))], np.uint64),
        identity=np.array([stable_hash(environment.environment_id) for environment in environments], np.uint64),
        line=np.array([line_row[(t.line_id, t.topology, t.machines)] for t in templates], np.int32),
        topology=np.array([TOPOLOGIES.index(t.topology) for t in templates], np.int8),
        machines=np.array([t.machines for t in templates], np.int8),
        sensor_type=np.array([SENSOR_TYPES.index(t.sensor_type) for t in templates], np.int8),
        protocol=protocol,
        own_mode=np.array([MODES.index(t.fault_mode) for t in templates], np.int8),
        capacity=physics.packets_a_cycle(bandwidth, snr, protocol),
        parameters=parameters,
        fingerprint=_fingerprints(table, rows),
        compound=np.zeros((size, len(KINDS)), np.uint8),
        waits=np.zeros(size, np.bool_),
        next_capacity=np.zeros(steerable, np.int8),
        next_parameters=np.zeros((steerable, parameters.shape[1]), np.float32),
        next_fingerprint=np.zeros(steerable, np.uint32),
        next_compound=np.zeros((steerable, len(KINDS)), np.uint8),
        route=np.stack([geometry.route for geometry in geometries]),
        gain=np.stack([geometry.gain.reshape(-1) for geometry in geometries]),
        skills=np.stack([geometry.skills for geometry in geometries]),
        feeds=downstream_matrices(),
        prevalence=_prevalence(profile),
        shift=signatures[0],
        down=signatures[1],
        up=signatures[2],
        healthy_factor=_factor(profile.healthy_covariance),
        mode_factor=_mode_factors(profile),
        physical=np.array([len(profile.modes)], np.int64),
    )


def _fingerprints(table: DisturbanceTable, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
    """Of each of ``rows``, the fingerprint that people read."""
    distinct, inverse = np.unique(rows, return_inverse=True)
    crc = [int(table.row_fingerprint(int(row)).crc32, 16) for row in distinct]
    return np.array(crc, np.uint32)[inverse]


@lru_cache(maxsize=512)
def _geometry(line_id: str, topology: str, machines: int) -> LineGeometry:
    return line_geometry(line_id, topology, machines)


def _refuse(environments: Sequence[EnvironmentSpec], seed: int, off: frozenset[str]) -> None:
    if not environments:
        raise SimulationError("a pool needs at least one environment", remedy="choose another split or cell")
    if unknown := off - set(DISTURBANCE_KINDS):
        kinds = ", ".join(DISTURBANCE_KINDS)
        raise SimulationError("unknown disturbance kind", field=min(unknown), remedy=f"use {kinds}")
    if not 0 <= seed < 2**63:
        raise SimulationError("the seed is out of range", field="seed", remedy="use 0 <= seed < 2**63")


def switch_off(parameters: npt.NDArray[np.float32], off: frozenset[str]) -> None:
    """Makes the parameters of the kinds ``off`` neutral, in place; f32[N, P]."""
    for index, name in enumerate(PARAMETER_NAMES):
        if name.split("_", 1)[0] in off:
            parameters[:, index] = _NEUTRAL.get(name, 0.0)


def _signatures(profile: LineProfile) -> tuple[npt.NDArray[np.float32], ...]:
    shift, down, up = (np.zeros((len(MODES), CHANNELS), np.float32) for _ in range(3))
    for slot, mode in enumerate(profile.modes):
        own = np.asarray(mode.shift, np.float32)
        shift[slot] = own
        down[slot] = physics.DOWN_REACH[slot] * (own @ physics.DOWN_COUPLING)
        up[slot] = physics.UP_REACH[slot] * (own @ physics.UP_COUPLING)
    return shift, down, up


def _prevalence(profile: LineProfile) -> npt.NDArray[np.float64]:
    """Cumulative over the mode slots; slots that the profile leaves empty get nothing."""
    weights = np.zeros(len(MODES))
    for slot, mode in enumerate(profile.modes):
        weights[slot] = mode.prevalence
    for slot, name in enumerate(MODES[PHYSICAL_MODES:], start=PHYSICAL_MODES):
        weights[slot] = profile.structural_prevalence[name]
    return np.cumsum(weights / weights.sum())


def _factor(covariance: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """Lower Cholesky factor, with a ridge that keeps a singular covariance factorable."""
    return np.linalg.cholesky(np.asarray(covariance) + 1e-9 * np.eye(CHANNELS)).astype(np.float32)


def _mode_factors(profile: LineProfile) -> npt.NDArray[np.float32]:
    factors = np.tile(_factor(profile.healthy_covariance), (len(MODES), 1, 1))
    for slot, mode in enumerate(profile.modes):
        factors[slot] = _factor(mode.covariance)
    return np.ascontiguousarray(factors)
