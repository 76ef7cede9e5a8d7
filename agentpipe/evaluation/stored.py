"""How a result - a table and its figures - is kept on disk, and checked when it is read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agentpipe.errors import CorruptError, VersionError
from agentpipe.evaluation.columns import content_digest, read_parquet, write_parquet
from agentpipe.storage import publish_directory, read_json, write_json

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import pyarrow as pa

SUMMARY = "summary.json"


def sealed(table: pa.Table, figures: Mapping[str, Any]) -> dict[str, Any]:
    """``figures`` with the content digest of both under ``digest``."""
    return {**figures, "digest": content_digest(table, figures)}


def publish_result(path: Path, name: str, table: pa.Table, documents: Mapping[str, Any]) -> Path:
    """Publishes ``<name>.parquet`` and JSON ``documents`` as the directory ``path``, whole or not at all."""
    with publish_directory(path) as staging:
        write_parquet(table, staging / f"{name}.parquet")
        for document, content in documents.items():
            write_json(staging / document, content)
    return path


def read_result(path: Path, name: str, version: int) -> tuple[pa.Table, dict[str, Any]]:
    """The table and the summary of a published result, checked against their digest.

    Raises:
        CorruptError: missing, damaged, or changed since it was written.
        VersionError: written in another format than ``version``.
    """
    summary = read_json(path / SUMMARY)
    if not isinstance(summary, dict) or "digest" not in summary:
        raise CorruptError("not a summary", file=path / SUMMARY, remedy="compute it again")
    found = summary.get("format")
    if found != version:
        raise VersionError(f"result format {found!r}, this program reads {version}", file=path / SUMMARY)
    table = read_parquet(path / f"{name}.parquet")
    if sealed(table, {key: value for key, value in summary.items() if key != "digest"}) != summary:
        raise CorruptError("the result does not match its digest", file=path, remedy="compute it again")
    return table, summary
