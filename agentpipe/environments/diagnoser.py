"""The supervised diagnoser: a classifier names machine, mode and severity; the rest follows the rules.

It shows what a plant gets from labelled faults without any reinforcement learning. Trained on training environments
only, with scikit-learn's multi-layer perceptron.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from agentpipe.environments import physics
from agentpipe.environments.layout import (
    A_DEPTH,
    A_MACHINE,
    A_MODE,
    A_REJECT,
    A_SEVERITY,
    FALSE_ALARM,
    MACHINES,
    MODES,
    PLC_OVERLOAD,
    SENSOR_FAILURE,
    block_start,
)
from agentpipe.environments.players import Actions, Decision, certain, dispatch_actions
from agentpipe.environments.rules import execute_actions, largest_deviation, measuring
from agentpipe.errors import SimulationError

if TYPE_CHECKING:
    from agentpipe.environments.pool import LinePool

FEATURES = block_start("segment")  # readings, means, ages, counts, line, link and PLC; nothing of the order
O_MACHINE, O_MODE, O_SEVERITY = block_start("declared_machine"), block_start("declared_mode"), block_start("severity")
SEARCH, SAMPLES = 4.0, 16.0
_LEVELS = 4  # three severities, and none


class Diagnosis(NamedTuple):
    """The trained classifiers and the scaling of their input."""

    mean: npt.NDArray[np.float64]
    scale: npt.NDArray[np.float64]
    fault: Any
    """class = machine * len(MODES) + mode; machine 0 for false alarms"""
    severity: Any


def _wants(pool: LinePool) -> Actions:
    _, suspect = largest_deviation(pool)
    return measuring(pool, suspect, SEARCH, SAMPLES)


def collect_diagnoses(pool: LinePool, episodes: int, first_episode: int = 0) -> tuple[npt.NDArray[Any], ...]:
    """Measures by rule in every environment and keeps what is known when nothing more is wanted.

    Args:
        pool: training environments.
        episodes: episodes of each environment.
        first_episode: number of the first one.

    Returns:
        f32[n, FEATURES] observations, i64[n] fault classes, i64[n] severity levels (3: not a physical fault).
    """
    observations, faults, levels = [], [], []
    for episode in range(first_episode, first_episode + episodes):
        pool.reset(episode)
        waiting = np.ones(pool.size, bool)
        while waiting.any():
            wanted = _wants(pool)
            ready = waiting & (wanted < 0)
            rows = np.flatnonzero(ready)
            truth = pool.hidden()
            machine = np.where(truth.mode[rows] == FALSE_ALARM, 0, truth.machine[rows]).astype(np.int64)
            severity = truth.severity[rows] + truth.growth[rows] * pool.plant().elapsed[rows]
            level = np.searchsorted(physics.SEVERITY_LIMITS, severity, side="right")
            observations.append(pool.observation[rows, :FEATURES].copy())
            faults.append(machine * len(MODES) + truth.mode[rows])
            levels.append(np.where(truth.mode[rows] < SENSOR_FAILURE, level, 3))
            waiting &= ~ready
            if waiting.any():
                pool.step(np.where(wanted >= 0, wanted, 0))
                waiting &= ~(pool.terminated | pool.truncated)
    return np.concatenate(observations), np.concatenate(faults), np.concatenate(levels)


def fit_diagnosis(pool: LinePool, episodes: int, *, seed: int = 0, epochs: int = 12) -> Diagnosis:
    """Trains the classifiers on ``episodes`` episodes of each environment of ``pool``.

    Raises:
        SimulationError: no episode got as far as a diagnosis.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.neural_network import MLPClassifier

    observations, faults, levels = collect_diagnoses(pool, episodes)
    if len(np.unique(faults)) < 2:
        raise SimulationError("too few diagnoses to learn from", remedy="use more environments or episodes")
    mean, scale = observations.mean(axis=0, dtype=np.float64), observations.std(axis=0, dtype=np.float64) + 1e-6
    features = ((observations - mean) / scale).clip(-8, 8)
    models = []
    for target, width in ((faults, (128, 128)), (levels, (64,))):
        model = MLPClassifier(width, batch_size=512, learning_rate_init=2e-3, max_iter=epochs, random_state=seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            model.fit(features, target)
        models.append(model)
    return Diagnosis(mean, scale, *models)


class DiagnoserPlayer:
    """Measures and dispatches by rule, diagnoses with the classifier."""

    name = "diagnoser"

    def __init__(self, diagnosis: Diagnosis) -> None:
        self._diagnosis = diagnosis

    def act(self, pool: LinePool) -> Decision:
        """One action an environment, without chance."""
        rows = np.arange(pool.size)
        early = np.flatnonzero(pool.segment <= 1)
        fault, level = np.zeros(pool.size, np.int64), np.zeros(pool.size, np.int64)
        if len(early):
            fault[early], level[early] = self._diagnose(pool, early)
        machine, mode = fault // len(MODES), fault % len(MODES)
        declared = pool.observation[:, O_MACHINE : O_MACHINE + MACHINES]
        known = declared.any(axis=1)
        measure = np.where(known, -1, _wants(pool))
        machine = np.where(pool.mask[rows, A_MACHINE + machine], machine, 0)
        declare = np.where(known | (mode == FALSE_ALARM), A_MODE + mode, A_MACHINE + machine)
        identify = np.where(measure >= 0, measure, declare)
        choices = [identify, self._assess(pool, level), dispatch_actions(pool), execute_actions(pool)]
        return certain(np.choose(pool.segment.astype(np.int64), choices).astype(np.int64))

    def _diagnose(self, pool: LinePool, rows: Actions) -> tuple[Actions, Actions]:
        model = self._diagnosis
        features = ((pool.observation[rows, :FEATURES] - model.mean) / model.scale).clip(-8, 8)
        declared = pool.observation[rows, O_MACHINE : O_MACHINE + MACHINES]
        likely = model.fault.predict_proba(features)
        classes = model.fault.classes_
        known = np.asarray(declared.any(axis=1))[:, None]
        other = known & (classes // len(MODES) != declared.argmax(axis=1)[:, None])
        likely = np.where(other & (classes % len(MODES) != FALSE_ALARM), likely * 1e-6, likely)
        allowed = pool.mask[rows][:, A_MODE : A_MODE + len(MODES)][:, classes % len(MODES)]
        likely = np.where(allowed | ~known, likely, -1.0)
        return classes[likely.argmax(axis=1)], model.severity.predict(features)

    @staticmethod
    def _assess(pool: LinePool, level: Actions) -> Actions:
        mode = pool.observation[:, O_MODE : O_MODE + len(MODES)].argmax(axis=1)
        level = np.minimum(level, _LEVELS - 2)
        judged = pool.observation[:, O_SEVERITY : O_SEVERITY + 3].any(axis=1)
        depth = np.where(mode == SENSOR_FAILURE, 2, np.where(mode == PLC_OVERLOAD, 0, level))
        return np.where(mode == FALSE_ALARM, A_REJECT, np.where(judged, A_DEPTH + depth, A_SEVERITY + level))
