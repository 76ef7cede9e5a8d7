"""How long one decision takes: torch and ONNX Runtime side by side, batch 1, one thread."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from agentpipe.serving.runtime import OneRow, open_session, run_module, run_session

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    import torch

    from agentpipe.serving.inputs import PolicyInputs


@dataclass(frozen=True)
class LatencyReport:
    """Wall milliseconds of one decision."""

    torch_p50_ms: float
    torch_p99_ms: float
    onnx_p50_ms: float
    onnx_p99_ms: float
    repeats: int
    lean_p50_ms: float | None = None
    """ONNX Runtime with buffers bound once; None in bundles of before that was measured"""
    lean_p99_ms: float | None = None

    def to_json(self) -> dict[str, Any]:
        """The report as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> LatencyReport:
        """Reads what :meth:`to_json` wrote."""
        return cls(**content)


def measure_latency(
    module: torch.nn.Module, onnx_path: Path, example: PolicyInputs, *, repeats: int = 500
) -> LatencyReport:
    """Times single decisions on the first row of ``example``, after a warm-up. torch's thread count is restored."""
    import torch

    row = example.rows(slice(0, 1))
    session = open_session(onnx_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        eager = _times(lambda: run_module(module, row), repeats)
    finally:
        torch.set_num_threads(threads)
    served = _times(lambda: run_session(session, row, 1), repeats)
    one = OneRow(session)
    arguments = (row.observation[0], int(row.last_action[0]), float(row.time[0]), row.mask[0], row.memory[0])
    lean = _times(lambda: one.act(*arguments), repeats)
    return LatencyReport(*_percentiles_ms(eager), *_percentiles_ms(served), repeats, *_percentiles_ms(lean))


def latency_table(bundle: Mapping[str, Any], server: Mapping[str, float]) -> str:
    """One decision by each way of running the policy, in milliseconds, as a Markdown table.

    Args:
        bundle: ``latency_torch_p50_ms``, ``latency_p50_ms``, ``latency_lean_p50_ms`` and the same of ``p99``.
        server: What a server check measured over gRPC; empty where there was none.
    """
    ways = [
        ("torch, eager, in this process", bundle, "latency_torch"),
        ("ONNX Runtime, in this process", bundle, "latency"),
        ("ONNX Runtime, in this process, buffers bound once", bundle, "latency_lean"),
        ("Triton over gRPC, one client, which waits for company as long as the queue lets it", server, "1_client"),
        ("Triton over gRPC, 16 clients", server, "16_clients"),
    ]
    rows = [
        f"| {name} | {figures[f'{key}_p50_ms']:.3f} | {figures[f'{key}_p99_ms']:.3f} |"
        for name, figures, key in ways
        if figures.get(f"{key}_p50_ms") is not None
    ]
    note = "torch.compile is left out: its first call takes some 20 s, for a network that ONNX Runtime runs faster."
    return "\n".join(["| one decision | p50, ms | p99, ms |", "|---|---:|---:|", *rows, "", note])


def _percentiles_ms(seconds: list[float]) -> tuple[float, float]:
    p50, p99 = np.percentile(seconds, (50, 99)) * 1e3
    return round(float(p50), 4), round(float(p99), 4)


def _times(call: Callable[[], object], repeats: int) -> list[float]:
    for _ in range(max(10, repeats // 10)):
        call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times
