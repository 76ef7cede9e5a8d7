"""Who can answer a question on this machine: a bundle's graph in ONNX Runtime, and rules. Neither needs a network."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from agentpipe.errors import BundleError, ParityError, ServingError
from agentpipe.serving import layout
from agentpipe.serving.agent.answers import checked_answer
from agentpipe.serving.agent.sensors import lost_context
from agentpipe.serving.agent.states import OrderStates, Remembered, checked_state
from agentpipe.serving.agent.types import HOLD_VERSION, Answer
from agentpipe.serving.runtime import check_session, open_session
from agentpipe.serving.signature import MEMORY, MEMORY_NEXT, Signature, names_digest
from agentpipe.serving.statements import read_statements

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from agentpipe.environments.line_profile import LineProfile
    from agentpipe.environments.rules import RulesPlayer
    from agentpipe.serving.agent.types import Frame

TOLERANCE: Final = 1e-5
"""by which an answer to a known row may differ: absolute for probabilities, relative to max(1, |value|) for values"""
KNOWN_ROWS: Final = 8
_REMEDY: Final = "build the bundle again"


@dataclass(frozen=True)
class PolicyFiles:
    """What a decider needs to know of a bundle. ``version`` is the digest of the package whose policy it is."""

    path: Path
    model_name: str
    model_version: int
    version: str
    signature: Signature

    @property
    def graph(self) -> Path:
        """The ONNX file."""
        return self.path / self.model_name / str(self.model_version) / "model.onnx"


def read_policy(bundle: Path) -> PolicyFiles:
    """Reads a bundle as :func:`~agentpipe.serving.verify.verify_bundle` does, but for graph and configuration.

    A decider holds the graph that it loads against the signature, and its first probe compares answers. Triton's
    configuration is not looked at: it takes Triton's client, which an agent may do without, and decides nothing here.

    Raises:
        BundleError: a file is missing, extra, altered, malformed or inconsistent; the message names it.
    """
    said = read_statements(bundle)
    version = str(said.provenance.get("package", {}).get("digest") or said.digest)
    return PolicyFiles(bundle, said.model_name, said.version, version, said.signature)


@dataclass(frozen=True)
class KnownRows:
    """A few questions with the answers of the policy a bundle was made from: inputs by name ``[N, ...]``, outputs."""

    inputs: Mapping[str, npt.NDArray[Any]]
    action: npt.NDArray[np.int64]
    probabilities: npt.NDArray[np.float32]
    value: npt.NDArray[np.float32]
    memory: npt.NDArray[np.float32]

    def compare(self, outputs: Mapping[str, npt.NDArray[Any]], decider: str) -> None:
        """Holds the answers of a decider against the known ones.

        Raises:
            ServingError: an answer has another shape or is not finite.
            ParityError: the answers are those of another policy.
        """
        wanted: dict[str, npt.NDArray[Any]] = {
            "action": self.action[:, None],
            "probabilities": self.probabilities,
            "value": self.value[:, None],
        }
        if self.memory.shape[1]:
            wanted[MEMORY_NEXT] = self.memory
        for name, known in wanted.items():
            if outputs[name].shape != known.shape or outputs[name].dtype != known.dtype:
                found = f"{outputs[name].dtype}{list(outputs[name].shape)}"
                raise ServingError(f"{name} of known rows are {found}", decider=decider, field=name, remedy=_REMEDY)
        wrong = np.abs(outputs["probabilities"] - self.probabilities).max(axis=1)
        scale = np.maximum(1.0, np.abs(self.value))
        wrong = np.maximum(wrong, np.abs(outputs["value"][:, 0] - self.value) / scale)
        if self.memory.shape[1]:
            wrong = np.maximum(wrong, np.abs(outputs[MEMORY_NEXT] - self.memory).max(axis=1))
        if not (wrong <= TOLERANCE).all():
            worst = float(np.nan_to_num(wrong, nan=np.inf).max())
            remedy = "serve the bundle that this agent was given, or give it the one that is served"
            raise ParityError(f"known rows are answered otherwise, by {worst:.3g}", decider=decider, remedy=remedy)


def read_known_rows(files: PolicyFiles, count: int = KNOWN_ROWS) -> KnownRows:
    """The first ``count`` reference rows of a bundle whose masks allow something.

    Raises:
        BundleError: the file is no safetensors file, has no such row, or does not fit the signature.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    signature = files.signature
    try:
        tensors = load((files.path / layout.REFERENCE).read_bytes())
        rows = np.flatnonzero(tensors["mask"].any(axis=1))[:count]
        if not len(rows):
            raise ValueError("no row allows an action")  # noqa: TRY301 - said as whatever else is wrong with them
        inputs = {
            spec.name: np.ascontiguousarray(tensors[spec.name][rows].reshape(-1, *spec.dims), spec.numpy)
            for spec in signature.inputs
        }
        action, probabilities, value = (tensors[name][rows] for name in ("action", "probabilities", "value"))
        memory = tensors[MEMORY_NEXT][rows] if signature.memory_size else np.zeros((len(rows), 0), np.float32)
        return KnownRows(inputs, action, probabilities, value, memory)
    except (OSError, SafetensorError, LookupError, ValueError) as error:
        text = f"reference rows cannot be used: {error!r}"
        raise BundleError(text, file=layout.REFERENCE, remedy=_REMEDY) from error


