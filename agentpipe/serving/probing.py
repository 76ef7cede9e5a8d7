"""The looks that a server check takes at a bundle in a server. Each returns figures, or raises what is wrong."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np

from agentpipe.errors import AnswerError, BundleError, ParityError, RefusedError
from agentpipe.serving import layout
from agentpipe.serving.answers import check_answer
from agentpipe.serving.parity import BATCHES, compare, summarise
from agentpipe.serving.reference import read_reference
from agentpipe.serving.runtime import Outputs
from agentpipe.serving.signature import Signature
from agentpipe.serving.wires import GrpcWire, HttpWire
from agentpipe.storage import read_json

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from types import TracebackType

    import numpy.typing as npt

    from agentpipe.serving.inputs import PolicyInputs
    from agentpipe.serving.places import Loaded
    from agentpipe.serving.wires import Wire

CLIENTS: Final = 16
_REQUESTS: Final = 20  # of each client
_LONE_REQUESTS: Final = 20
_ROUNDS: Final = 5  # before a server that batched nothing is believed not to batch
_SETTLING: Final = 40
_SETTLING_SECONDS: Final = 0.05


class Probe:
    """Looks at one loaded bundle; a context manager.

    ``latency`` holds milliseconds of a decision over gRPC once :meth:`batching` has looked.
    """

    def __init__(self, bundle: Path, loaded: Loaded) -> None:
        self.loaded = loaded
        self.signature = Signature.from_json(read_json(bundle / layout.SIGNATURE), layout.SIGNATURE)
        self.inputs, self.expected = read_reference(bundle / layout.REFERENCE, self.signature)
        self.latency: dict[str, float] = {}
        self._stack = contextlib.ExitStack()
        self._grpc = self._connect()
        self._wires: tuple[Wire, ...] = (HttpWire(loaded.http, loaded.model), self._grpc)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _connect(self) -> GrpcWire:
        return self._stack.enter_context(GrpcWire(self.loaded.grpc, self.loaded.model))

    # ------------------------------------------------------------------------------------------ the looks

    def configuration(self) -> dict[str, Any]:
        """Every field that was sent comes back with its value; what the server adds is listed.

        Raises:
            BundleError: a field is missing or another one; the message names it.
        """
        from google.protobuf import json_format
        from tritonclient.grpc.model_config_pb2 import ModelConfig

        found = self.loaded.http.config(self.loaded.model)
        try:
            returned = json_format.ParseDict(found, ModelConfig(), ignore_unknown_fields=True)
        except json_format.ParseError as error:
            raise BundleError(f"what the server returns is no configuration: {error}", field="config") from error
        sent, back = (
            json_format.MessageToDict(message, preserving_proto_field_name=True)
            for message in (self.loaded.config, returned)
        )
        _same(sent, back, "config")
        return {"fields": len(sent), "added": ", ".join(sorted(back.keys() - sent.keys())) or "nothing"}

    def values(self) -> dict[str, Any]:
        """The reference rows over both protocols, 1, 7 and 64 in a request, against what the policy answered.

        Raises:
            ParityError: beyond the tolerances.
            AnswerError: an answer is no decision.
        """
        figures = [
            compare(wire.name, batch, self.expected, self._ask_all(wire, batch), self.inputs)
            for wire in self._wires
            for batch in BATCHES
        ]
        worst = summarise(figures)
        return {
            "rows": len(self.inputs),
            "protocols": ", ".join(wire.name for wire in self._wires),
            "batches": ", ".join(str(batch) for batch in BATCHES),
            "max_abs_probability": worst.max_abs_probability,
            "max_relative_value": worst.max_relative_value,
            "ties": worst.ties,
        }

    def empty_mask(self) -> dict[str, Any]:
        """Rows in which no action is allowed give action -1 and no probability.

        Raises:
            ParityError: they do not.
        """
        rows = self.inputs.rows(slice(0, 4))
        arrays = {**rows.columns(), "mask": np.zeros_like(rows.mask)}
        for wire in self._wires:
            answer = check_answer(self.signature, len(rows), wire.infer(arrays))
            if (answer["action"] != -1).any() or answer["probabilities"].any():
                text = f"an empty mask gives action {answer['action'][:, 0].tolist()} over {wire.name}"
                raise ParityError(text, field="action")
        return {"rows": len(rows), "action": -1}

    def refusals(self) -> dict[str, Any]:
        """Wrong shapes, dtypes and sizes are refused over both protocols, and the server answers afterwards.

        Raises:
            ParityError: one is taken.
        """
        good = self.inputs.rows(slice(0, 1)).columns()
        many = self.inputs.rows(np.arange(self.loaded.config.max_batch_size + 1) % len(self.inputs)).columns()
        wrong: dict[str, Mapping[str, npt.NDArray[Any]]] = {
            "one feature more": {**good, "observation": np.pad(good["observation"], ((0, 0), (0, 1)))},
            "no batch dimension": {**good, "observation": good["observation"][0]},
            "float64 observation": {**good, "observation": good["observation"].astype(np.float64)},
            "int32 last_action": {**good, "last_action": good["last_action"].astype(np.int32)},
            "mask missing": {name: array for name, array in good.items() if name != "mask"},
            "more rows than the largest batch": many,
        }
        for wire in self._wires:
            for what, arrays in wrong.items():
                try:
                    wire.infer(arrays)
                except RefusedError:
                    continue
                raise ParityError(f"{what} is taken over {wire.name}", field=what)
            check_answer(self.signature, 1, wire.infer(good))
        return {"refused": ", ".join(wrong)}

    def batching(self) -> dict[str, Any]:
        """Rows that 16 clients ask for one by one are computed together: by the server's own counters.

        Raises:
            ParityError: they are not.
        """
        self._time_alone()
        for _ in range(_ROUNDS):
            before = self._settled_counters()
            self._time_together()
            after = self._settled_counters()
            rows, executions = (after[name] - before[name] for name in ("inference_count", "execution_count"))
            if 0 < 2 * executions <= rows:
                break
        else:
            text = f"{rows} rows of {CLIENTS} clients took {executions} executions: they are not batched"
            raise ParityError(text, field="execution_count")
        return {"clients": CLIENTS, "rows": rows, "executions": executions, "mean_batch": round(rows / executions, 2)}

    # ------------------------------------------------------------------------------------------ asking

    def _ask_all(self, wire: Wire, batch: int) -> Outputs:
        """All reference rows, ``batch`` in a request, several requests at once so that none waits for the batcher."""

        def ask(start: int) -> dict[str, npt.NDArray[Any]]:
            rows = self.inputs.rows(slice(start, start + batch))
            return check_answer(self.signature, len(rows), wire.infer(rows.columns()))

        with ThreadPoolExecutor(CLIENTS) as threads:
            parts = list(threads.map(ask, range(0, len(self.inputs), batch)))
        return Outputs.of({name: np.concatenate([part[name] for part in parts]) for name in parts[0]})

    def _settled_counters(self) -> dict[str, int]:
        """The server counts a request after it has answered it: what it says once it says the same twice."""
        counters = self._counters()
        for _ in range(_SETTLING):
            time.sleep(_SETTLING_SECONDS)
            last, counters = counters, self._counters()
            if last == counters:
                break
        return counters

    def _counters(self) -> dict[str, int]:
        for each in self.loaded.http.statistics(self.loaded.model):
            if str(each.get("version")) == self.loaded.version:
                return {name: int(each[name]) for name in ("inference_count", "execution_count")}
        raise AnswerError("the server has no statistics of the version", model=self.loaded.model)

    def _row(self, index: int) -> PolicyInputs:
        at = index % len(self.inputs)
        return self.inputs.rows(slice(at, at + 1))

    def _time_alone(self) -> None:
        self._note("1_client", self._times(self._grpc, 0, _LONE_REQUESTS))

    def _time_together(self) -> None:
        wires = [self._connect() for _ in range(CLIENTS)]
        with ThreadPoolExecutor(CLIENTS) as threads:
            clients = list(threads.map(self._times, wires, range(CLIENTS), [_REQUESTS] * CLIENTS))
        self._note(f"{CLIENTS}_clients", [second for times in clients for second in times])

    def _times(self, wire: Wire, first: int, requests: int) -> list[float]:
        """Seconds of each of ``requests`` decisions, one after the other."""
        times = []
        for index in range(first, first + requests):
            columns = self._row(index).columns()
            start = time.perf_counter()
            wire.infer(columns)
            times.append(time.perf_counter() - start)
        return times

    def _note(self, name: str, seconds: list[float]) -> None:
        p50, p99 = (round(float(value) * 1e3, 3) for value in np.percentile(seconds, (50, 99)))
        self.latency |= {f"{name}_p50_ms": p50, f"{name}_p99_ms": p99}


def _same(sent: object, back: object, where: str) -> None:
    """Raises BundleError where ``back`` lacks something of ``sent``, or has another value for it."""
    if isinstance(sent, dict) and isinstance(back, dict):
        for name, value in sent.items():
            if name not in back:
                raise BundleError(f"the server has no {where}.{name}", field=f"{where}.{name}")
            _same(value, back[name], f"{where}.{name}")
    elif isinstance(sent, list) and isinstance(back, list) and len(sent) == len(back):
        for index, (one, other) in enumerate(zip(sent, back, strict=True)):
            _same(one, other, f"{where}[{index}]")
    elif sent != back:
        raise BundleError(f"{where} is {back!r} in the server, {sent!r} in the bundle", field=where)
