"""A policy behind Triton's gRPC front end, asked within a deadline and known by its answers."""

from __future__ import annotations

import contextlib
import json
import time
from typing import TYPE_CHECKING, Any, Final

from agentpipe.errors import BundleError, ServiceError, ServingError
from agentpipe.serving.agent.deciders import (
    KnownRows,
    PolicyFiles,
    answered,
    fill_inputs,
    frame_inputs,
    read_known_rows,
    read_policy,
)
from agentpipe.serving.agent.states import OrderStates
from agentpipe.serving.loopback import channel_options
from agentpipe.serving.signature import WIRE_TYPES, Signature

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import numpy.typing as npt
    from tritonclient.grpc import InferenceServerClient

    from agentpipe.serving.agent.types import Answer, Frame

# gRPC's own waiting between attempts to connect grows to two minutes; keep-alive finds a peer that is silent.
_CHANNEL: Final = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 2_000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
)
_REMEDY: Final = "is the server running, and does it serve this model?"


class TritonDecider:
    """One Triton. The constructor reads files only; the first :meth:`probe` connects, and later ones connect again.

    The model's signature must be that of ``bundle``, and known rows must be answered as the bundle's policy answers
    them: a server of another policy is refused, not used. The newest version is looked at, and then the one that
    answered so is asked, also while a server loads a newer one beside it.

    Args:
        url: host and gRPC port.
        bundle: the bundle that is served there, or what
            :func:`~agentpipe.serving.agent.deciders.read_policy` read of it.
        name: on the ladder.
        states: as of :class:`~agentpipe.serving.agent.deciders.LocalDecider`.

    Raises:
        BundleError: the bundle is damaged.
    """

    def __init__(
        self, url: str, bundle: Path | PolicyFiles, name: str = "triton", states: OrderStates | None = None
    ) -> None:
        self.url, self.name = url, name
        self.files = bundle if isinstance(bundle, PolicyFiles) else read_policy(bundle)
        self._inputs = frame_inputs(self.files.signature)
        self._states = OrderStates() if states is None else states
        self._found: tuple[InferenceServerClient, str] | None = None
        """the connection, and the version of the model that is this policy"""
        self._known: KnownRows | None = None

    @property
    def policy_version(self) -> str:
        """Digest of the package whose policy it is."""
        return self.files.version

    def decide(self, frame: Frame, timeout: float) -> Answer:
        """The server's answer, within ``timeout`` seconds.

        Raises:
            ServiceError: no probe has connected yet, the server is away, refuses, or does not answer in time.
            ServingError: sizes differ, or the answer is no answer.
        """
        if self._found is None:
            raise ServiceError("not connected", decider=self.name, url=self.url, remedy=_REMEDY)
        notes = fill_inputs(self._inputs, frame, self.files, self._states, self.name)
        outputs, _ = self._infer(*self._found, self._inputs, timeout)
        return answered(frame, outputs, self.files, self._states, self.name, notes)

    def probe(self, timeout: float) -> None:
        """Connects where there is no connection, and asks known rows. May run in another thread than :meth:`decide`.

        Raises:
            ServiceError: the server is away, refuses, or does not answer in time.
            BundleError: the served model has another signature, or none; or the reference rows cannot be read.
            ServingError, ParityError: known rows are answered with nonsense, or by another policy.
        """
        end = time.monotonic() + timeout
        self._known = self._known or read_known_rows(self.files)
        client, version = self._found or (None, "")
        new = client is None
        try:
            client = client or self._open()
            if new:
                self._check_signature(client, end - time.monotonic())
            outputs, version = self._infer(client, version, self._known.inputs, end - time.monotonic())
            self._known.compare(outputs, self.name)
        except ServingError:
            self._found = None  # a connection that hangs is not waited for: the next probe makes another
            if client is not None:
                client.close()
            raise
        self._found = (client, version)

    def close(self) -> None:
        """Ends the connection."""
        found, self._found = self._found, None
        if found is not None:
            found[0].close()

    def _open(self) -> InferenceServerClient:
        from tritonclient.grpc import InferenceServerClient
        from tritonclient.utils import InferenceServerException

        try:
            return InferenceServerClient(self.url, channel_args=channel_options(self.url, _CHANNEL))
        except (InferenceServerException, ValueError) as error:
            raise ServiceError(f"no gRPC address: {error}", url=self.url, remedy=_REMEDY) from error

    def _check_signature(self, client: InferenceServerClient, timeout: float) -> None:
        model = self.files.model_name
        config = self._call(client, "get_model_config", timeout, model, as_json=True)["config"]
        text = config.get("parameters", {}).get("signature", {}).get("string_value")
        found: Signature | None = None
        with contextlib.suppress(json.JSONDecodeError, TypeError):
            found = Signature.from_json(json.loads(text))
        if found != self.files.signature:
            remedy = "serve the bundle that this agent was given"
            raise BundleError("the served model has another signature", url=self.url, model=model, remedy=remedy)

    def _infer(
        self, client: InferenceServerClient, version: str, inputs: Mapping[str, npt.NDArray[Any]], timeout: float
    ) -> tuple[dict[str, npt.NDArray[Any]], str]:
        """The outputs, and the version of the model that gave them."""
        from tritonclient.grpc import InferInput

        tensors = []
        for spec in self.files.signature.inputs:
            tensor = InferInput(spec.name, list(inputs[spec.name].shape), WIRE_TYPES[spec.dtype])
            tensor.set_data_from_numpy(inputs[spec.name])
            tensors.append(tensor)
        result = self._call(client, "infer", timeout, self.files.model_name, tensors, model_version=version)
        try:
            outputs = {spec.name: result.as_numpy(spec.name) for spec in self.files.signature.outputs}
        except (ValueError, TypeError) as error:  # bytes that are no array of the shape and dtype that they claim
            raise ServingError(f"no answer: {error}", decider=self.name, url=self.url, remedy=_REMEDY) from error
        missing = [name for name, array in outputs.items() if array is None]
        if missing:
            raise ServingError(f"no answer: {missing} missing", decider=self.name, url=self.url, remedy=_REMEDY)
        return outputs, str(result.get_response().model_version)

    def _call(
        self, client: InferenceServerClient, method: str, timeout: float, *given: object, **options: object
    ) -> Any:  # noqa: ANN401 - as varied as the methods
        from tritonclient.utils import InferenceServerException

        if timeout <= 0:
            raise ServiceError("no time is left", decider=self.name, url=self.url)
        try:
            return getattr(client, method)(*given, client_timeout=timeout, **options)
        except InferenceServerException as error:
            text = f"{method} failed: {error.status() or ''} {error.message()}"
            raise ServiceError(text, decider=self.name, url=self.url, remedy=_REMEDY) from error
        except ValueError as error:  # gRPC's, of a channel that a probe has just given up
            raise ServiceError(f"{method} failed: {error}", decider=self.name, url=self.url, remedy=_REMEDY) from error