class LocalDecider:
    """A bundle's graph in this process: one row, one thread, arrays that are used again for every question.

    Args:
        bundle: folder of the bundle, or what :func:`read_policy` read of it.
        name: on the ladder.
        states: what the policy remembers of each line's order, shared with other rungs; one of its own where None.

    Raises:
        BundleError: the bundle is damaged, ONNX Runtime refuses the graph, or it takes an input that no line knows.
    """

    def __init__(self, bundle: Path | PolicyFiles, name: str = "local", states: OrderStates | None = None) -> None:
        self.files = bundle if isinstance(bundle, PolicyFiles) else read_policy(bundle)
        self.name = name
        self._session = open_session(self.files.graph)
        check_session(self._session, self.files.signature, self.files.graph)
        self._inputs = frame_inputs(self.files.signature)
        self._states = OrderStates() if states is None else states
        self._outputs = [spec.name for spec in self.files.signature.outputs]
        self._known: KnownRows | None = None

    @property
    def policy_version(self) -> str:
        """Digest of the package whose policy it is."""
        return self.files.version

    def decide(self, frame: Frame, timeout: float) -> Answer:
        """The policy's answer; ``timeout`` is not needed, as nothing is waited for.

        Raises:
            ServingError: the frame has other sizes than the policy, or the answer is no answer.
        """
        del timeout
        notes = fill_inputs(self._inputs, frame, self.files, self._states, self.name)
        outputs = dict(zip(self._outputs, self._run(self._inputs), strict=True))
        return answered(frame, outputs, self.files, self._states, self.name, notes)

    def probe(self, timeout: float) -> None:
        """Asks known rows one by one as a line would. May run in another thread than :meth:`decide`.

        Raises:
            ServingError, ParityError: see :meth:`KnownRows.compare`.
            BundleError: the reference rows cannot be read.
        """
        del timeout
        self._known = self._known or read_known_rows(self.files)
        rows = range(len(self._known.action))
        answers = [
            self._run({name: array[row : row + 1] for name, array in self._known.inputs.items()}) for row in rows
        ]
        joined = [np.concatenate(column) for column in zip(*answers, strict=True)]
        self._known.compare(dict(zip(self._outputs, joined, strict=True)), self.name)

    def _run(self, inputs: Mapping[str, npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
        from onnxruntime.capi import onnxruntime_pybind11_state as state

        try:
            return list(self._session.run(self._outputs, inputs))
        except (state.RuntimeException, state.Fail, state.InvalidArgument, RuntimeError, ValueError) as error:
            raise ServingError(f"ONNX Runtime fails: {error}", decider=self.name, remedy=_REMEDY) from error

    def close(self) -> None:
        """Nothing is held that the process would not let go of."""


def frame_inputs(signature: Signature) -> dict[str, npt.NDArray[Any]]:
    """Arrays of one row for the inputs of ``signature``, to be filled by :func:`fill_inputs`.

    Raises:
        BundleError: an input that a line does not deliver.
    """
    unknown = sorted({spec.name for spec in signature.inputs} - {"observation", "last_action", "time", "mask", MEMORY})
    if unknown:
        raise BundleError(f"no line delivers {unknown}", field=unknown[0], remedy="use a bundle of this agentpipe")
    return {spec.name: np.zeros((1, *spec.dims), spec.numpy) for spec in signature.inputs}


def fill_inputs(
    inputs: Mapping[str, npt.NDArray[Any]], frame: Frame, files: PolicyFiles, states: OrderStates, decider: str
) -> tuple[str, ...]:
    """Writes ``frame`` into the arrays of :func:`frame_inputs`, and what the policy remembers of its order.

    Returns:
        What there is to say of that.

    Raises:
        ServingError: sizes differ.
    """
    given = (frame.observation.shape, frame.mask.shape)
    wanted = (inputs["observation"].shape[1:], inputs["mask"].shape[1:])
    if given != wanted:
        text = f"observation and mask are {given}, the policy takes {wanted}"
        raise ServingError(text, decider=decider, remedy="give the agent a bundle of this line")
    inputs["observation"][0] = frame.observation
    inputs["mask"][0] = frame.mask
    inputs["last_action"][0, 0] = frame.last_action
    inputs["time"][0, 0] = frame.elapsed_minutes
    if not files.signature.memory_size:
        return ()
    inputs[MEMORY][0], notes = states.before(frame, files.version, files.signature.memory_size)
    return notes


def answered(
    frame: Frame,
    outputs: Mapping[str, npt.NDArray[Any]],
    files: PolicyFiles,
    states: OrderStates,
    decider: str,
    notes: tuple[str, ...],
) -> Answer:
    """The answer in ``outputs``, with the notes of :func:`fill_inputs`; what is remembered goes to ``states``.

    Raises:
        ServingError: it is no answer, see :func:`~agentpipe.serving.agent.answers.checked_answer`.
    """
    answer = checked_answer(frame, outputs, decider, files.version)
    if not files.signature.memory_size:
        return answer
    state = checked_state(outputs, files.signature.memory_size, decider)
    remembered = Remembered(frame.number, files.version, state)
    states.after(frame, remembered)
    return replace(answer, notes=(*answer.notes, *notes), memory=remembered)


class _OneRow:
    """A frame as the rules see a pool: arrays of one row."""

    size = 1

    def __init__(self, frame: Frame, segment_start: int, segments: int) -> None:
        self.observation = np.nan_to_num(frame.observation, nan=0.0)[None]
        self.mask = frame.mask[None]
        part = self.observation[:, segment_start : segment_start + segments]
        self.segment = part.argmax(axis=1).astype(np.int8)


class RulesDecider:
    """The last rung: needs no server, no graph, no file.

    On the built-in line (known by the digests of its names) the rule-based player answers, for it plays on sensibly
    where repeating oneself would not. On any other line, or where its choice is forbidden, the last action is held
    where it still is allowed, at most ``holds`` times in a row for one order; then a person is asked (−1), as one is at
    once where something of a question of the built-in line is lost that is no sensor's reading.

    Args:
        signature: of the line.
        profile: fault signatures of the line; the project's own where none is given.
        holds: how often the last action is repeated.
    """

    name = "rules"

    def __init__(self, signature: Signature, profile: LineProfile | None = None, *, holds: int = 3) -> None:
        self._holds = holds
        self._held: tuple[str, int] = ("", 0)
        self._player = _rules_player(signature, profile)

    @property
    def policy_version(self) -> str:
        """Which rules: ``rules-`` and the version of the simulator whose names they know; ``rules-hold`` elsewhere."""
        from agentpipe.environments.layout import SIMULATOR_VERSION

        return f"rules-{SIMULATOR_VERSION}" if self._player else HOLD_VERSION

    def decide(self, frame: Frame, timeout: float = 0.0) -> Answer:
        """Always an answer; ``timeout`` is not needed."""
        del timeout
        lost = lost_context(frame) if self._player is not None else ""
        if lost:
            return self._answer(frame, -1, (f"{lost}: a person is asked",))
        action = self._by_rules(frame)
        if action is not None and frame.mask[action]:
            return self._answer(frame, action, ())
        last, (order, held) = frame.last_action, self._held
        held = held if order == frame.order_id else 0
        if 0 <= last < len(frame.mask) and frame.mask[last] and held < self._holds:
            self._held = (frame.order_id, held + 1)
            return self._answer(frame, last, ("the last action is held",))
        return self._answer(frame, -1, ("neither rules nor the last action apply: a person is asked",))

    def _by_rules(self, frame: Frame) -> int | None:
        from agentpipe.environments.layout import ACTION_COUNT, OBSERVATION_SIZE, SEGMENTS, block_start

        if self._player is None or (len(frame.observation), len(frame.mask)) != (OBSERVATION_SIZE, ACTION_COUNT):
            return None
        row = _OneRow(frame, block_start("segment"), len(SEGMENTS))
        return int(self._player.act(row).actions[0])

    def _answer(self, frame: Frame, action: int, notes: tuple[str, ...]) -> Answer:
        probabilities = np.zeros(len(frame.mask), np.float32)
        if action >= 0:
            probabilities[action] = 1.0
        return Answer(action, probabilities, 0.0, self.name, self.policy_version, notes)

    def probe(self, timeout: float) -> None:
        """Rules are always there."""

    def close(self) -> None:
        """Nothing to let go of."""


def _rules_player(signature: Signature, profile: LineProfile | None) -> RulesPlayer | None:
    """The rule-based player where the line has the built-in line's names."""
    from agentpipe.environments.layout import ACTION_NAMES, OBSERVATION_NAMES
    from agentpipe.environments.line_profile import default_profile
    from agentpipe.environments.rules import RulesPlayer

    own = (names_digest(OBSERVATION_NAMES), names_digest(ACTION_NAMES))
    if (signature.observation_digest, signature.action_digest) != own:
        return None
    return RulesPlayer(default_profile() if profile is None else profile)
