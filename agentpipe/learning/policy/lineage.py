"""Which label ids a policy and its ancestors were trained on: each label trains once in a lineage.

A package that learned from labels, or descends from one that did, holds ``labels.txt``: the ids of all labels that its
lineage was trained on, in ascending order of their UTF-8 bytes, one a line. The file is sealed with the package (its
SHA-256 stands in ``package.json``); it is no part of the package's digest, which covers what the policy does. An id
has at most 200 characters and no white space, so a label costs at most 201 characters; none is ever taken out, since a
partition of any earlier day may run again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from agentpipe.errors import CheckpointError
from agentpipe.learning.tensors import open_sealed
from agentpipe.storage import digest_bytes

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from pathlib import Path

LABELS: Final = "labels.txt"
MANIFEST, KIND, FORMAT = "package.json", "agentpipe.policy-package", 1
"""of a policy package"""


def pack_labels(ids: Iterable[str]) -> bytes:
    """The file of ``ids``, each once.

    Raises:
        CheckpointError: an id is empty, or holds white space.
    """
    chosen = set(ids)
    for label in chosen:
        if not label or label.split() != [label]:
            remedy = "a label id has at least one character and no white space"
            raise CheckpointError("not a label id", label=repr(label), field=LABELS, remedy=remedy)
    return b"".join(line + b"\n" for line in sorted(label.encode() for label in chosen))


def unpack_labels(data: bytes, file: Path) -> frozenset[str]:
    """The inverse of :func:`pack_labels`.

    Raises:
        CheckpointError: not what :func:`pack_labels` writes.
    """
    try:
        found = frozenset(data.decode().split("\n")[:-1])
        whole = pack_labels(found) == data
    except UnicodeDecodeError as error:
        raise CheckpointError("label ids are not UTF-8", file=file, field=LABELS) from error
    if not whole:
        raise CheckpointError("label ids are not sorted, or not each once", file=file, field=LABELS)
    return found


def labels_digest(ids: Collection[str]) -> str:
    """SHA-256 of the file of ``ids``: equal for equal sets."""
    return digest_bytes(pack_labels(ids))


def trained_labels(path: Path) -> frozenset[str]:
    """Ids of all labels that the package at ``path`` and its ancestors were trained on; needs no torch.

    Raises:
        CheckpointError: the package is missing or damaged.
        VersionError: written under another format version.
    """
    _, files = open_sealed(path, MANIFEST, KIND, FORMAT)
    return unpack_labels(files[LABELS], path / LABELS) if LABELS in files else frozenset()
