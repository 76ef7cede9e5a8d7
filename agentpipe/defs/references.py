"""References: what assets hand to each other. One names an artefact and its data version, nothing more.

One small JSON file per asset and partition under ``HOME/references``, written by rename before Dagster records the
materialisation. An asset reads the reference of exactly the partition it consumes, never "the newest file".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from agentpipe.errors import CorruptError
from agentpipe.storage import canonical_json, digest_bytes, read_json, write_json

MISSING = "MISSING"
"""The data version of something that is not there."""


@dataclass(frozen=True)
class Reference:
    """One materialised partition of one asset."""

    asset: str
    partition: str | None
    data_version: str
    """digest of the content, free of times"""
    path: str
    """the artefact, relative to the home where it lies in it"""
    consumed: dict[str, str]
    """data version of each upstream asset, as consumed"""
    configuration: str
    """digest of the settings that change its content"""
    code_version: str
    seconds: float
    """wall time of the computation"""
    figures: dict[str, Any] = field(default_factory=dict)
    """small JSON figures that later assets, the scoreboard and people want"""

    def figure(self, name: str) -> Any:  # noqa: ANN401 - JSON
        """A figure that every reference of the asset has.

        Raises:
            CorruptError: this one has not.
        """
        if name not in self.figures:
            where = f"{self.asset}[{self.partition}]" if self.partition else self.asset
            remedy = f"materialise {where} again"
            raise CorruptError(f"the reference of {where} lacks a figure", field=name, remedy=remedy)
        return self.figures[name]


_TEXTS = ("asset", "data_version", "path", "configuration", "code_version")


_FIGURES: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("parent", "champion", "status", "table_version", "fate", "reason"), str),
    **dict.fromkeys(("package_bytes", "behaviour_ordinal", "decisions", "quarantined_rows"), int),
    **dict.fromkeys(("gates", "reasons"), list),
    "success": (int, float),
    "promoted": bool,
    "verdicts": dict,
}
"""Types of the figures that something is decided by; others may be anything."""


def _sound_figures(figures: Mapping[str, Any]) -> bool:
    known = [(value, _FIGURES[name]) for name, value in figures.items() if name in _FIGURES]
    return (
        all(isinstance(value, kind) and (kind is bool or not isinstance(value, bool)) for value, kind in known)
        and all(isinstance(reason, str) for reason in figures.get("reasons", ()))
        and all(_sound_gate(gate) for gate in figures.get("gates", ()))
    )


def _sound_gate(gate: object) -> bool:
    if not isinstance(gate, dict) or not isinstance(gate.get("passed"), bool):
        return False
    return isinstance(gate.get("name"), str) and isinstance(gate.get("severity"), str)


def _sound(content: Mapping[str, Any]) -> bool:
    """Whether every field of a reference has the type that it should have; a file may hold anything."""
    consumed, figures = content["consumed"], content.get("figures", {})
    return (
        all(isinstance(content[name], str) for name in _TEXTS)
        and isinstance(consumed, dict)
        and all(isinstance(version, str) for version in consumed.values())
        and isinstance(figures, dict)
        and _sound_figures(figures)
        and isinstance(content["seconds"], int | float)
        and isinstance(content["partition"], str | None)
    )


class References:
    """The references of one home."""

    def __init__(self, home: Path) -> None:
        self.home = home

    def path(self, asset: str, partition: str | None = None) -> Path:
        """The file of one reference."""
        folder = self.home / "references" / asset
        return folder / f"{partition.replace('|', '_')}.json" if partition else folder / "reference.json"

    def find(self, asset: str, partition: str | None = None) -> Reference | None:
        """The reference, or ``None`` where the partition was never materialised.

        Raises:
            CorruptError: the file is not a reference.
        """
        path = self.path(asset, partition)
        if not path.exists():
            return None
        remedy = f"remove it; {asset} is then computed again"
        try:
            content: Any = read_json(path)
            found = Reference(**content)
        except TypeError as error:
            raise CorruptError(f"not a reference: {error}", file=path, remedy=remedy) from error
        if not _sound(content):
            raise CorruptError("not a reference: a field of another type", file=path, remedy=remedy)
        return found

    def load(self, asset: str, partition: str | None = None) -> Reference:
        """The reference of a partition that must be there.

        Raises:
            CorruptError: it is not there.
        """
        found = self.find(asset, partition)
        if found is None:
            where = f"{asset}[{partition}]" if partition else asset
            remedy = "run `agentpipe run`, or materialise it first"
            raise CorruptError(f"{where} was never materialised", file=self.path(asset, partition), remedy=remedy)
        return found

    def save(self, reference: Reference) -> None:
        """Writes the reference durably and atomically."""
        write_json(self.path(reference.asset, reference.partition), asdict(reference))

    def version(self, asset: str, partition: str | None = None) -> str:
        """The data version of one partition, ``MISSING`` where there is none."""
        found = self.find(asset, partition)
        return MISSING if found is None else found.data_version

    def versions(self, asset: str) -> frozenset[str]:
        """The data versions of every partition of ``asset`` that is materialised."""
        found = (read_json(path) for path in self.path(asset, "any").parent.glob("*.json"))
        versions = (content.get("data_version") for content in found if isinstance(content, dict))
        return frozenset(version for version in versions if isinstance(version, str))

    def tell_of(self, asset: str, figure: str) -> bool:
        """Whether some partition of ``asset`` has a figure of that name that is not ``none``."""
        paths = self.path(asset, "any").parent.glob("*.json")
        found = (content.get("figures") for content in map(read_json, paths) if isinstance(content, dict))
        return any(isinstance(figures, dict) and figures.get(figure, "none") != "none" for figures in found)

    def version_of_all(self, asset: str, partitions: Mapping[str, object] | tuple[str, ...]) -> str:
        """One digest over the data versions of several partitions; ``MISSING`` where none is there."""
        versions = {key: self.version(asset, key) for key in partitions}
        if all(version == MISSING for version in versions.values()):
            return MISSING
        return digest_bytes(canonical_json(versions))

    def artefact(self, asset: str, partition: str | None = None) -> Path:
        """Where the artefact of a partition lies."""
        return self.home / self.load(asset, partition).path
