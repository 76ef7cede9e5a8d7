"""The weekly report for people: one HTML page that needs nothing beside it, and a short form in Markdown.

Both are made from the same sections. Cells and notes hold text as it is; each form escapes it in its own way.
"""

from __future__ import annotations

import base64
import html
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agentpipe.evaluation.drift import INSUFFICIENT_DATA, NO_CHAMPION, OK, REVIEW
from agentpipe.evaluation.drift_text import one_line, plain, safe_table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LIMIT = 16_000
"""Most bytes of the Markdown."""
_COLOURS = {OK: "#2f855a", REVIEW: "#c2410c", NO_CHAMPION: "#4a5568", INSUFFICIENT_DATA: "#4a5568"}
_STYLE = """
 body{font:15px/1.5 system-ui,sans-serif;color:#1f2933;max-width:60rem;margin:2rem auto;padding:0 1rem}
 h1{font-size:1.5rem;margin:0} h2{font-size:1.1rem;margin:2.2rem 0 .5rem} .when{color:#616e7c;margin:.2rem 0 1.5rem}
 .status{border-left:.4rem solid var(--c);background:#f5f7fa;padding:.7rem 1rem;margin:.6rem 0}
 .status b{color:var(--c)} table{border-collapse:collapse;width:100%;margin:.6rem 0} img{max-width:100%;margin:.6rem 0}
 th,td{text-align:left;padding:.35rem .8rem .35rem 0;border-bottom:1px solid #e4e7eb;overflow-wrap:anywhere}
 th{color:#616e7c;font-weight:600;font-size:.85rem} td{font-variant-numeric:tabular-nums} .none{color:#616e7c}
""".strip()


@dataclass(frozen=True)
class Part:
    """What one part of the report judges."""

    name: str
    status: str
    reason: str


@dataclass(frozen=True)
class Section:
    """A title and what stands below it."""

    title: str
    part: Part | None = None
    """``None`` where the section judges nothing."""
    notes: list[str] = field(default_factory=list)
    header: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)
    plots: list[str] = field(default_factory=list)
    """Names of plots."""


def page(head: Mapping[str, Any], sections: Sequence[Section], plots: Mapping[str, bytes]) -> str:
    """The HTML page.

    Args:
        head: ``week``, ``last_day``, ``status`` and ``reason`` of the report.
        sections: Its parts, in order.
        plots: PNG bytes by name; what a section names and is not there is left out.
    """
    week, last = html.escape(str(head["week"])), html.escape(str(head["last_day"]))
    body = "\n".join(_section(section, plots) for section in sections)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>Weekly drift report {week}</title>\n'
        f"<style>{_STYLE}</style></head>\n<body>\n"
        f'<h1>Weekly drift report</h1><p class="when">Week of {week} to {last}, UTC days</p>\n'
        f"{_status(head['status'], head['reason'])}\n{body}\n</body></html>\n"
    )


def _status(status: str, reason: str) -> str:
    colour = _COLOURS.get(status, "#4a5568")
    text = f"<b>{html.escape(status)}</b> – {html.escape(reason)}"
    return f'<p class="status" style="--c:{colour}">{text}</p>'


def _section(section: Section, plots: Mapping[str, bytes]) -> str:
    parts = [f"<h2>{html.escape(section.title)}</h2>"]
    if section.part is not None:
        parts.append(_status(section.part.status, section.part.reason))
    parts += [f"<p>{html.escape(note)}</p>" for note in section.notes]
    if section.header:
        parts.append(_table(section.header, section.rows))
    parts += [_image(plots[name], name) for name in section.plots if name in plots]
    return "\n".join(parts)


def _image(png: bytes, name: str) -> str:
    source = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    return f'<img alt="{html.escape(name.replace("_", " "))}" src="{source}">'


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return '<p class="none">Nothing this week.</p>'
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "\n".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>"


def markdown(head: Mapping[str, Any], sections: Sequence[Section]) -> str:
    """The report without plots for the UI, at most :data:`LIMIT` bytes; the last line says where something was cut."""
    parts = [f"**{head['status']}**: {plain(head['reason'], 600)}"]
    for section in sections:
        lines = [f"### {plain(section.title)}"]
        if section.part is not None:
            lines.append(f"**{section.part.status}**: {plain(section.part.reason, 600)}")
        lines += [plain(note, 600) for note in section.notes]
        if section.rows:
            lines.append(safe_table(section.header, section.rows))
        parts.append("\n\n".join(lines))
    text = "\n\n".join(parts)
    if len(text.encode()) <= LIMIT:
        return text
    cut = text.encode()[: LIMIT - 80].decode(errors="ignore").rsplit("\n", 1)[0]
    return f"{cut}\n\n… the rest is in report.html"


def counted(counts: Mapping[str, int], most: int = 12) -> str:
    """``name 3, other 2`` of the largest counts, or a dash."""
    largest = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    shown = [f"{one_line(name, 40)} {count:,}" for name, count in largest[:most]]
    return ", ".join(shown + ([f"{len(largest) - most} more"] if len(largest) > most else [])) or "–"
