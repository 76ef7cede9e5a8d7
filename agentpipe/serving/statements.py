"""What a bundle says of itself, held against its files and against itself: without torch, onnx or Triton's client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from agentpipe.errors import BundleError, CorruptError
from agentpipe.serving import layout
from agentpipe.serving.signature import Signature
from agentpipe.serving.triton_config import MODEL_FILE
from agentpipe.storage import read_json

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_REMEDY: Final = "build the bundle again"


@dataclass(frozen=True)
class Statements:
    """``hashes`` are SHA-256 by relative name, ``digest`` is of the content, ``config`` and ``graph`` are names."""

    hashes: Mapping[str, str]
    digest: str
    provenance: Mapping[str, Any]
    model_name: str
    version: int
    promotable: bool
    reasons: tuple[str, ...]
    signature: Signature
    config: str
    graph: str


def read_statements(path: Path) -> Statements:
    """Reads a bundle but for its graph, its configuration and its reference rows.

    That is: hashes and the list of files, the provenance, the signature. No Triton, and no library of it, is needed.

    Raises:
        BundleError: something is missing, extra, altered or inconsistent; the message names the file.
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
    config, graph = f"{name}/{layout.CONFIG}", f"{name}/{version}/{MODEL_FILE}"
    expected = {layout.PROVENANCE, layout.SIGNATURE, layout.REFERENCE, layout.MEASUREMENTS, config, graph}
    for file in sorted(expected ^ hashes.keys()):
        text = "file is missing" if file in expected else "file does not belong into a bundle"
        raise BundleError(text, file=file, remedy=_REMEDY)
    digest = layout.content_digest(hashes)
    return Statements(hashes, digest, provenance, name, version, promotable, reasons, signature, config, graph)


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
    if not isinstance(provenance.get("package", {}), dict):
        raise BundleError("malformed: package", file=layout.PROVENANCE, field="package", remedy=_REMEDY)
    if not isinstance(promotable, bool) or promotable == bool(reasons):
        raise BundleError(
            "promotable and reasons contradict", file=layout.PROVENANCE, field="promotable", remedy=_REMEDY
        )
    return name, version, promotable, reasons
