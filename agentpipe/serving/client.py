"""Asking a running Triton for decisions, with the mistakes that a caller can make refused before the network."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from agentpipe.closing import Closing
from agentpipe.errors import AnswerError, BundleError, EmptyMaskError, NonFiniteError, ServiceError, ServingError
from agentpipe.serving.answers import check_answer
from agentpipe.serving.loopback import channel_options
from agentpipe.serving.runtime import Outputs
from agentpipe.serving.signature import MEMORY, WIRE_TYPES, Signature, TensorSpec, to_columns

if TYPE_CHECKING:
    from tritonclient.grpc import InferenceServerClient


@dataclass(frozen=True)
class ServedDecision:
    """Action i64[N], probabilities f32[N, A] (zero where forbidden) and value f32[N] of N rows.

    ``memory`` f32[N, M] is for the next question of the same episodes; of no width where the policy has no memory.
    """

    action: npt.NDArray[np.int64]
    probabilities: npt.NDArray[np.float32]
    value: npt.NDArray[np.float32]
    memory: npt.NDArray[np.float32]


def prepare(signature: Signature, arrays: dict[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
    """Checks ``arrays`` against ``signature`` and gives every vector the column shape of the graph.

    Raises:
        ServingError: an input is missing, unknown, of another dtype or shape, or out of range; names the input.
        NonFiniteError: a NaN or an infinity; names input, row and column.
        EmptyMaskError: a row allows no action; names the row.
    """
    names = {spec.name for spec in signature.inputs}
    if names != arrays.keys():
        missing, unknown = sorted(names - arrays.keys()), sorted(arrays.keys() - names)
        text = f"inputs missing: {missing or 'none'}, unknown: {unknown or 'none'}"
        raise ServingError(text, remedy=f"this model takes {sorted(names)}")
    prepared = {spec.name: _fit(spec, np.asarray(arrays[spec.name])) for spec in signature.inputs}
    lengths = {name: len(array) for name, array in prepared.items()}
    if len(set(lengths.values())) != 1 or not next(iter(lengths.values())):
        raise ServingError(f"rows per input: {lengths}", remedy="pass as many rows, at least one, for each input")
    empty = ~prepared["mask"].any(axis=1)
    if empty.any():
        remedy = "an agent that may do nothing has nothing to ask"
        raise EmptyMaskError("no action is allowed", field="mask", row=int(empty.argmax()), remedy=remedy)
    last = prepared["last_action"]
    if (last < 0).any() or (last > signature.no_action).any():
        remedy = f"pass 0 to {signature.no_action}; {signature.no_action} means none yet"
        raise ServingError("last action out of range", field="last_action", remedy=remedy)
    return prepared


def _fit(spec: TensorSpec, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if array.dtype != spec.numpy:
        remedy = f"convert it on purpose: array.astype(numpy.{spec.dtype})"
        raise ServingError(
            f"{spec.name} is {array.dtype}, the model takes {spec.dtype}", field=spec.name, remedy=remedy
        )
    column = to_columns(spec, array)
    if column.ndim != 1 + len(spec.dims) or column.shape[1:] != spec.dims:
        wanted = ", ".join(["N", *(str(dim) for dim in spec.dims)])
        text = f"{spec.name} has shape {list(array.shape)}, the model takes [{wanted}]"
        raise ServingError(text, field=spec.name, remedy="the first axis counts rows")
    if spec.dtype == "float32" and not np.isfinite(column).all():
        row, *rest = (int(index) for index in np.argwhere(~np.isfinite(column))[0])
        raise NonFiniteError(
            "not finite", field=spec.name, row=row, column=rest[0], remedy="look at the sensor behind it"
        )
    return np.ascontiguousarray(column)


def _served(config: dict[str, Any], model: str) -> tuple[int, Signature]:
    """Largest batch and signature of a served model.

    Raises:
        BundleError: it is none that agentpipe built.
    """
    remedy = "serve a bundle that agentpipe built"
    parameter = config.get("parameters", {}).get("signature", {}).get("string_value")
    if parameter is None:
        raise BundleError("the served model carries no signature", model=model, remedy=remedy)
    try:
        content = json.loads(parameter)
    except ValueError as error:
        raise BundleError(f"the signature of the served model is no JSON: {error}", model=model) from error
    batch = int(config.get("max_batch_size", 0))
    if batch < 1 or not isinstance(content, dict):
        what = "takes one row only" if batch < 1 else "has a malformed signature"
        raise BundleError(f"the served model {what}", model=model, remedy=remedy)
    return batch, Signature.from_json(content)


class PolicyClient(Closing):
    """A connection to one served policy.

    Args:
        url: Host and gRPC port.
        model_name: The model.
        version: A version number as text; the newest when empty.
        timeout: Seconds that a call may take.

    Raises:
        ServiceError: the server cannot be reached, or does not serve the model.
        BundleError: the model is not one that agentpipe built.
    """

    def __init__(
        self, url: str = "127.0.0.1:8001", *, model_name: str = "policy", version: str = "", timeout: float = 5.0
    ) -> None:
        from tritonclient.grpc import InferenceServerClient

        self.url = url
        self.model_name = model_name
        self.version = version
        self.timeout = timeout
        self._connection: InferenceServerClient = InferenceServerClient(url, channel_args=channel_options(url))
        config = self._call("get_model_config", model_name, version, as_json=True)["config"]
        self.max_batch, self.signature = _served(config, model_name)

    def close(self) -> None:
        """Ends the connection."""
        self._connection.close()

    def act(
        self,
        observation: npt.NDArray[np.float32],
        last_action: npt.NDArray[np.int64],
        time: npt.NDArray[np.float32],
        mask: npt.NDArray[np.bool_],
        memory: npt.NDArray[np.float32] | None = None,
    ) -> ServedDecision:
        """Decides N rows: observation f32[N, D] (raw), last_action i64[N], time f32[N] (minutes), mask bool[N, A].

        A policy with a memory also takes ``memory`` f32[N, M]: what it answered to the question before of the same
        episode, :meth:`fresh_memory` before the first.

        Raises:
            ServingError, NonFiniteError, EmptyMaskError: see :func:`prepare`.
            AnswerError: what comes back is no decision: see :func:`~agentpipe.serving.answers.check_answer`.
            ServiceError: the server is away or refuses.
        """
        kept = {} if memory is None else {MEMORY: memory}
        answer = self.decide(observation=observation, last_action=last_action, time=time, mask=mask, **kept)
        return ServedDecision(*Outputs.of(answer))

    def fresh_memory(self, rows: int) -> npt.NDArray[np.float32]:
        """The memory f32[rows, M] of episodes before their first question: zeros."""
        return np.zeros((rows, self.signature.memory_size), np.float32)

    def decide(self, **arrays: npt.NDArray[Any]) -> dict[str, npt.NDArray[Any]]:
        """The same with inputs and outputs by the names of the served signature, vectors as columns ``[N, 1]``."""
        prepared = prepare(self.signature, arrays)
        rows = len(prepared["mask"])
        parts = [self._infer(prepared, slice(at, at + self.max_batch)) for at in range(0, rows, self.max_batch)]
        outputs = {spec.name: np.concatenate([part[spec.name] for part in parts]) for spec in self.signature.outputs}
        refused = outputs["action"][:, 0] < 0
        if refused.any():
            raise EmptyMaskError("the policy found no allowed action", field="mask", row=int(refused.argmax()))
        return outputs

    def _infer(self, arrays: dict[str, npt.NDArray[Any]], rows: slice) -> dict[str, npt.NDArray[Any]]:
        from tritonclient.grpc import InferInput, InferRequestedOutput

        inputs = []
        for spec in self.signature.inputs:
            part = np.ascontiguousarray(arrays[spec.name][rows])
            tensor = InferInput(spec.name, list(part.shape), WIRE_TYPES[spec.dtype])
            tensor.set_data_from_numpy(part)
            inputs.append(tensor)
        wanted = [InferRequestedOutput(spec.name) for spec in self.signature.outputs]
        result = self._call("infer", self.model_name, inputs, self.version, wanted)
        try:
            outputs = {spec.name: result.as_numpy(spec.name) for spec in self.signature.outputs}
        except (ValueError, TypeError) as error:
            raise AnswerError(f"the answer is not a table of tensors: {error}", url=self.url) from error
        return check_answer(self.signature, len(arrays["mask"][rows]), outputs)

    def _call(self, method: str, *arguments: object, **options: object) -> Any:  # noqa: ANN401 - as varied as the methods
        from tritonclient.utils import InferenceServerException

        try:
            return getattr(self._connection, method)(*arguments, client_timeout=self.timeout, **options)
        except InferenceServerException as error:
            remedy = "is the server running, and does it serve this model?"
            raise ServiceError(
                f"{method} failed: {error}", url=self.url, model=self.model_name, remedy=remedy
            ) from error
