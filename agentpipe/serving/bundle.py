"""Building a Triton bundle from a policy package: exported, compared, measured, sealed, then published by rename."""

from __future__ import annotations

import datetime as dt
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from agentpipe.errors import BundleError
from agentpipe.learning.policy.lineage import LABELS
from agentpipe.progress import Progress, silent
from agentpipe.serving import layout
from agentpipe.serving.export import ExportReport, export_policy
from agentpipe.serving.latency import LatencyReport, measure_latency
from agentpipe.serving.optimised import OptimisedGraph, optimise
from agentpipe.serving.parity import ParityReport, check_parity, synthetic_inputs
from agentpipe.serving.reference import reference_inputs, write_reference
from agentpipe.serving.signature import Signature, policy_signature
from agentpipe.serving.triton_config import MODEL_FILE, build_config, config_text, cross_check
from agentpipe.serving.verify import verify_bundle
from agentpipe.storage import publish_directory, read_json, typed_os_errors, write_bytes, write_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agentpipe.learning.policy.package import PolicyPackage
    from agentpipe.serving.inputs import PolicyInputs

_STAGE: Final = "triton bundle"


@dataclass(frozen=True)
class Bundle:
    """A published bundle. ``path`` is a whole Triton model repository; ``digest`` covers content, never times."""

    path: Path
    digest: str
    model_name: str
    version: int
    promotable: bool
    size_bytes: int
    package_bytes: int
    export: ExportReport
    parity: ParityReport
    latency: LatencyReport
    optimised: OptimisedGraph = field(default_factory=OptimisedGraph)
    """what ONNX Runtime made of the graph where the bundle was built; empty in bundles of before that was kept"""

    def figures(self) -> dict[str, Any]:
        """What a person wants at a glance, as a flat JSON object."""
        return {
            "path": str(self.path),
            "digest": self.digest,
            "model": f"{self.model_name}/{self.version}",
            "promotable": self.promotable,
            "size_bytes": self.size_bytes,
            "package_bytes": self.package_bytes,
            "onnx_opset": self.export.opset,
            "unsupported_operators": list(self.export.unsupported),
            "nodes_exported": sum(self.export.operators.values()),
            "nodes_optimised": sum(self.optimised.operators.values()),
            "fused_operators": self.optimised.fused,
            "parity_max_abs_diff": self.parity.max_abs_probability,
            "parity_value_max_rel_diff": self.parity.max_relative_value,
            "parity_rows": self.parity.rows,
            "parity_ties": self.parity.ties,
            "latency_torch_p50_ms": self.latency.torch_p50_ms,
            "latency_torch_p99_ms": self.latency.torch_p99_ms,
            "latency_lean_p50_ms": self.latency.lean_p50_ms,
            "latency_lean_p99_ms": self.latency.lean_p99_ms,
            "latency_p50_ms": self.latency.onnx_p50_ms,
            "latency_p99_ms": self.latency.onnx_p99_ms,
        }


def gate_figures(bundle: Bundle, *, champion_package_bytes: int | None = None) -> dict[str, Any]:
    """The figures that gate 6 judges; the champion's size is None while there is no champion."""
    return {
        "checkpoint_bytes": bundle.package_bytes,
        "champion_checkpoint_bytes": champion_package_bytes,
        "latency_p99_ms": bundle.latency.onnx_p99_ms,
        "unsupported_operators": list(bundle.export.unsupported),
        "parity_max_abs_diff": bundle.parity.max_abs_probability,
        "parity_value_max_rel_diff": bundle.parity.max_relative_value,
    }


@dataclass(frozen=True)
class _Plan:
    """What a bundle says of itself besides its weights."""

    provenance: Mapping[str, Any]
    evaluation: Mapping[str, Any]
    promotable: bool
    reasons: Sequence[str]
    model_name: str
    version: int
    seed: int


def build_bundle(  # noqa: PLR0913 - each says something else of the bundle
    package_dir: Path,
    out_root: Path,
    *,
    provenance: Mapping[str, Any],
    evaluation: Mapping[str, Any],
    promotable: bool,
    reasons: Sequence[str] = (),
    recorded: PolicyInputs | None = None,
    model_name: str = "policy",
    version: int = 1,
    seed: int = 0,
    progress: Progress = silent,
) -> Bundle:
    """Builds, checks and publishes the bundle of a policy package; ``out_root/bundle-<digest>`` appears whole or not.

    Args:
        package_dir: A saved :class:`~agentpipe.learning.policy.package.PolicyPackage`; it is read and never changed.
        out_root: Folder of all bundles.
        provenance: JSON: versions and digests of what the policy came from. No times: it is part of the digest.
        evaluation: JSON: the figures on which the policy was judged. No times either.
        promotable: May this bundle become champion?
        reasons: Why not; needed when ``promotable`` is False, and only then.
        recorded: Observations to compare graph and policy on; synthetic ones when None.
        model_name: Folder and name of the model.
        version: Number of the version folder, at least 1.
        seed: Draws the masks and the extreme observations that are compared.
        progress: Told of each step.

    Building the same content twice gives the same directory; a healthy one that is there is not built again.

    Raises:
        BundleError: bad arguments, an operator that cannot be exported, or a graph that does not fit its configuration.
        ParityError: the graph does not decide like the policy.
        CheckpointError: the package is damaged.
        DiskFullError, HomeError: ``out_root`` cannot be written.
    """
    if promotable == bool(reasons):
        remedy = "give reasons exactly when promotable is False"
        raise BundleError("a bundle that is not promotable says why", field="reasons", remedy=remedy)
    if version < 1:
        raise BundleError(f"version {version}", field="version", remedy="versions count from 1")
    from agentpipe.learning.policy.package import PolicyPackage

    progress(_STAGE, 0, 5, "load the policy package")
    package = PolicyPackage.load(package_dir)
    plan = _Plan(provenance, evaluation, promotable, reasons, model_name, version, seed)
    with typed_os_errors(out_root):
        out_root.mkdir(parents=True, exist_ok=True)
        scratch_folder = tempfile.TemporaryDirectory(prefix=".staging-bundle-", dir=out_root)
    with scratch_folder as scratch:
        draft = Path(scratch) / "bundle"
        digest = _draft(draft, package, package_dir, recorded, plan, progress)
        final = out_root / f"bundle-{digest[:16]}"
        progress(_STAGE, 4, 5, "publish")
        if not _healthy(final, digest):
            with publish_directory(final) as staging:
                shutil.copytree(draft, staging, dirs_exist_ok=True)
    bundle = open_bundle(final)
    progress(_STAGE, 5, 5, f"bundle {digest[:12]}")
    return bundle


