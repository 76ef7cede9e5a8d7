"""Directories of tensors and JSON that are checked byte for byte when they are read; no pickle anywhere.

A sealed directory holds a JSON manifest that names every other file with its SHA-256, and a content digest over the
manifest itself (without the fields that tell of time).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.numpy

from agentpipe.errors import CheckpointError, CorruptError, VersionError
from agentpipe.storage import canonical_json, digest_bytes, read_json, write_json

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

Arrays = dict[str, npt.NDArray[Any]]
_REMEDY = "take another checkpoint, or train again"
_ADAM = ("step", "exp_avg", "exp_avg_sq")


def pack(arrays: Mapping[str, npt.NDArray[Any]]) -> bytes:
    """``arrays`` as safetensors bytes, in name order, so that equal arrays give equal bytes."""
    return bytes(safetensors.numpy.save({name: np.asarray(arrays[name], order="C") for name in sorted(arrays)}))


def unpack(data: bytes, file: Path) -> Arrays:
    """The arrays of safetensors bytes (copies that may be written to).

    Raises:
        CheckpointError: the bytes are not safetensors.
    """
    try:
        return {name: array.copy() for name, array in safetensors.numpy.load(data).items()}
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"not a tensor file: {error}", file=file, remedy=_REMEDY) from error


def content_digest(manifest: Mapping[str, Any], unsealed: tuple[str, ...] = ()) -> str:
    """Digest of the manifest without the digest itself, its informal part and the files named in ``unsealed``."""
    content = {key: value for key, value in manifest.items() if key not in ("digest", "informal")}
    content["files"] = {name: digest for name, digest in content["files"].items() if name not in unsealed}
    return digest_bytes(canonical_json(content))


def sealed_manifest(
    manifest: Mapping[str, Any], files: Mapping[str, bytes], unsealed: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The manifest with the digest of every file, and its own.

    Args:
        manifest: JSON-ready; the key ``informal`` may hold what is not content, such as times.
        files: file name → bytes.
        unsealed: names of files that are checked on reading but are not content (logs of times and temperatures).
    """
    full: dict[str, Any] = {**manifest, "files": {file: digest_bytes(data) for file, data in sorted(files.items())}}
    full["digest"] = content_digest(full, unsealed)
    return full


def seal(directory: Path, name: str, manifest: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
    """Writes ``files`` and the sealed manifest ``name`` into ``directory``, which the caller publishes."""
    for file, data in files.items():
        (directory / file).write_bytes(data)
    write_json(directory / name, manifest)


def open_sealed(
    directory: Path, name: str, kind: str, version: int, unsealed: tuple[str, ...] = ()
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Reads and checks a sealed directory.

    Args:
        directory: to read.
        name: of its manifest.
        kind: expected value of the manifest's ``kind``.
        version: expected value of the manifest's ``format``.
        unsealed: as in :func:`sealed_manifest`.

    Returns:
        The manifest, and file name → bytes.

    Raises:
        CheckpointError: something is missing, damaged or of another kind.
        VersionError: written under another format version.
    """
    path = directory / name
    try:
        manifest = read_json(path)
    except CorruptError as error:
        raise CheckpointError(f"the manifest cannot be read: {error.message}", file=path, remedy=_REMEDY) from error
    except OSError as error:
        raise CheckpointError(f"cannot read: {error.strerror}", file=path, remedy=_REMEDY) from error
    if not isinstance(manifest, dict) or manifest.get("kind") != kind:
        raise CheckpointError(f"not a {kind}", file=path, remedy=_REMEDY)
    if manifest.get("format") != version:
        remedy = "use the agentpipe that wrote it, or train again"
        raise VersionError(
            f"{kind} format {manifest.get('format')!r}, this program reads {version}", file=path, remedy=remedy
        )
    files = manifest.get("files")
    if not isinstance(files, dict) or manifest.get("digest") != content_digest(manifest, unsealed):
        raise CheckpointError("the manifest does not match its digest", file=path, remedy=_REMEDY)
    return manifest, {file: _checked(directory, file, digest) for file, digest in files.items()}


def _checked(directory: Path, file: str, digest: str) -> bytes:
    path = directory / file
    if path.parent != directory:
        raise CheckpointError("a file outside the directory is named", file=path, remedy=_REMEDY)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"a file cannot be read: {error.strerror}", file=path, remedy=_REMEDY) from error
    if digest_bytes(data) != digest:
        raise CheckpointError("the file does not match its digest", file=path, remedy=_REMEDY)
    return data


def adam_slots(shapes: Mapping[str, tuple[int, ...]], arrays: Arrays, file: Path) -> dict[int, Arrays]:
    """What Adam remembers of each parameter, by its place in ``shapes``: step and both moments, or nothing yet.

    Args:
        shapes: of the parameters, by name.
        arrays: ``name/slot`` → f32, one for each slot of a parameter.
        file: for error messages.

    Raises:
        CheckpointError: a slot is missing or unknown, or not f32 of the parameter's shape; names it. A fused step would
            read and write beyond such an array.
    """
    found: dict[int, Arrays] = {}
    for index, (name, shape) in enumerate(shapes.items()):
        own = {key.rpartition("/")[2]: array for key, array in arrays.items() if key.rpartition("/")[0] == name}
        if own and set(own) != set(_ADAM):
            text = f"optimiser state of {name} holds {sorted(own)}, expected {sorted(_ADAM)}"
            raise CheckpointError(text, file=file, field=name, remedy=_REMEDY)
        for slot, array in own.items():
            if array.dtype != np.float32 or array.shape != (() if slot == "step" else shape):
                text = (
                    f"optimiser state {name}/{slot} is {array.dtype}{list(array.shape)}, expected float32{list(shape)}"
                )
                raise CheckpointError(text, file=file, field=name, remedy=_REMEDY)
        if own:
            found[index] = own
    return found


def required(content: Mapping[str, Any], key: str, file: Path) -> Any:  # noqa: ANN401 - JSON or an array
    """``content[key]``.

    Raises:
        CheckpointError: it is missing; the message names key and file.
    """
    if key not in content:
        raise CheckpointError(f"{key!r} is missing", file=file, field=key, remedy=_REMEDY)
    return content[key]
