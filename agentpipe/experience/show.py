"""One episode as a readable graph: what was done, what each step made and needed, and from which steps that came."""

from __future__ import annotations

import re
import textwrap
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from agentpipe.environments.compound import describe_compound
from agentpipe.environments.layout import (
    ACCUMULATING,
    ACTION_COUNT,
    ACTION_NAMES,
    FALSE_ALARM,
    MODES,
    REASONS,
    SEGMENTS,
    TOKENS,
)
from agentpipe.errors import InputError
from agentpipe.experience.graph import influence, neighbours
from agentpipe.experience.quality import CUT, SPIKE
from agentpipe.experience.store.index import STEP_BITS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from agentpipe.experience.store.shard import Shard

WIDTH: Final = 100
"""columns of the text"""
_INDENT: Final = " " * 9
_LARGEST: Final = 1 << 32


class Place(NamedTuple):
    """What ``ENV[:STEP]`` names."""

    environment: str
    """id, or index in the catalogue"""
    episode: int | None
    """None: no STEP was given"""
    step: int | None


def locate(text: str) -> Place:
    """Reads ``ENV[:STEP]``.

    ENV is an environment's id or its index in the catalogue; STEP is ``EPISODE.STEP``, or one number, the step's id:
    episode × 2¹⁶ + step, as the index of a shard has it.

    >>> locate("t0012.sensor-3:2.7")
    Place(environment='t0012.sensor-3', episode=2, step=7)

    Raises:
        InputError: nothing of the kind.
    """
    environment, colon, tail = text.strip().partition(":")
    found = re.fullmatch(r"([0-9]{1,15})(?:\.([0-9]{1,5}))?", tail) if colon else None
    if not environment or (colon and found is None):
        raise InputError(f"not an environment and step: {text!r}", field="ENV[:STEP]", remedy=_HOW)
    if found is None:
        return Place(environment, None, None)
    if found[2] is None:
        episode, step = divmod(int(found[1]), 1 << STEP_BITS)
    else:
        episode, step = int(found[1]), int(found[2])
    if episode >= _LARGEST or step >= 1 << STEP_BITS:
        raise InputError(f"no such step: {tail}", field="STEP", remedy=_HOW)
    return Place(environment, episode, step)


_HOW: Final = "write an environment's id or index, then perhaps :EPISODE.STEP, such as t0012.sensor-3:2.7"


def describe(shard: Shard, row: int, step: int | None = None) -> dict[str, Any]:
    """The episode in ``row`` as a JSON object: ``episode``, and ``steps`` with what each made and used.

    Args:
        shard: sealed or live.
        row: of its episode table.
        step: each step also gets its ``relation`` to this one: ``this``, ``cause``, ``effect``, or None.

    Raises:
        InputError: the episode has no such step.
        CorruptError: a file was cut short.
    """
    shard.still_whole()
    episode, steps = shard.episodes[row], shard.steps(row)
    if step is not None and not 0 <= step < len(steps):
        remedy = f"it has the steps 0 to {len(steps) - 1}"
        raise InputError(
            f"the episode has no step {step}", episode=int(episode["episode"]), field="STEP", remedy=remedy
        )
    names = _Names(shard)
    parents = shard.parents(row)
    above, below = neighbours(parents)
    rewards = np.ascontiguousarray(steps["reward"])
    dependents, influences = influence(parents.reshape(-1), np.array([len(steps)]), rewards)
    related = _relations(above, below, step)
    listed = []
    for number, record in enumerate(steps):
        spike = abs(float(record["reward"])) >= SPIKE
        listed.append(
            {
                "step": number,
                "step_id": (int(episode["episode"]) << STEP_BITS) + number,
                "time": _iso(int(record["time_ns"])),
                "minutes": round(float(record["time"]), 4),
                "segment": names.segment(int(record["segment"])),
                "action": names.action(int(record["action"])),
                "probability": float(np.exp(record["log_probability"])),
                "value": float(record["value"]),
                "reward": float(record["reward"]),
                "dependents": int(dependents[number]),
                "influence": float(influences[number]),
                "made": names.tokens(int(record["produced"])),
                "used": {},
                "parents": above[number],
                "children": below[number],
                "spike": spike,
                "unexplained": spike and not above[number],
                "idle": int(dependents[number]) == 0 and not record["earned"],
                "truncated": bool(record["truncated"]),
                "policy": int(record["policy"]),
                "relation": related.get(number),
            }
        )
    for number, sources in enumerate(_sources(steps["produced"], steps["used"], names.accumulating)):
        listed[number]["used"] = {names.token(token): makers for token, makers in sources.items()}
    return {"episode": _describe_episode(shard, row, names), "steps": listed}