def _draft(
    draft: Path,
    package: PolicyPackage,
    package_dir: Path,
    recorded: PolicyInputs | None,
    plan: _Plan,
    progress: Progress,
) -> str:
    """Writes and checks a complete bundle at ``draft``; returns its digest."""
    signature = policy_signature(
        len(package.observation_names),
        len(package.action_names),
        memory=package.memory_size,
        simulator_version=package.simulator_version,
        observation_names=package.observation_names,
        action_names=package.action_names,
    )
    inputs = recorded or synthetic_inputs(signature.observation_size, signature.action_count, seed=plan.seed)
    if signature.memory_size:
        inputs = inputs.remembering(signature.memory_size, plan.seed)
    graph = draft / plan.model_name / str(plan.version) / MODEL_FILE
    progress(_STAGE, 1, 5, "export to ONNX")
    export = export_policy(package.module, graph, signature)
    _write_config(draft / plan.model_name / layout.CONFIG, graph, plan.model_name, signature)
    progress(_STAGE, 2, 5, "compare with torch")
    parity = check_parity(package.module, graph, inputs, seed=plan.seed)
    write_reference(draft / layout.REFERENCE, package.module, reference_inputs(inputs, seed=plan.seed))
    progress(_STAGE, 3, 5, "measure the latency")
    latency = measure_latency(package.module, graph, inputs)
    write_json(draft / layout.SIGNATURE, signature.to_json())
    compared_on = "recorded observations" if recorded else "synthetic observations"
    # Which labels a lineage was trained on only ever grows, and is no part of what is deployed.
    files = (path for path in package_dir.rglob("*") if path.is_file() and path.name != LABELS)
    package_bytes = sum(path.stat().st_size for path in files)
    write_json(draft / layout.PROVENANCE, _provenance(package, package_bytes, compared_on, export, plan))
    measured_at = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    figures = {
        "measured_at": measured_at,
        "latency": latency.to_json(),
        "parity": parity.to_json(),
        "optimised": optimise(graph).to_json(),
    }
    write_json(draft / layout.MEASUREMENTS, figures)
    hashes = layout.hash_files(draft)
    write_bytes(draft / layout.SUMS, layout.sums_text(hashes))
    return layout.content_digest(hashes)


def _write_config(path: Path, graph: Path, model_name: str, signature: Signature) -> None:
    import onnx

    config = build_config(model_name, signature)
    cross_check(config, onnx.load(graph), signature, path)
    write_bytes(path, config_text(config).encode())


def _provenance(
    package: PolicyPackage, package_bytes: int, compared_on: str, export: ExportReport, plan: _Plan
) -> dict[str, Any]:
    import onnx
    import torch

    return {
        "format": layout.FORMAT,
        "model": {"name": plan.model_name, "version": plan.version},
        "package": {"digest": package.digest, "bytes": package_bytes, "provenance": package.provenance},
        "simulator_version": package.simulator_version,
        "built_from": dict(plan.provenance),
        "evaluation": dict(plan.evaluation),
        "promotable": plan.promotable,
        "reasons": list(plan.reasons),
        "compared_on": compared_on,
        "export": export.to_json(),
        "made_with": {"torch": torch.__version__, "onnx": onnx.__version__},
    }


def _healthy(path: Path, digest: str) -> bool:
    """True where ``path`` already holds exactly this content, undamaged."""
    if not path.exists():
        return False
    try:
        return layout.content_digest(layout.check_files(path)) == digest
    except BundleError:
        return False


def open_bundle(path: Path) -> Bundle:
    """Verifies a published bundle and reads its figures.

    Raises:
        BundleError, ParityError: see :func:`~agentpipe.serving.verify.verify_bundle`.
    """
    report = verify_bundle(path)
    provenance = read_json(path / layout.PROVENANCE)
    measurements = read_json(path / layout.MEASUREMENTS)
    graph = path / report.model_name / str(report.version) / MODEL_FILE
    made = provenance["export"]
    return Bundle(
        path=path,
        digest=report.digest,
        model_name=report.model_name,
        version=report.version,
        promotable=report.promotable,
        size_bytes=report.size_bytes,
        package_bytes=provenance["package"]["bytes"],
        export=ExportReport(
            graph, made["opset"], made["operators"], tuple(made["unsupported"]), made["bytes"], made["digest"]
        ),
        parity=ParityReport.from_json(measurements["parity"]),
        latency=LatencyReport.from_json(measurements["latency"]),
        optimised=OptimisedGraph(**measurements.get("optimised", {})),
    )
