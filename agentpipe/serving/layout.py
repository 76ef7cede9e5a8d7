"""Where things lie in a bundle, and how its files are listed and hashed.

A bundle is a whole Triton model repository::

    provenance.json        what it was built from, and whether it may be promoted
    signature.json         names, dtypes, shapes
    reference.safetensors  inputs, and the torch policy's outputs, to compare with anywhere
    measurements.json      when and how fast: not part of the content digest
    SHA256SUMS             every other file, in the format of sha256sum
    <model>/config.pbtxt
    <model>/<version>/model.onnx
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from agentpipe.errors import BundleError
from agentpipe.storage import canonical_json, digest_bytes, digest_file

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

FORMAT: Final = 1
PROVENANCE: Final = "provenance.json"
SIGNATURE: Final = "signature.json"
REFERENCE: Final = "reference.safetensors"
MEASUREMENTS: Final = "measurements.json"
SUMS: Final = "SHA256SUMS"
CONFIG: Final = "config.pbtxt"
_LINE: Final = re.compile(r"([0-9a-f]{64})  ([^\n]+)")
_REMEDY: Final = "build the bundle again, or restore it from a copy"


def list_files(root: Path) -> dict[str, Path]:
    """Every file below ``root`` but ``SHA256SUMS``, by relative name.

    Raises:
        BundleError: ``root`` is not a directory, or holds a link or a special file.
    """
    _check_folder(root)
    files: dict[str, Path] = {}
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if path.is_symlink() or not (path.is_dir() or path.is_file()):
            raise BundleError("neither a plain file nor a folder", file=name, remedy=_REMEDY)
        if path.is_file() and name != SUMS:
            files[name] = path
    return files


def _check_folder(root: Path) -> None:
    if not root.is_dir():
        raise BundleError("the bundle is not a directory", file=root, remedy="name the folder that holds SHA256SUMS")


def hash_files(root: Path) -> dict[str, str]:
    """SHA-256 of every file of :func:`list_files`."""
    return {name: digest_file(path) for name, path in list_files(root).items()}


def sums_text(hashes: Mapping[str, str]) -> bytes:
    """The content of ``SHA256SUMS``, in name order."""
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(hashes.items())).encode()


def read_sums(root: Path) -> dict[str, str]:
    """Reads ``SHA256SUMS``.

    Raises:
        BundleError: missing or malformed; the message names the line.
    """
    _check_folder(root)
    path = root / SUMS
    try:
        text = path.read_bytes().decode()
    except FileNotFoundError as error:
        raise BundleError("file is missing", file=SUMS, remedy=_REMEDY) from error
    except UnicodeDecodeError as error:
        raise BundleError("not text", file=SUMS, remedy=_REMEDY) from error
    except OSError as error:
        raise BundleError(f"cannot be read: {error.strerror}", file=SUMS, remedy=_REMEDY) from error
    lines = text.split("\n")
    if lines.pop():
        raise BundleError("the last line is cut off", file=SUMS, row=len(lines) + 1, remedy=_REMEDY)
    hashes: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        match = _LINE.fullmatch(line)
        if match is None or match[2] in hashes:
            raise BundleError("malformed or repeated line", file=SUMS, row=number, remedy=_REMEDY)
        hashes[match[2]] = match[1]
    return hashes


def content_digest(hashes: Mapping[str, str]) -> str:
    """Digest of names and hashes of everything but the measurements: equal content, equal digest."""
    return digest_bytes(canonical_json({name: digest for name, digest in hashes.items() if name != MEASUREMENTS}))


def check_files(root: Path) -> dict[str, str]:
    """Holds the files against ``SHA256SUMS`` and returns their hashes.

    Raises:
        BundleError: a file is missing, extra or altered; the message names it.
    """
    listed = read_sums(root)
    found = hash_files(root)
    for name in sorted(listed.keys() - found.keys()):
        raise BundleError("file is missing", file=name, remedy=_REMEDY)
    for name in sorted(found.keys() - listed.keys()):
        raise BundleError("file is not listed in SHA256SUMS", file=name, remedy="remove it, or build the bundle again")
    for name, digest in found.items():
        if digest != listed[name]:
            raise BundleError(f"content is not what SHA256SUMS says (found {digest[:12]})", file=name, remedy=_REMEDY)
    return found
