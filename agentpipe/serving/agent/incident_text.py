"""The repair report of an incident as Markdown, for the person who reads it in the morning."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from agentpipe.serving.agent.incidents import Incident
    from agentpipe.settings import AgentSettings


class Advice(NamedTuple):
    """What the agent did of itself, and what a person can do."""

    done: str
    by_hand: str


_SERVER: Final = Advice(
    "The server is not asked any more. Each decision comes from the next rung of the ladder; the server is probed on.",
    "Look at the server's log and restart it. Verify that it serves the agent's bundle (`agentpipe bundle verify`).",
)
_ADVICE: Final = {
    "local": Advice(
        "The policy in this process is not asked any more. Decisions come from the rules.",
        "Verify the bundle (`agentpipe bundle verify`); restore or rebuild it, then restart the agent.",
    ),
    "line": Advice(
        "The agent connects to the line again and again. A question that was not answered is asked again by the line.",
        "Look at the line's controller and at the network between it and this machine.",
    ),
    "disk": Advice(
        "Decisions go on; their records are kept in memory until the disk takes them, within a bound.",
        "Free space on the file system of the home, or make it writable again. Do not restart the agent before.",
    ),
    "sensor": Advice(
        "Readings of the lost sensors are replaced by estimates, and the policy is told how little is known.",
        "Look at the sensors, their cables and their transmitters. Take the line over where it is in doubt.",
    ),
    "champion": Advice(
        "The bundle of the new champion is not used. The one in use goes on; the bundle is looked at again and again.",
        "Verify the bundle (`agentpipe bundle verify`); restore or rebuild it, or bring an earlier champion back.",
    ),
    "feedback": Advice(
        "Decisions go on and stay on record here; they are handed on when the intake takes them again.",
        "See what it says above: look at the inbox `HOME/feedback/inbox`, its file system, or Redis.",
    ),
    "clock": Advice(
        "Nothing counts on the wall clock but stamps, which stay UTC. Deadlines and intervals were kept.",
        "Look at the time service of this machine. Stamps of records around the jump may be out of order.",
    ),
}


def advice(part: str) -> Advice:
    """What is known of a part by the first word of its name; a name that says nothing is a server's."""
    return _ADVICE.get(re.split("[ -]", part, maxsplit=1)[0], _SERVER)


def report(incident: Incident, settings: AgentSettings) -> str:
    """The whole report; for an incident that is open, as far as it is known."""
    known = advice(incident.part)
    ended = incident.ended.isoformat(timespec="seconds") if incident.ended else "–"
    lines = [
        f"# Incident: {incident.part} ({incident.status})",
        "",
        "| | |",
        "|---|---|",
        f"| agent | {incident.agent} |",
        f"| opened | {incident.opened.isoformat(timespec='seconds')} |",
        f"| ended | {ended} |",
        f"| lasted | {_seconds(incident.seconds)} |",
        f"| lost and back | {incident.losses} × lost, {incident.returns} × back |",
        "",
        "## What happened",
        "",
        *(f"- {time.isoformat(timespec='seconds')} {text}" for time, text in incident.events),
        *([f"- … and {incident.unlisted} more"] if incident.unlisted else []),
        "",
        "## Effect on decisions",
        "",
        *_effect(incident),
        "",
        "## What was done",
        "",
        known.done,
        "",
        "## Expected recovery",
        "",
        _expected(incident, settings),
        "",
        "## What to do by hand",
        "",
        known.by_hand,
        "",
    ]
    return "\n".join(lines)


def _effect(incident: Incident) -> list[str]:
    total = sum(incident.decided.values())
    if not total:
        return ["No decision fell into it."]
    mean, most = (f"{seconds * 1e3:.1f} ms" for seconds in (incident.latency_sum / total, incident.latency_max))
    return [
        f"{total} decisions, {incident.late} of them late; {mean} on average, {most} at most.",
        "",
        "| decided by | decisions |",
        "|---|---|",
        *(f"| {name} | {count} |" for name, count in sorted(incident.decided.items())),
    ]


def _expected(incident: Incident, settings: AgentSettings) -> str:
    if incident.status == "closed":
        return "It has recovered by itself."
    if incident.status in ("stopped", "interrupted"):
        return "The agent ended before it recovered. A new one probes every part when it starts."
    if incident.part.startswith("sensor"):
        return f"By itself, after {settings.successes_to_recover} packets with new readings."
    wait = settings.probe_every * settings.successes_to_recover
    return (
        f"By itself, about {wait:g} s after the cause is gone: it is probed every {settings.probe_every:g} s and back "
        f"after {settings.successes_to_recover} good probes."
    )


def _seconds(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"
