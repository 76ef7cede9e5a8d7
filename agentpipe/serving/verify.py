"""Re-checking a published bundle from its files alone: no torch, no policy package, nothing unpickled."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from agentpipe.errors import BundleError, CorruptError
from agentpipe.serving import layout
from agentpipe.serving.export import unsupported_operators
from agentpipe.serving.parity import summarise
from agentpipe.serving.reference import read_reference, replay_reference
from agentpipe.serving.runtime import open_session
from agentpipe.serving.signature import Signature
from agentpipe.serving.triton_config import MODEL_FILE, cross_check, read_config
from agentpipe.storage import read_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    import onnx

_REMEDY: Final = "build the bundle again"


@dataclass(frozen=True)
class VerifyReport:
    """What was found. ``ok`` is always True: what is wrong is raised."""

    path: str
    digest: str
    model_name: str
    version: int
    promotable: bool
    reasons: tuple[str, ...]
    files: int
    size_bytes: int
    reference_rows: int
    max_abs_probability: float
    max_relative_value: float
    ties: int
    ok: bool = True

    def to_json(self) -> dict[str, Any]:
        """The report as a JSON object."""
        return asdict(self)


def verify_bundle(path: Path) -> VerifyReport:
    """Re-checks every file of a bundle and what they say of one another.

    That is: hashes and the list of files; the configuration against graph and signature; that every operator is
    standard and the graph loads; and that it answers the reference rows like the policy it came from.

    Raises:
        BundleError: something is missing, extra, altered or inconsistent; the message names the file.
        ParityError: the graph's answers differ from the recorded ones.
    """
    hashes = layout.check_files(path)
    provenance = _json_object(path, layout.PROVENANCE)
    if provenance.get("format") != layout.FORMAT:
        found = provenance.get("format")
        raise BundleError(
            f"bundle format {found!r}", file=layout.PROVENANCE, remedy=f"this program reads {layout.FORMAT}"
        )
    name, version, promotable, reasons = _identity(provenance)
    signature = Signature.from_json(_json_object(path, layout.SIGNATURE), layout.SIGNATURE)
    config_file, graph_file = f"{name}/{layout.CONFIG}", f"{name}/{version}/{MODEL_FILE}"
    expected = {layout.PROVENANCE, layout.SIGNATURE, layout.REFERENCE, layout.MEASUREMENTS, config_file, graph_file}
    for file in sorted(expected ^ hashes.keys()):
        text = "file is missing" if file in expected else "file does not belong into a bundle"
        raise BundleError(text, file=file, remedy=_REMEDY)
    config = read_config(path / config_file)
    if config.name != name:
        raise BundleError(f"model is called {config.name!r} in folder {name!r}", file=config_file, remedy=_REMEDY)
    cross_check(config, _graph(path / graph_file, graph_file), signature, Path(config_file))
    inputs, outputs = read_reference(path / layout.REFERENCE, signature)
    figures = summarise(replay_reference(open_session(path / graph_file), inputs, outputs))
    return VerifyReport(
        path=str(path),
        digest=layout.content_digest(hashes),
        model_name=name,
        version=version,
        promotable=promotable,
        reasons=reasons,
        files=len(hashes) + 1,
        size_bytes=sum(file.stat().st_size for file in path.rglob("*") if file.is_file()),
        reference_rows=len(inputs),
        max_abs_probability=figures.max_abs_probability,
        max_relative_value=figures.max_relative_value,
        ties=figures.ties,
    )


def check_bundle(path: Path, digest: str) -> VerifyReport:
    """Verifies the bundle at ``path``, and that it still is the one with the content digest ``digest``.

    Raises:
        BundleError: it is not there, damaged, or another one; the message names its folder, and the file.
        ParityError: the graph's answers differ from the recorded ones.
    """
    remedy = "restore it from a backup"
    if not path.is_dir():
        raise BundleError("the bundle is not there", bundle=path, remedy=remedy)
    try:
        found = layout.content_digest(layout.check_files(path))
        report = verify_bundle(path) if found == digest else None
    except BundleError as error:
        raise BundleError(error.message, bundle=path, **error.where, remedy=remedy) from error
    except OSError as error:
        raise BundleError(f"cannot be read: {error.strerror}", bundle=path, remedy=remedy) from error
    if report is None:
        raise BundleError(f"the bundle there is {found[:12]}, not {digest[:12]}", bundle=path, remedy=remedy)
    return report


def _json_object(root: Path, name: str) -> Mapping[str, Any]:
    try:
        content = read_json(root / name)
    except CorruptError as error:
        raise BundleError(error.message, file=name, remedy=_REMEDY) from error
    if not isinstance(content, dict):
        raise BundleError("not a JSON object", file=name, remedy=_REMEDY)
    return content


def _identity(provenance: Mapping[str, Any]) -> tuple[str, int, bool, tuple[str, ...]]:
    try:
        model = provenance["model"]
        name, version = str(model["name"]), int(model["version"])
        promotable, reasons = provenance["promotable"], tuple(str(reason) for reason in provenance["reasons"])
    except (KeyError, TypeError, ValueError) as error:
        raise BundleError(f"malformed: {error!r}", file=layout.PROVENANCE, remedy=_REMEDY) from error
    if not isinstance(promotable, bool) or promotable == bool(reasons):
        raise BundleError(
            "promotable and reasons contradict", file=layout.PROVENANCE, field="promotable", remedy=_REMEDY
        )
    return name, version, promotable, reasons


def _graph(path: Path, name: str) -> onnx.ModelProto:
    import onnx
    from google.protobuf.message import DecodeError

    try:
        model = onnx.load(path, load_external_data=False)
        if any(tensor.data_location == onnx.TensorProto.EXTERNAL for tensor in model.graph.initializer):
            raise BundleError("weights lie outside the graph's file", file=name, remedy=_REMEDY)
        onnx.checker.check_model(model, full_check=True)
    except (DecodeError, onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise BundleError(f"not a valid ONNX graph: {error}", file=name, remedy=_REMEDY) from error
    foreign = unsupported_operators(model)
    if foreign:
        raise BundleError(f"operators outside the standard: {', '.join(foreign)}", file=name, remedy=_REMEDY)
    return model
