"""The policy package: the only way a policy is run, anywhere.

A directory with ``package.json`` (signature, names, provenance, digests), ``weights.safetensors`` and
``statistics.safetensors``; ``labels.txt`` where labels were learned from (:mod:`~agentpipe.learning.policy.lineage`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from agentpipe.environments.layout import ACTION_NAMES, OBSERVATION_NAMES, SIMULATOR_VERSION
from agentpipe.errors import (
    ActionError,
    CheckpointError,
    EmptyMaskError,
    NonFiniteError,
    SettingsError,
    SimulationError,
)
from agentpipe.learning.options import as_json, network_options
from agentpipe.learning.policy.lineage import FORMAT, KIND, LABELS, pack_labels, unpack_labels
from agentpipe.learning.policy.lineage import MANIFEST as _MANIFEST
from agentpipe.learning.policy.network import PolicyNetwork
from agentpipe.learning.policy.normalisation import ObservationStatistics
from agentpipe.learning.policy.sampling import sample_categorical
from agentpipe.learning.tensors import open_sealed, pack, required, seal, sealed_manifest, unpack
from agentpipe.storage import canonical_json, digest_bytes, publish_directory

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SIGNATURE_VERSION = 1
_ALWAYS: Final = {"encoder": "fusion", "actor_head": "linear", "perception": 0, "memory": 0}
"""what networks were before these could be chosen; left out of a manifest, so that its digest stays what it was"""
_WEIGHTS, _STATISTICS = "weights.safetensors", "statistics.safetensors"


class PolicyOutput(NamedTuple):
    """What a policy says of N observations."""

    action: npt.NDArray[np.int64]
    """i64[N]"""
    probabilities: npt.NDArray[np.float32]
    """f32[N, A], zero where the mask is false"""
    value: npt.NDArray[np.float32]
    """f32[N], expected scaled return"""
    memory: npt.NDArray[np.float32]
    """f32[N, M], the memory for the next step; M = 0 without one"""


@dataclass
class PolicyPackage:
    """A network with its frozen normalisation, the names of its inputs and outputs, and where it came from.

    Args:
        network: with weights; its normalisation is set from ``statistics``.
        statistics: of the observations it was trained on.
        observation_names: D names.
        action_names: A names.
        simulator_version: of the simulator it was trained in.
        provenance: free JSON object: parent, table version, configuration digest, updates, …; no times.
        labels: ids of all labels that the policy and its ancestors were trained on; no part of the digest.
    """

    network: PolicyNetwork
    statistics: ObservationStatistics
    observation_names: tuple[str, ...] = OBSERVATION_NAMES
    action_names: tuple[str, ...] = ACTION_NAMES
    simulator_version: str = SIMULATOR_VERSION
    provenance: dict[str, Any] = field(default_factory=dict)
    labels: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        sizes = (self.network.observation_size, self.network.action_count)
        if (
            sizes != (len(self.observation_names), len(self.action_names))
            or self.statistics.names != self.observation_names
        ):
            raise CheckpointError(
                f"network of {sizes} does not fit the names of its inputs and actions", field="signature"
            )
        self.network.set_statistics(self.statistics)
        self.network.eval()

    @property
    def module(self) -> PolicyNetwork:
        """The network as a torch module: raw inputs to action, probabilities and value; what the exporter traces."""
        return self.network

    @property
    def memory_size(self) -> int:
        """M, width of the memory's state; 0 without one."""
        return self.network.memory_size

    @property
    def signature(self) -> dict[str, Any]:
        """Names, types and shapes (without the batch dimension) of inputs and outputs, in order.

        With a memory its state is the last input and the last output; without one neither is there.
        """
        observation, actions = [len(self.observation_names)], [len(self.action_names)]
        kept = [{"dtype": "float32", "shape": [self.memory_size]}] if self.memory_size else []
        return {
            "version": SIGNATURE_VERSION,
            "inputs": [
                {"name": "observation", "dtype": "float32", "shape": observation},
                {"name": "last_action", "dtype": "int64", "shape": []},
                {"name": "time", "dtype": "float32", "shape": []},
                {"name": "mask", "dtype": "bool", "shape": actions},
                *({"name": "memory", **entry} for entry in kept),
            ],
            "outputs": [
                {"name": "action", "dtype": "int64", "shape": []},
                {"name": "probabilities", "dtype": "float32", "shape": actions},
                {"name": "value", "dtype": "float32", "shape": []},
                *({"name": "memory_next", **entry} for entry in kept),
            ],
        }

    @property
    def digest(self) -> str:
        """Digest of weights, normalisation, signature and simulator version; not of the provenance."""
        return _digest(self._manifest(), {name: digest_bytes(data) for name, data in self._files().items()})

    def act(
        self,
        observation: npt.NDArray[np.float32],
        last_action: npt.NDArray[np.int64],
        time: npt.NDArray[np.float32],
        mask: npt.NDArray[np.bool_],
        *,
        greedy: bool = True,
        uniforms: npt.NDArray[np.float64] | None = None,
        memory: npt.NDArray[np.float32] | None = None,
    ) -> PolicyOutput:
        """Decides for N observations.

        A policy with a memory is asked in the order of the steps: what it returned as ``memory`` goes into the next
        call. Where the last action is "none yet" an episode begins, and the state that is given is not looked at.

        Args:
            observation: f32[N, D], raw.
            last_action: i64[N], 0 to A; A = none yet.
            time: f32[N], minutes since the start of the episode.
            mask: bool[N, A].
            greedy: the most probable action; else one drawn from the probabilities by ``uniforms``.
            uniforms: f64[N] in [0, 1), needed unless greedy.
            memory: f32[N, M], needed where the policy has a memory; :meth:`fresh_memory` before the first step.

        Raises:
            EmptyMaskError: nothing is allowed in a row.
            NonFiniteError: an input or output is not finite; names row and field.
            ActionError: a last action is out of range.
            SimulationError: a shape or a type does not fit.
            LearningError: the policy has a memory and was asked without its state.
        """
        arrays: list[npt.NDArray[Any]] = [observation, last_action, time, mask]
        self._check(*arrays)
        if self.memory_size and memory is not None:
            self._check_memory(memory, len(observation))
            arrays.append(memory)
        with torch.inference_mode():
            inputs = (torch.from_numpy(np.ascontiguousarray(part)) for part in arrays)
            action, probabilities, value, *kept = (part.numpy() for part in self.network(*inputs))
        if not np.isfinite(value).all() or not np.isfinite(probabilities).all():
            row = int(np.argmax(~np.isfinite(value) | ~np.isfinite(probabilities).all(axis=1)))
            raise NonFiniteError("the policy's output is not finite", environment=row, field="value or probabilities")
        if not greedy:
            if uniforms is None or uniforms.shape != (len(observation),):
                raise SimulationError("a sampled decision needs one uniform number a row", field="uniforms")
            action = sample_categorical(probabilities, uniforms)
        return PolicyOutput(action, probabilities, value, kept[0] if kept else self.fresh_memory(len(observation)))

    def fresh_memory(self, rows: int) -> npt.NDArray[np.float32]:
        """The memory of ``rows`` episodes before their first step: zeros f32[rows, M]."""
        return np.zeros((rows, self.memory_size), np.float32)

    def remember(
        self,
        observation: npt.NDArray[np.float32],
        last_action: npt.NDArray[np.int64],
        time: npt.NDArray[np.float32],
        memory: npt.NDArray[np.float32],
    ) -> npt.NDArray[np.float32]:
        """The memory f32[N, M] after N observations that were decided on by someone else; arguments as :meth:`act`."""
        with torch.inference_mode():
            inputs = (torch.from_numpy(np.ascontiguousarray(part)) for part in (observation, last_action, time, memory))
            kept: npt.NDArray[np.float32] = self.network.encode(*inputs)[1].numpy()
        return kept

    def _check_memory(self, memory: npt.NDArray[np.float32], rows: int) -> None:
        if memory.dtype != np.float32 or memory.shape != (rows, self.memory_size):
            expected = f"float32{(rows, self.memory_size)}"
            raise SimulationError(f"memory is {memory.dtype}{memory.shape}, expected {expected}", field="memory")
        if not np.isfinite(memory).all():
            row = int(np.argmax(~np.isfinite(memory).all(axis=1)))
            raise NonFiniteError("a memory is not finite", environment=row, field="memory")

    def _check(
        self,
        observation: npt.NDArray[np.float32],
        last_action: npt.NDArray[np.int64],
        time: npt.NDArray[np.float32],
        mask: npt.NDArray[np.bool_],
    ) -> None:
        rows = len(observation)
        given: tuple[npt.NDArray[Any], ...] = (observation, last_action, time, mask)
        for entry, array in zip(self.signature["inputs"][: len(given)], given, strict=True):
            name = entry["name"]
            if array.dtype != entry["dtype"] or array.shape != (rows, *entry["shape"]):
                expected = f"{entry['dtype']}{(rows, *entry['shape'])}"
                raise SimulationError(f"{name} is {array.dtype}{array.shape}, expected {expected}", field=name)
        if not np.isfinite(observation).all():
            row, column = np.argwhere(~np.isfinite(observation))[0]
            name = self.observation_names[column]
            raise NonFiniteError("an observation is not finite", environment=int(row), field=name)
        if not np.isfinite(time).all():
            raise NonFiniteError("time is not finite", environment=int(np.argmax(~np.isfinite(time))), field="time")
        if rows and (last_action.min() < 0 or last_action.max() > len(self.action_names)):
            raise ActionError(f"last action out of range 0 to {len(self.action_names)}", field="last_action")
        legal = mask.any(axis=1)
        if not legal.all():
            remedy = "ask the environment for a legal action, or end the episode"
            raise EmptyMaskError("no action is allowed", environment=int(np.argmin(legal)), field="mask", remedy=remedy)

    def _manifest(self) -> dict[str, Any]:
        return {
            "kind": KIND,
            "format": FORMAT,
            "signature": self.signature,
            "network": _stored(as_json(self.network.options)),
            "observation_names": list(self.observation_names),
            "action_names": list(self.action_names),
            "simulator_version": self.simulator_version,
        }

    def _files(self) -> dict[str, bytes]:
        weights = {name: tensor.detach().cpu().numpy() for name, tensor in self.network.state_dict().items()}
        return {_WEIGHTS: pack(weights), _STATISTICS: self.statistics.to_bytes()}

    def save(self, path: Path) -> Path:
        """Publishes the package as the directory ``path`` (replacing one that is there) and returns it."""
        files = self._files()
        manifest = self._manifest()
        digest = _digest(manifest, {name: digest_bytes(data) for name, data in files.items()})
        if self.labels:
            files[LABELS] = pack_labels(self.labels)
        with publish_directory(path) as staging:
            content = {**manifest, "package_digest": digest, "provenance": self.provenance}
            seal(staging, _MANIFEST, sealed_manifest(content, files), files)
        return path

    @classmethod
    def load(cls, path: Path) -> PolicyPackage:
        """Reads and checks a package.

        Raises:
            CheckpointError: a file is missing or damaged, or shapes do not fit.
            VersionError: written under another format version.
        """
        manifest, files = open_sealed(path, _MANIFEST, KIND, FORMAT)
        where = path / _MANIFEST
        names = tuple(required(manifest, "observation_names", where))
        actions = tuple(required(manifest, "action_names", where))
        try:
            options = network_options({**_ALWAYS, **required(manifest, "network", where)})
        except SettingsError as error:
            raise CheckpointError(error.message, file=where, field="network") from error
        network = PolicyNetwork(len(names), len(actions), options)
        load_weights(network.state_dict(), unpack(required(files, _WEIGHTS, path), path / _WEIGHTS), path / _WEIGHTS)
        statistics = ObservationStatistics.from_bytes(required(files, _STATISTICS, path), names, path / _STATISTICS)
        version = str(required(manifest, "simulator_version", where))
        labels = unpack_labels(files[LABELS], path / LABELS) if LABELS in files else frozenset()
        provenance = dict(required(manifest, "provenance", where))
        package = cls(network, statistics, names, actions, version, provenance, labels)
        if required(manifest, "signature", where) != package.signature:
            raise CheckpointError("the signature does not match the network", file=where, field="signature")
        return package


