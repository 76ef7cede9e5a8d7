"""Does the exported graph decide like the policy? Asked where it matters and where it might break."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from agentpipe.errors import ParityError
from agentpipe.serving.inputs import PolicyInputs
from agentpipe.serving.runtime import Outputs, open_session, run_module, run_session

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import torch

BATCHES: Final = (1, 7, 64)
PROBABILITY_TOLERANCE: Final = 1e-5  # absolute
MEMORY_TOLERANCE: Final = 1e-5  # absolute
VALUE_TOLERANCE: Final = 1e-5  # relative to max(1, |value|): near zero a relative error of a float32 sum means nothing
FAR: Final = 1e5  # no feature, and no minute of an episode, is as large: what is, is made up
FAR_FACTOR: Final = 20.0  # rows with such a value may differ by this many times the tolerances
TIE: Final = 1e-6  # two best probabilities closer than this are a tie, which rounding may break either way
RANDOM_MASKS: Final = 1_000
EXTREMES: Final = (1e6, -1e6, 1e30, -1e30, 3e38, -3e38)


@dataclass(frozen=True)
class CaseFigures:
    """Largest differences of one case at one batch size; those of far rows stand beside."""

    case: str
    batch: int
    rows: int
    max_abs_probability: float
    max_relative_value: float
    action_mismatches: int
    ties: int
    max_abs_memory: float | None = None
    """of the memory that goes on; none without one"""
    max_abs_probability_far: float = 0.0


@dataclass(frozen=True)
class ParityReport:
    """Largest differences over all cases; those of far rows stand beside.

    ``ties`` counts rows whose two best actions are equally likely and swapped.
    """

    max_abs_probability: float
    max_relative_value: float
    action_mismatches: int
    ties: int
    rows: int
    cases: tuple[CaseFigures, ...]
    max_abs_memory: float | None = None
    """of the memory that goes on; none without one"""
    max_abs_probability_far: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """The report as a JSON object; of a memory only where there is one."""
        content = asdict(self)
        for each in (content, *content["cases"]):
            if each["max_abs_memory"] is None:
                del each["max_abs_memory"]
        return content

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> ParityReport:
        """Reads what :meth:`to_json` wrote."""
        return cls(**{**content, "cases": tuple(CaseFigures(**case) for case in content["cases"])})


def synthetic_inputs(observation_size: int, action_count: int, *, count: int = 256, seed: int = 0) -> PolicyInputs:
    """Standard normal observations under random masks: a stand-in where nothing is recorded yet."""
    generator = np.random.default_rng(seed)
    return PolicyInputs(
        generator.standard_normal((count, observation_size)).astype(np.float32),
        generator.integers(0, action_count + 1, size=count),
        generator.uniform(0, 60, size=count).astype(np.float32),
        _random_masks(generator, count, action_count),
    )


def parity_cases(recorded: PolicyInputs, *, seed: int = 0) -> dict[str, PolicyInputs]:
    """All inputs that are compared, by case.

    Recorded rows; observations far out of range; every mask with a single action; 1,000 random masks; the empty mask.
    """
    generator = np.random.default_rng(seed)
    actions = recorded.mask.shape[1]
    base = generator.integers(0, len(recorded), size=RANDOM_MASKS)
    single = np.arange(actions) % len(recorded)
    random = recorded.rows(base)
    return {
        "recorded": recorded,
        "out_of_range": _out_of_range(recorded, generator),
        "single_action": _with_mask(recorded.rows(single), np.eye(actions, dtype=np.bool_)),
        "random_mask": _with_mask(random, _random_masks(generator, RANDOM_MASKS, actions)),
        "empty_mask": _with_mask(
            recorded.rows(slice(0, 8)), np.zeros((min(8, len(recorded)), actions), dtype=np.bool_)
        ),
    }


def _random_masks(generator: np.random.Generator, count: int, actions: int) -> npt.NDArray[np.bool_]:
    density = generator.uniform(0.02, 1.0, size=(count, 1))
    mask: npt.NDArray[np.bool_] = generator.uniform(size=(count, actions)) < density
    mask[np.arange(count), generator.integers(0, actions, size=count)] = True
    return mask


def _with_mask(inputs: PolicyInputs, mask: npt.NDArray[np.bool_]) -> PolicyInputs:
    return inputs.with_mask(mask)


def _out_of_range(recorded: PolicyInputs, generator: np.random.Generator) -> PolicyInputs:
    """Each extreme on all features at once, then on random features alone, and an absurd clock."""
    size = recorded.observation.shape[1]
    rows = recorded.rows(np.arange(4 * len(EXTREMES) + 2) % len(recorded))
    observation = rows.observation.copy()
    time = rows.time.copy()
    for index, extreme in enumerate(EXTREMES):
        observation[4 * index] = extreme
        for offset in (1, 2, 3):
            observation[4 * index + offset, generator.integers(0, size)] = extreme
    time[-2:] = (1e6, -1e6)
    return PolicyInputs(observation, rows.last_action, time, rows.mask, rows.memory)


def far_rows(inputs: PolicyInputs) -> npt.NDArray[np.bool_]:
    """bool[N]: rows with a value that no sensor and no clock gives.

    The policy clips them, but many clipped features at once drive activations tens of times beyond those of recorded
    rows, and what float32 rounds off logits grows with the logits.
    """
    far: npt.NDArray[np.bool_] = (np.abs(inputs.observation).max(axis=1) >= FAR) | (np.abs(inputs.time) >= FAR)
    return far


def compare(case: str, batch: int, expected: Outputs, found: Outputs, inputs: PolicyInputs) -> CaseFigures:
    """Largest differences between two sets of outputs.

    Probabilities and values of :func:`far_rows` may differ :data:`FAR_FACTOR` times as much as those of others.

    Args:
        case: for figures and messages.
        batch: rows computed at a time, for figures and messages.
        expected: of the policy.
        found: of the graph.
        inputs: what both were asked.

    Raises:
        ParityError: beyond the tolerances, not finite, an action outside the mask, or an empty mask without action -1
            and zero probabilities; the message names case, batch and row.
    """
    action, probabilities, value, memory = found
    where: dict[str, object] = {"case": case, "batch": batch}
    for field, array in (("probabilities", probabilities), ("value", value), ("memory", memory)):
        bad = ~np.isfinite(array.reshape(len(array), -1)).all(axis=1)
        if bad.any():
            raise _failure(f"{field} are not finite", where, field, int(bad.argmax()))
    difference = np.abs(probabilities - expected.probabilities).max(axis=1)
    relative = np.abs(value - expected.value) / np.maximum(1.0, np.maximum(np.abs(expected.value), np.abs(value)))
    far = far_rows(inputs)
    factor = np.where(far, FAR_FACTOR, 1.0)
    _within(difference, PROBABILITY_TOLERANCE * factor, where, "probabilities")
    _within(relative, VALUE_TOLERANCE * factor, where, "value")
    remembered = np.abs(memory - expected.memory).max(axis=1, initial=0.0)
    _within(remembered, np.full(len(memory), MEMORY_TOLERANCE), where, "memory")
    _obey_mask(action, probabilities, inputs.mask, where)
    different = action != expected.action
    tie = np.where(far, PROBABILITY_TOLERANCE * FAR_FACTOR, TIE)
    ties = different & _tied(expected.probabilities, action, expected.action, tie)
    if (different & ~ties).any():
        row = int((different & ~ties).argmax())
        raise _failure(f"action {action[row]} instead of {expected.action[row]}", where, "action", row)
    kept = float(remembered.max()) if memory.shape[1] else None
    largest, farthest = (float(difference[rows].max(initial=0.0)) for rows in (~far, far))
    value_error = float(relative[~far].max(initial=0.0))
    return CaseFigures(case, batch, len(action), largest, value_error, 0, int(ties.sum()), kept, farthest)


def _within(
    error: npt.NDArray[np.floating[Any]],
    tolerance: npt.NDArray[np.float64],
    where: dict[str, object],
    field: str,
) -> None:
    bad = ~(error <= tolerance)
    if bad.any():
        row = int(np.argmax(np.where(np.isnan(error), np.inf, error / tolerance)))
        raise _failure(f"{field} differ by {error[row]:.3g}, more than {tolerance[row]:g}", where, field, row)


def _obey_mask(
    action: npt.NDArray[np.int64],
    probabilities: npt.NDArray[np.float32],
    mask: npt.NDArray[np.bool_],
    where: dict[str, object],
) -> None:
    empty = ~mask.any(axis=1)
    chosen = np.take_along_axis(mask, np.clip(action, 0, mask.shape[1] - 1)[:, None], axis=1)[:, 0]
    wrong = np.where(empty, action != -1, (action < 0) | (action >= mask.shape[1]) | ~chosen)
    if wrong.any():
        raise _failure(
            f"action {action[wrong.argmax()]} is not allowed by the mask", where, "action", int(wrong.argmax())
        )
    leak = (probabilities * ~mask != 0).any(axis=1)
    if leak.any():
        raise _failure("a forbidden action has a probability", where, "probabilities", int(leak.argmax()))


def _tied(
    probabilities: npt.NDArray[np.float32],
    one: npt.NDArray[np.int64],
    other: npt.NDArray[np.int64],
    tie: npt.NDArray[np.float64],
) -> npt.NDArray[np.bool_]:
    rows = np.arange(len(probabilities))
    tied: npt.NDArray[np.bool_] = np.abs(probabilities[rows, one] - probabilities[rows, other]) <= tie
    return tied & (one >= 0) & (other >= 0)


def _failure(message: str, where: dict[str, object], field: str, row: int) -> ParityError:
    remedy = "nothing is published; look for operations that lose precision or overflow"
    return ParityError(f"graph and policy disagree: {message}", **where, field=field, row=row, remedy=remedy)


def check_parity(module: torch.nn.Module, onnx_path: Path, recorded: PolicyInputs, *, seed: int = 0) -> ParityReport:
    """Compares the graph at batch 1, 7 and 64 with ``module``, over :func:`parity_cases`.

    Raises:
        ParityError: the first case that is beyond the tolerances.
        BundleError: ONNX Runtime refuses the graph.
    """
    session = open_session(onnx_path)
    figures = []
    for case, inputs in parity_cases(recorded, seed=seed).items():
        expected = run_module(module, inputs)
        figures += [compare(case, batch, expected, run_session(session, inputs, batch), inputs) for batch in BATCHES]
    return summarise(figures)


def summarise(figures: Sequence[CaseFigures]) -> ParityReport:
    """The largest of all cases."""
    remembered = [figure.max_abs_memory for figure in figures if figure.max_abs_memory is not None]
    return ParityReport(
        max(figure.max_abs_probability for figure in figures),
        max(figure.max_relative_value for figure in figures),
        sum(figure.action_mismatches for figure in figures),
        sum(figure.ties for figure in figures),
        sum(figure.rows for figure in figures),
        tuple(figures),
        max(remembered) if remembered else None,
        max(figure.max_abs_probability_far for figure in figures),
    )
