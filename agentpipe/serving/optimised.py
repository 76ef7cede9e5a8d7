"""What ONNX Runtime makes of a graph before it runs it: which operators it fuses."""

from __future__ import annotations

import tempfile
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from agentpipe.serving.runtime import open_session

if TYPE_CHECKING:
    from collections.abc import Mapping

_ONE_OPERATOR: Final = ("Attention", "Gelu", "LayerNormalization")
"""operators of the standard that stand for a subgraph of simple ones: fused by the export already"""


@dataclass(frozen=True)
class OptimisedGraph:
    """Operators by name and how many of each, the runtime's own as ``com.microsoft::Name``; ``runtime`` made it so."""

    operators: dict[str, int] = field(default_factory=dict)
    runtime: str = ""

    @property
    def fused(self) -> dict[str, int]:
        """Those of them that stand for several simple ones."""
        return {name: count for name, count in self.operators.items() if "::" in name or name in _ONE_OPERATOR}

    def to_json(self) -> dict[str, Any]:
        """The graph as a JSON object."""
        return asdict(self)


def optimise(path: Path) -> OptimisedGraph:
    """Has ONNX Runtime optimise the graph at ``path`` as for running it on this machine, and looks at the result.

    Raises:
        BundleError: ONNX Runtime refuses the graph.
    """
    import onnx
    import onnxruntime

    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "optimised.onnx"
        open_session(path, optimised=written)
        nodes = onnx.load(written).graph.node
    counts = Counter(f"{node.domain}::{node.op_type}" if node.domain else node.op_type for node in nodes)
    return OptimisedGraph(dict(sorted(counts.items())), f"onnxruntime {onnxruntime.__version__}")


def operator_table(exported: Mapping[str, int], optimised: OptimisedGraph) -> str:
    """Operators as exported and as run, as a Markdown table, with a line on what is fused."""
    names = sorted({*exported, *optimised.operators}, key=lambda name: ("::" not in name, name))
    rows = [f"| {name} | {exported.get(name, 0)} | {optimised.operators.get(name, 0)} |" for name in names]
    total = f"| all | {sum(exported.values())} | {sum(optimised.operators.values())} |"
    fused = ", ".join(f"{count} {name}" for name, count in optimised.fused.items()) or "nothing"
    return "\n".join(
        [
            f"Fused by {optimised.runtime}: {fused}.",
            "",
            "| operator | exported | run |",
            "|---|---:|---:|",
            *rows,
            total,
        ]
    )
