"""Triton over HTTP with JSON, as anything without a client library speaks to it: the KServe protocol, version 2."""

from __future__ import annotations

import base64
import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from agentpipe.errors import AnswerError, RefusedError, ServiceError
from agentpipe.serving.loopback import http_opener
from agentpipe.serving.signature import WIRE_TYPES

if TYPE_CHECKING:
    from collections.abc import Mapping

_DTYPES = {wire: np.dtype(name) for name, wire in WIRE_TYPES.items()} | {
    "FP64": np.dtype(np.float64),
    "INT32": np.dtype(np.int32),
}
_WIRE = {dtype: wire for wire, dtype in _DTYPES.items()}


class HttpServer:
    """One Triton by its HTTP address.

    Args:
        url: ``host:port``, with or without ``http://``.
        timeout: Seconds that a request may take, all in all.
    """

    def __init__(self, url: str, *, timeout: float = 10.0) -> None:
        self.address = url.removeprefix("http://").rstrip("/")
        self.timeout = timeout

    def metadata(self) -> dict[str, Any]:
        """``name``, ``version`` and ``extensions`` of the server."""
        return self._call("GET", "v2", timeout=min(self.timeout, 10.0))  # one that is not there is soon found out

    def load(
        self, model: str, config: Mapping[str, Any] | None = None, files: Mapping[str, bytes] | None = None
    ) -> None:
        """Loads a model from the server's repository, or from ``config`` and ``files`` (``1/model.onnx``: its bytes).

        Raises:
            RefusedError: the server does not take it; the message says why.
            ServiceError: it cannot be reached.
        """
        parameters: dict[str, str] = {}
        if config is not None:
            parameters["config"] = json.dumps(config)
        for name, data in (files or {}).items():
            parameters[f"file:{name}"] = base64.b64encode(data).decode()
        self._call("POST", f"v2/repository/models/{_quoted(model)}/load", {"parameters": parameters})

    def unload(self, model: str) -> None:
        """Takes a model out of service."""
        self._call("POST", f"v2/repository/models/{_quoted(model)}/unload", {})

    def ready(self, model: str) -> bool:
        """Whether the server answers for ``model``."""
        try:
            self._call("GET", f"v2/models/{_quoted(model)}/ready")
        except RefusedError:
            return False
        return True

    def config(self, model: str) -> dict[str, Any]:
        """The configuration that the server has of ``model``, as a JSON object."""
        return self._call("GET", f"v2/models/{_quoted(model)}/config")

    def statistics(self, model: str) -> list[dict[str, Any]]:
        """Counters of each version of ``model`` that is loaded."""
        found = self._call("GET", f"v2/models/{_quoted(model)}/stats").get("model_stats")
        if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
            raise AnswerError("statistics without model_stats", url=self.address, model=model)
        return found

    def infer(self, model: str, arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        """What ``model`` answers to one request: every output by its name.

        Raises:
            RefusedError: the server refuses the request.
            AnswerError: what it answers is not a table of tensors.
            ServiceError: it cannot be reached.
        """
        inputs = [
            {"name": name, "shape": list(array.shape), "datatype": _WIRE[array.dtype], "data": array.ravel().tolist()}
            for name, array in arrays.items()
        ]
        answer = self._call("POST", f"v2/models/{_quoted(model)}/infer", {"inputs": inputs})
        try:
            return {
                str(each["name"]): np.array(each["data"], dtype=_DTYPES[each["datatype"]]).reshape(each["shape"])
                for each in answer["outputs"]
            }
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise AnswerError(
                f"the answer is not a table of tensors: {error!r}", url=self.address, model=model
            ) from error

    def _call(self, method: str, path: str, content: object = None, timeout: float | None = None) -> dict[str, Any]:
        data = None if content is None else json.dumps(content).encode()
        request = urllib.request.Request(
            f"http://{self.address}/{path}", data, {"Content-Type": "application/json"}, method=method
        )
        try:
            with http_opener(self.address).open(request, timeout=timeout or self.timeout) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            raise RefusedError(_reason(error), url=self.address, status=error.code) from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            remedy = "is the server running at this address?"
            raise ServiceError(f"no answer: {error}", url=self.address, remedy=remedy) from error
        try:
            found = json.loads(text) if text else {}
        except ValueError as error:
            raise AnswerError(f"the answer is not JSON: {error}", url=self.address) from error
        if not isinstance(found, dict):
            raise AnswerError("the answer is not a JSON object", url=self.address)
        return found


def _quoted(model: str) -> str:
    return urllib.parse.quote(model, safe="")


def _reason(error: urllib.error.HTTPError) -> str:
    """What the server says of a refused request."""
    text = ""
    try:
        text = error.read(10_000).decode(errors="replace")
        said = json.loads(text)["error"]
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):  # it may hang within its reason
        said = text or error.reason
    return str(said).strip()
