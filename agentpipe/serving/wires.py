"""Raw questions to one loaded model over either protocol: nothing is checked before they are sent.

The client of :mod:`~agentpipe.serving.client` refuses bad input itself; here it is the server that must.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from agentpipe.errors import AnswerError, RefusedError, ServiceError
from agentpipe.serving.loopback import channel_options
from agentpipe.serving.signature import WIRE_TYPES

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from tritonclient.grpc import InferenceServerClient
    from tritonclient.utils import InferenceServerException

    from agentpipe.serving.http_api import HttpServer

_UNREACHABLE = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "UNKNOWN")


class Wire(Protocol):
    """One protocol."""

    name: str

    def infer(self, arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        """Every output by its name; RefusedError where the server refuses, ServiceError where it is away."""
        ...


class HttpWire:
    """HTTP with JSON."""

    name = "HTTP"

    def __init__(self, server: HttpServer, model: str) -> None:
        self.server, self.model = server, model

    def infer(self, arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        """See :class:`Wire`."""
        return self.server.infer(self.model, arrays)


class GrpcWire:
    """gRPC; a context manager, closed on leaving."""

    name = "gRPC"

    def __init__(self, url: str, model: str, *, timeout: float = 60.0) -> None:
        from tritonclient.grpc import InferenceServerClient

        self.url, self.model, self.timeout = url, model, timeout
        self._connection: InferenceServerClient = InferenceServerClient(url, channel_args=channel_options(url))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()

    def ready(self) -> bool:
        """Whether the server has the model; RefusedError and ServiceError as of :meth:`infer`."""
        from tritonclient.utils import InferenceServerException

        try:
            return bool(self._connection.is_model_ready(self.model, client_timeout=self.timeout))
        except InferenceServerException as error:
            raise grpc_error(error, self.url, self.model) from error

    def infer(self, arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        """See :class:`Wire`."""
        from tritonclient.grpc import InferInput
        from tritonclient.utils import InferenceServerException, np_to_triton_dtype

        inputs = []
        for name, array in arrays.items():
            wire = WIRE_TYPES.get(str(array.dtype)) or np_to_triton_dtype(array.dtype)
            tensor = InferInput(name, list(array.shape), wire)
            tensor.set_data_from_numpy(np.ascontiguousarray(array))
            inputs.append(tensor)
        try:
            result = self._connection.infer(self.model, inputs, client_timeout=self.timeout)
        except InferenceServerException as error:
            raise grpc_error(error, self.url, self.model) from error
        try:
            return {output.name: result.as_numpy(output.name) for output in result.get_response().outputs}
        except (ValueError, TypeError) as error:
            raise AnswerError(
                f"the answer is not a table of tensors: {error}", url=self.url, model=self.model
            ) from error


def grpc_error(error: InferenceServerException, url: str, model: str) -> ServiceError:
    """The typed error for what the gRPC client raises."""
    status = str(error.status() or "").removeprefix("StatusCode.")
    if not status or status in _UNREACHABLE:
        remedy = "is the server running, and does it serve gRPC at this address?"
        return ServiceError(f"no answer: {error.message()}", url=url, model=model, remedy=remedy)
    return RefusedError(str(error.message()), url=url, model=model, status=status)