def _describe_episode(shard: Shard, row: int, names: _Names) -> dict[str, Any]:
    episode, steps = shard.episodes[row], shard.steps(row)
    environment = int(episode["environment"])
    policies = [shard.policies[number] for number in np.unique(steps["policy"]).tolist()]
    return {
        "environment": shard.names.get(environment, ""),
        "index": environment,
        "episode": int(episode["episode"]),
        "row": row,
        "shard": str(shard.path),
        "steps": len(steps),
        "mode": names.mode(int(episode["mode"])),
        "machine": int(episode["machine"]),
        "outcome": names.reason(int(episode["reason"])),
        "success": bool(episode["success"]),
        "cut": bool(episode["cut"]),
        "return": float(episode["return"]),
        "elapsed_minutes": float(episode["elapsed_seconds"]) / 60,
        "decision_seconds": float(episode["decision_seconds"]),
        "fingerprint": f"{int(steps['fingerprint'][0]):08x}",
        "compound": describe_compound(episode["compound"]),
        "policies": policies,
        "began": _iso(int(steps["time_ns"][0])),
        "ended": _iso(int(steps["time_ns"][-1])),
    }


class _Names:
    """What the numbers of a shard are called; numbers where this program does not know."""

    def __init__(self, shard: Shard) -> None:
        manifest = shard.manifest
        self.accumulating = int(manifest.get("accumulating", 0))
        self._known = self.accumulating == ACCUMULATING and manifest["action_count"] == ACTION_COUNT
        self._reasons: Sequence[str] = manifest.get("reasons", REASONS)

    def _name(self, names: Sequence[str], number: int, otherwise: str) -> str:
        return names[number] if self._known and 0 <= number < len(names) else otherwise

    def action(self, number: int) -> str:
        return self._name(ACTION_NAMES, number, f"action {number}")

    def segment(self, number: int) -> str:
        return self._name(SEGMENTS, number, f"segment {number}")

    def mode(self, number: int) -> str:
        return self._name(MODES, number, "unknown" if number < 0 else f"mode {number}")

    def token(self, bit: int) -> str:
        return self._name(TOKENS, bit, f"token {bit}")

    def tokens(self, bits: int) -> list[str]:
        return [self.token(bit) for bit in _bits(bits)]

    def reason(self, number: int) -> str:
        if number < 0:
            return CUT
        return self._reasons[number] if number < len(self._reasons) else f"reason {number}"


def _bits(bits: int) -> list[int]:
    return [bit for bit in range(bits.bit_length()) if bits >> bit & 1]


def _sources(
    produced: npt.NDArray[np.uint32], used: npt.NDArray[np.uint32], accumulating: int
) -> list[dict[int, list[int]]]:
    """Of each step: the tokens it used, and the steps that made each; none made what the plant itself sent."""
    makers: dict[int, list[int]] = {}
    found = []
    for step, (made, needed) in enumerate(zip(produced.tolist(), used.tolist(), strict=True)):
        found.append({token: list(makers.get(token, ())) for token in _bits(needed)})
        for token in _bits(made):
            makers[token] = [*makers.get(token, ()), step] if accumulating >> token & 1 else [step]
    return found


def _relations(above: Sequence[Sequence[int]], below: Sequence[Sequence[int]], step: int | None) -> dict[int, str]:
    """What each step has to do with ``step``."""
    if step is None:
        return {}
    causes, effects = (_reachable(edges, step) for edges in (above, below))
    return {**dict.fromkeys(causes, "cause"), **dict.fromkeys(effects, "effect"), step: "this"}


def _reachable(edges: Sequence[Sequence[int]], start: int) -> set[int]:
    seen: set[int] = set()
    frontier = list(edges[start])
    while frontier:
        step = frontier.pop()
        if step not in seen:
            seen.add(step)
            frontier.extend(edges[step])
    return seen


