"""What every asset does besides its own work: hold the home, say what it consumed, leave a reference, show figures."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg

from agentpipe.defs.graph import SHAPES
from agentpipe.defs.interrupted import mark_process
from agentpipe.defs.progress import reporter
from agentpipe.defs.references import Reference
from agentpipe.defs.resources import Workspace, hold_home
from agentpipe.errors import HomeError

if TYPE_CHECKING:
    from agentpipe.environments.layout import Purpose
    from agentpipe.progress import Progress

LOCK_PATIENCE = 1800.0
"""Seconds that a run launched by the daemon or from the UI waits for the main job or another run."""
METADATA_LIMIT = 16_384
"""Bytes of one text in the event log; larger ones stay files."""


@cache
def git_revision() -> str | None:
    """The revision of the checkout that this code runs from, or ``None``."""
    folder = Path(__file__).resolve().parents[2]
    if not (folder / ".git").exists():
        return None
    command = ["git", "-C", str(folder), "rev-parse", "--short=12", "HEAD"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()  # noqa: S603
    return None


@dataclass
class Step:
    """One partition of one asset while it is computed."""

    asset: str
    partition: str | None
    workspace: Workspace
    progress: Progress
    consumed: dict[str, str]
    configuration: str
    key: str
    """digest of everything that decides the content; names the folder of the artefact"""
    started: float = field(default_factory=time.monotonic)

    @property
    def folder(self) -> Path:
        """Where the artefact belongs: ``HOME/<asset>/<partition>/<key>`` (not created here)."""
        place = self.workspace.root / self.asset
        return (place / self.partition.replace("|", "_") if self.partition else place) / self.key[:16]

    def result(
        self,
        *,
        data_version: str,
        path: Path,
        figures: Mapping[str, Any],
        metadata: Mapping[str, Any] | None = None,
        checks: Sequence[dg.AssetCheckResult] = (),
    ) -> dg.MaterializeResult:
        """Leaves the reference and describes the materialisation.

        Args:
            data_version: Digest of the content, free of times.
            path: The artefact.
            figures: Small JSON figures that go into the reference; the scalar ones are shown in the UI.
            metadata: Tables, plots and texts for the UI.
            checks: Results of the asset's checks.
        """
        root = self.workspace.root
        seconds = round(time.monotonic() - self.started, 3)
        place = path.resolve()
        inside = place.is_relative_to(root.resolve())
        reference = Reference(
            asset=self.asset,
            partition=self.partition,
            data_version=data_version,
            path=place.relative_to(root.resolve()).as_posix() if inside else str(place),
            consumed=self.consumed,
            configuration=self.configuration,
            code_version=SHAPES[self.asset].code_version,
            seconds=seconds,
            figures=dict(figures),
        )
        self.workspace.references.save(reference)
        return dg.MaterializeResult(
            data_version=dg.DataVersion(data_version),
            metadata={**_shown(figures), **(metadata or {}), **self._origin(place, seconds)},
            check_results=list(checks),
            tags={"agentpipe/configuration": self.configuration[:16]},
        )

    def _origin(self, path: Path, seconds: float) -> dict[str, Any]:
        rows = [f"| `{name}` | `{version[:16]}` |" for name, version in self.consumed.items()]
        consumed = "\n".join(["| upstream | data version |", "|---|---|", *rows])
        origin = {
            "artefact": dg.MetadataValue.path(str(path)),
            "consumed": dg.MetadataValue.md(consumed),
            "configuration": self.configuration[:16],
            "seconds": seconds,
        }
        revision = git_revision()
        return {**origin, "git_revision": revision} if revision else origin


def _shown(figures: Mapping[str, Any]) -> dict[str, Any]:
    """The scalar figures; nested ones are for other assets and stay in the reference."""
    return {name: value for name, value in figures.items() if isinstance(value, bool | int | float | str)}


@contextlib.contextmanager
def step(context: dg.AssetExecutionContext, workspace: Workspace) -> Iterator[Step]:
    """Holds the home while one partition of one asset is computed.

    Raises:
        LockHeldError: another process works on the home for longer than half an hour.
        HomeError: the run is for several partitions at once, which no asset here supports.
    """
    asset = context.asset_key.path[-1]
    partition = context.partition_key if context.has_partition_key else None
    if context.has_partition_key and len(context.partition_keys) != 1:
        raise HomeError("one run, one partition", asset=asset, remedy="launch one run per partition")
    label = f"{asset}[{partition}]" if partition else asset
    mark_process(context.instance, context.run.run_id)
    with hold_home(workspace.root, f"run {context.run.run_id}", LOCK_PATIENCE):
        yield Step(
            asset=asset,
            partition=partition,
            workspace=workspace,
            progress=reporter(label, context.log.info),
            consumed=workspace.consumed(asset, partition),
            configuration=workspace.configuration(asset),
            key=workspace.key(asset, partition),
        )


def markdown(text: str) -> dg.MarkdownMetadataValue:
    """``text`` as Markdown metadata, cut with a note where it would swell the event log."""
    if len(text.encode()) > METADATA_LIMIT:
        cut = text.encode()[: METADATA_LIMIT - 100].decode(errors="ignore")
        text = cut.rsplit("\n", 1)[0] + "\n\n(cut; the whole is in the artefact)"
    return dg.MetadataValue.md(text)


def plot(png: bytes, alt: str) -> dg.MarkdownMetadataValue:
    """A PNG inside the event; one that is too large is named instead of shown."""
    import base64

    encoded = base64.b64encode(png).decode()
    if len(encoded) > METADATA_LIMIT:
        return dg.MetadataValue.md(f"{alt}: the plot is larger than {METADATA_LIMIT // 1024} KB and not shown")
    return dg.MetadataValue.md(f"![{alt}](data:image/png;base64,{encoded})")


def rows(content: Sequence[Mapping[str, Any]]) -> dg.MetadataValue[Any]:
    """A small table; what is not a scalar becomes text, what is absent is empty."""
    if not content:
        return dg.MetadataValue.text("none")
    columns = list(dict.fromkeys(name for row in content for name in row))
    return dg.MetadataValue.table([dg.TableRecord({name: _cell(row.get(name)) for name in columns}) for row in content])


def _cell(value: object) -> str | int | float | bool:
    if value is None:
        return ""
    return value if isinstance(value, bool | int | float | str) else str(value)


def purpose(name: str) -> Purpose:
    """A random-number purpose by name."""
    from agentpipe.environments.layout import Purpose

    return Purpose[name]
