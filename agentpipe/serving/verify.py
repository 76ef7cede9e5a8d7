"""Re-checking a published bundle from its files alone: no torch, no policy package, nothing unpickled."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from agentpipe.errors import BundleError
from agentpipe.serving import layout
from agentpipe.serving.export import unsupported_operators
from agentpipe.serving.parity import summarise
from agentpipe.serving.reference import read_reference, replay_reference
from agentpipe.serving.runtime import open_session
from agentpipe.serving.statements import read_statements
from agentpipe.serving.triton_config import cross_check, read_config

if TYPE_CHECKING:
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
    said = read_statements(path)
    config = read_config(path / said.config)
    if config.name != said.model_name:
        text = f"model is called {config.name!r} in folder {said.model_name!r}"
        raise BundleError(text, file=said.config, remedy=_REMEDY)
    cross_check(config, _graph(path / said.graph, said.graph), said.signature, Path(said.config))
    inputs, outputs = read_reference(path / layout.REFERENCE, said.signature)
    figures = summarise(replay_reference(open_session(path / said.graph), inputs, outputs))
    return VerifyReport(
        path=str(path),
        digest=said.digest,
        model_name=said.model_name,
        version=said.version,
        promotable=said.promotable,
        reasons=said.reasons,
        files=len(said.hashes) + 1,
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