def _iso(time_ns: int) -> str:
    """UTC, to the microsecond."""
    seconds, rest = divmod(time_ns, 10**9)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{rest // 1000:06d}Z"


# ------------------------------------------------------------------------------------------------------- as text


def render(shard: Shard, row: int, step: int | None = None) -> str:
    """The episode in ``row`` as plain text of at most 100 columns; arguments and errors as of :func:`describe`."""
    content = describe(shard, row, step)
    lines = [*_heading(content["episode"]), ""]
    if step is not None:
        lines += [f"> step {step}, ^ what led to it, v what came of it", ""]
    lines.append(f"{'step':>5} {'min':>6}  {'segment':<9} {'action':<26} {'reward':>7} {'deps':>5} {'influence':>10}")
    for entry in content["steps"]:
        lines += _step_lines(entry)
    return "\n".join(line.rstrip() for line in lines)


def fault_text(mode: str, machine: int) -> str:
    """What was really wrong; a false alarm has a machine whose readings raised it, and no fault."""
    if mode == MODES[FALSE_ALARM]:
        return f"none, a false alarm of machine {machine}"
    return mode if machine < 0 else f"{mode}, machine {machine}"


def _heading(episode: Mapping[str, Any]) -> list[str]:
    name = episode["environment"] or f"environment {episode['index']}"
    compound = f" ({episode['compound']})" if episode["compound"] else ""
    players = ", ".join(
        f"{one['player']} {_short(one['version'])} (policy {one['ordinal']})" for one in episode["policies"]
    )
    fault = fault_text(episode["mode"], episode["machine"])
    return _wrapped(
        f"{name}, episode {episode['episode']} (catalogue index {episode['index']}, row {episode['row']})",
        f"true fault: {fault}; disturbance {episode['fingerprint']}{compound}",
        f"outcome: {episode['outcome']} after {episode['steps']} steps and {episode['elapsed_minutes']:.2f} minutes, "
        f"return {episode['return']:+.3f}",
        f"played by {players}",
        f"{episode['began']} to {episode['ended']}",
        f"{episode['shard']}",
    )


def _short(version: str) -> str:
    """The beginning of a digest; any other version as it is."""
    return version[:16] if re.fullmatch(r"[0-9a-f]{64}", version) else version


def _wrapped(*lines: str) -> list[str]:
    return [part for line in lines for part in textwrap.wrap(line, WIDTH, subsequent_indent="  ") or [""]]


def _step_lines(entry: Mapping[str, Any]) -> list[str]:
    sign = {"this": ">", "cause": "^", "effect": "v", None: " "}[entry["relation"]]
    first = (
        f"{sign}{entry['step']:>4} {entry['minutes']:>6.2f}  {entry['segment']:<9} {entry['action']:<26} "
        f"{entry['reward']:>+7.3f} {entry['dependents']:>5} {entry['influence']:>10.3g}  {_marks(entry)}"
    )
    lines = [first]
    if entry["used"]:
        parts = [f"{token} ← {_numbers(makers) or 'no step'}" for token, makers in entry["used"].items()]
        lines += _listed("used ", parts, "; ")
    covered = {step for makers in entry["used"].values() for step in makers}
    if rest := [step for step in entry["parents"] if step not in covered]:
        lines += _listed("after ", [str(step) for step in rest], ", ")
    if entry["made"]:
        lines += _listed("made ", entry["made"], ", ")
    return lines


def _marks(entry: Mapping[str, Any]) -> str:
    marks = []
    if entry["spike"]:
        marks.append("UNEXPLAINED SPIKE" if entry["unexplained"] else "spike")
    marks += [name for name in ("idle", "truncated") if entry[name]]
    return ", ".join(marks)


def _numbers(steps: Iterable[int]) -> str:
    return ", ".join(str(step) for step in steps)


def _listed(title: str, parts: Sequence[str], separator: str) -> list[str]:
    return textwrap.wrap(
        title + separator.join(parts),
        WIDTH,
        initial_indent=_INDENT,
        subsequent_indent=_INDENT + " " * len(title),
        break_long_words=False,
    )
