"""What the agents of a home leave for people: incidents, and comparisons of shadows, each as one report."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from agentpipe.errors import CorruptError
from agentpipe.serving.agent.incidents import Incident
from agentpipe.serving.agent.shadow import read_report as read_comparison
from agentpipe.storage import canonical_json, digest_bytes, read_json, typed_os_errors

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

Kind = Literal["incidents", "shadow"]
KINDS: Final[tuple[Kind, ...]] = ("incidents", "shadow")
LARGEST: Final = 1 << 20
"""bytes of a report; the ones that an agent writes have a few thousand"""
_AGENT: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,39}")
_REMEDY: Final = "move it away, or restore it"
Figure = str | int | float


@dataclass(frozen=True)
class Place:
    """A report's file, and what tells whether it was written anew since it was read."""

    kind: Kind
    agent: str
    path: Path
    mark: str
    written: int
    """nanoseconds since 1970"""

    @property
    def key(self) -> str:
        """Unique in a home."""
        return f"{self.agent}/{self.kind}/{self.path.stem}"


@dataclass(frozen=True)
class Report:
    """One incident, or one comparison."""

    place: Place
    version: str
    """digest of its content; of a comparison without the time at which it was written"""
    ended: bool
    """nothing more will be added"""
    markdown: str
    figures: Mapping[str, Figure]


def places(home: Path) -> list[Place]:
    """Every report of every agent, in the order in which they were last written.

    Raises:
        HomeError: a folder cannot be read.
    """
    with typed_os_errors(home):
        return sorted(_places(home / "agent"), key=lambda place: (place.written, place.key))


def _places(folder: Path) -> Iterator[Place]:
    for agent in sorted(folder.iterdir()) if folder.is_dir() else []:
        for kind in KINDS:
            for path in sorted((agent / kind).glob("*.json")):
                if _AGENT.fullmatch(agent.name) and path.is_file() and not path.is_symlink():
                    status = path.stat()
                    mark = f"{status.st_mtime_ns:x}-{status.st_size:x}"
                    yield Place(kind, agent.name, path, mark, status.st_mtime_ns)


def read(place: Place) -> Report:
    """Reads one report.

    Raises:
        CorruptError: it is damaged, incomplete, or larger than any that an agent writes.
        HomeError: it cannot be read.
    """
    with typed_os_errors(place.path):
        size = place.path.stat().st_size
    if size > LARGEST:
        raise CorruptError(f"{size:,} bytes are no report", file=place.path, remedy=_REMEDY)
    try:
        return _incident(place) if place.kind == "incidents" else _comparison(place)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptError(f"malformed report: {error!r}", file=place.path, remedy=_REMEDY) from error


def _incident(place: Place) -> Report:
    incident = Incident.from_json(read_json(place.path), place.path)
    beside = place.path.with_suffix(".md")
    if not beside.is_file() or beside.stat().st_size > LARGEST:
        raise CorruptError("the incident has no report", file=beside, remedy=_REMEDY)
    decisions = sum(incident.decided.values())
    figures: dict[str, Figure] = {
        "agent": incident.agent,
        "part": incident.part,
        "status": incident.status,
        "opened": incident.opened.isoformat(),
        "seconds": float(incident.seconds),
        "losses": incident.losses,
        "decisions": decisions,
        "late": incident.late,
        "latency_mean_ms": 1e3 * incident.latency_sum / decisions if decisions else 0.0,
        "latency_most_ms": 1e3 * incident.latency_max,
        **{f"decisions_{name}": count for name, count in sorted(incident.decided.items())},
    }
    version = digest_bytes(canonical_json(incident.to_json()))
    text = beside.read_bytes().decode(errors="replace")
    return Report(place, version, incident.status != "open", text, figures)


def _comparison(place: Place) -> Report:
    content = read_comparison(place.path)
    version = digest_bytes(canonical_json({name: value for name, value in content.items() if name != "written"}))
    segments = {str(name): each for name, each in content["segments"].items()}
    rows = {"all": content, **segments}
    figures: dict[str, Figure | None] = {
        "agent": place.agent,
        "candidate": str(content["candidate"]),
        "champion": str(content["champion"]),
        "started": str(content["started"]),
        **{name: int(content[name]) for name in ("rows", "dropped", "failed")},
        **{name: _number(content[name]) for name in ("agreement", "kl_mean", "kl_most")},
        **{f"agreement_{name}": _number(each["agreement"]) for name, each in segments.items()},
        **{f"kl_mean_{name}": _number(each["kl_mean"]) for name, each in segments.items()},
        **{
            f"latency_{quantile}_ms_{who}": _number(seconds[quantile], 1e3)
            for who, seconds in content["latency_seconds"].items()
            for quantile in ("p50", "p99")
        },
    }
    known = {name: value for name, value in figures.items() if value is not None}
    return Report(place, version, bool(content.get("ended")), _text(place, content, rows), known)


def _number(value: object, factor: float = 1.0) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is no number")
    return factor * value


def _text(place: Place, content: Mapping[str, Any], rows: Mapping[str, Mapping[str, Any]]) -> str:
    """The comparison as Markdown."""
    latency = content["latency_seconds"]
    state = "ended" if content.get("ended") else "under way"
    compared, dropped, failed = (f"{content[name]:,}" for name in ("rows", "dropped", "failed"))
    lines = [
        f"# {content['candidate'][:16]} beside {content['champion'][:16]} at {place.agent}",
        "",
        f"From {content['started']}, {state} at {content['written']}.",
        f"{compared} decisions compared, {dropped} dropped, {failed} failed.",
        "",
        "| segment | decisions | agreement | KL, mean | KL, most |",
        "|---|---|---|---|---|",
        *(
            f"| {name} | {each['rows']:,} | {_percent(each['agreement'])} | {_nats(each['kl_mean'])} "
            f"| {_nats(each['kl_most'])} |"
            for name, each in rows.items()
        ),
        "",
        "| | p50 | p99 |",
        "|---|---|---|",
        *(
            f"| {who} | {_milliseconds(latency[who]['p50'])} | {_milliseconds(latency[who]['p99'])} |"
            for who in ("candidate", "champion")
        ),
        "",
        "| champion's action | candidate's | decisions |",
        "|---|---|---|",
        *(f"| {each['champion']} | {each['candidate']} | {each['count']:,} |" for each in content["disagreements"]),
        "",
    ]
    return "\n".join(lines)


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def _nats(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def _milliseconds(value: float | None) -> str:
    return "–" if value is None else f"{1e3 * value:.2f} ms"
