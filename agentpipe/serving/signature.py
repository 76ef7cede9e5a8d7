"""What a served policy takes and gives: names, dtypes and shapes, the same for graph, configuration and client."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from agentpipe.errors import BundleError
from agentpipe.storage import canonical_json, digest_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SIGNATURE_VERSION: Final = 1
TRITON_TYPES: Final = {"float32": "TYPE_FP32", "int64": "TYPE_INT64", "bool": "TYPE_BOOL"}
WIRE_TYPES: Final = {"float32": "FP32", "int64": "INT64", "bool": "BOOL"}
MEMORY: Final = "memory"
"""the input that a policy with a memory takes, f32[M]"""
MEMORY_NEXT: Final = "memory_next"
"""the output that is its input at the next question of the same episode"""
ONNX_TYPES: Final = {"float32": 1, "int64": 7, "bool": 9}  # onnx.TensorProto.DataType


@dataclass(frozen=True)
class TensorSpec:
    """One named tensor. ``dims`` leave the batch dimension out; a number per row has ``dims == (1,)``."""

    name: str
    dtype: str
    dims: tuple[int, ...]

    @property
    def numpy(self) -> np.dtype[Any]:
        """The numpy dtype."""
        return np.dtype(self.dtype)

    def to_json(self) -> dict[str, Any]:
        """The specification as a JSON object."""
        return {"name": self.name, "dtype": self.dtype, "dims": list(self.dims)}


@dataclass(frozen=True)
class Signature:
    """Inputs and outputs in the order of the graph.

    ``no_action`` is the value of ``last_action`` before the first decision of an episode. ``observation_digest`` and
    ``action_digest`` identify the names behind the columns, so that a client notices a layout that is not its own.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    no_action: int
    simulator_version: str = ""
    observation_digest: str = ""
    action_digest: str = ""
    version: int = SIGNATURE_VERSION

    def input(self, name: str) -> TensorSpec:
        """The input called ``name``; BundleError when there is none."""
        for spec in self.inputs:
            if spec.name == name:
                return spec
        raise BundleError(f"the signature has no input {name!r}", field=name, remedy="use a bundle of this agentpipe")

    @property
    def observation_size(self) -> int:
        """D, the number of observation features."""
        return self.input("observation").dims[0]

    @property
    def action_count(self) -> int:
        """A, the number of actions."""
        return self.input("mask").dims[0]

    @property
    def memory_size(self) -> int:
        """M, width of the memory that goes from one question of an episode to the next; 0 without one."""
        return next((spec.dims[0] for spec in self.inputs if spec.name == MEMORY), 0)

    def same_line(self, other: Signature) -> bool:
        """Whether both are of one line: whatever a line sees is alike, only what a policy remembers may differ."""
        return _without_memory(self) == _without_memory(other)

    def to_json(self) -> dict[str, Any]:
        """The signature as a JSON object."""
        return {
            "version": self.version,
            "inputs": [spec.to_json() for spec in self.inputs],
            "outputs": [spec.to_json() for spec in self.outputs],
            "no_action": self.no_action,
            "simulator_version": self.simulator_version,
            "observation_digest": self.observation_digest,
            "action_digest": self.action_digest,
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any], file: object = None) -> Signature:
        """Reads what :meth:`to_json` wrote.

        Raises:
            BundleError: a field is missing or malformed, or the version is newer than this program.
        """
        try:
            if content["version"] != SIGNATURE_VERSION:
                found = content["version"]
                raise BundleError(
                    f"signature version {found!r}", file=file, remedy=f"this program reads {SIGNATURE_VERSION}"
                )
            return cls(
                inputs=_specs(content["inputs"]),
                outputs=_specs(content["outputs"]),
                no_action=int(content["no_action"]),
                simulator_version=str(content["simulator_version"]),
                observation_digest=str(content["observation_digest"]),
                action_digest=str(content["action_digest"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise BundleError(f"malformed signature: {error!r}", file=file, remedy="build the bundle again") from error


def _without_memory(signature: Signature) -> Signature:
    inputs, outputs = (
        tuple(spec for spec in specs if spec.name not in (MEMORY, MEMORY_NEXT))
        for specs in (signature.inputs, signature.outputs)
    )
    return replace(signature, inputs=inputs, outputs=outputs)


def _specs(entries: Sequence[Mapping[str, Any]]) -> tuple[TensorSpec, ...]:
    specs = tuple(TensorSpec(str(e["name"]), str(e["dtype"]), tuple(int(d) for d in e["dims"])) for e in entries)
    for spec in specs:
        if spec.dtype not in TRITON_TYPES:
            raise ValueError(f"dtype {spec.dtype} of {spec.name}")
    return specs


def names_digest(names: Sequence[str]) -> str:
    """Digest of column names in order."""
    return digest_bytes(canonical_json(list(names)))


def policy_signature(
    observation_size: int,
    action_count: int,
    *,
    memory: int = 0,
    simulator_version: str = "",
    observation_names: Sequence[str] = (),
    action_names: Sequence[str] = (),
) -> Signature:
    """The signature of a policy over ``observation_size`` features and ``action_count`` actions.

    Actions are 64-bit integers because numpy's and torch's indices are: nothing is cast between a caller and the graph.
    With a ``memory`` of M units there is one more input, ``memory``, and one more output, ``memory_next``: the caller
    hands the latter on to the next question of the same episode, zeros before the first. Where the last action is
    ``no_action`` the graph does not look at it.
    """
    kept = [TensorSpec(name, "float32", (memory,)) for name in (MEMORY, MEMORY_NEXT)] if memory else []
    return Signature(
        inputs=(
            TensorSpec("observation", "float32", (observation_size,)),
            TensorSpec("last_action", "int64", (1,)),
            TensorSpec("time", "float32", (1,)),
            TensorSpec("mask", "bool", (action_count,)),
            *kept[:1],
        ),
        outputs=(
            TensorSpec("action", "int64", (1,)),
            TensorSpec("probabilities", "float32", (action_count,)),
            TensorSpec("value", "float32", (1,)),
            *kept[1:],
        ),
        no_action=action_count,
        simulator_version=simulator_version,
        observation_digest=names_digest(observation_names),
        action_digest=names_digest(action_names),
    )


def to_columns(spec: TensorSpec, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """``values`` with a trailing axis of one where ``spec`` has ``dims == (1,)`` and a vector was given."""
    return values[:, None] if spec.dims == (1,) and values.ndim == 1 else values