def load_weights(state: Mapping[str, torch.Tensor], weights: Mapping[str, npt.NDArray[Any]], file: Path) -> None:
    """Copies ``weights`` into the tensors of ``state``.

    Raises:
        CheckpointError: names, shapes or types differ, or a weight is not finite; the message names the tensor.
    """
    if set(state) != set(weights):
        raise CheckpointError(f"weights {sorted(set(state) ^ set(weights))} do not fit the network", file=file)
    for name, tensor in state.items():
        array = weights[name]
        if tuple(tensor.shape) != array.shape or array.dtype != np.float32:
            expected = f"float32{tuple(tensor.shape)}"
            raise CheckpointError(f"{name} is {array.dtype}{array.shape}, expected {expected}", file=file, field=name)
        if not np.isfinite(array).all():
            raise CheckpointError(f"{name} is not finite", file=file, field=name)
        tensor.copy_(torch.from_numpy(array))


def first_difference(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """Where two JSON objects differ first, such as ``network.encoder``; empty where they are alike."""
    for name in sorted({*mine, *theirs}):
        one, other = mine.get(name), theirs.get(name)
        if isinstance(one, dict) and isinstance(other, dict):
            if below := first_difference(one, other):
                return f"{name}.{below}"
        elif one != other:
            return name
    return ""


def _stored(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in _ALWAYS or value != _ALWAYS[name]}


def _digest(manifest: Mapping[str, Any], files: Mapping[str, str]) -> str:
    return digest_bytes(canonical_json([manifest, dict(files)]))
