"""Labelling: which decisions a person should look at first, and what becomes of the answers."""

from __future__ import annotations

import csv
import io
import json
import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from agentpipe.environments.csvio import read_csv
from agentpipe.environments.layout import ACTION_NAMES
from agentpipe.errors import FeedbackError
from agentpipe.feedback.index import reading
from agentpipe.feedback.schema import ERROR_TYPES, LONGEST_TEXT, VERDICTS
from agentpipe.feedback.store import day_state, days, decisions_of
from agentpipe.storage import canonical_json, digest_bytes, write_bytes

if TYPE_CHECKING:
    import datetime as dt
    import sqlite3
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from agentpipe.environments.csvio import CsvRow

WELL: Final = ("", "done", "ok", "success")
"""results that are no failure; the empty one is not known yet"""
_COLUMNS: Final = ["decision_id", "time", "line_id", "policy_version", "probabilities", "action", "result", "mask"]
_NUMBER: Final = re.compile(r"(\d{1,9})(\.0*)?", re.ASCII)
_ANSWER: Final = ("verdict", "error_type", "confidence", "annotator", "corrected_action")


class Unlabelled(NamedTuple):
    """A decision that nobody has labelled yet; ``probability`` is that of the action that was taken.

    ``allowed`` are the actions that its mask allows.
    """

    decision_id: str
    time: dt.datetime
    line_id: str
    policy_version: str
    action: int
    probability: float
    result: str
    allowed: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        """JSON-ready form."""
        told = {"time": self.time.isoformat(), "action_name": action_name(self.action), "allowed": list(self.allowed)}
        return {**self._asdict(), **told}


class Answer(NamedTuple):
    """What a person says of a decision; ``error_type`` and ``corrected_action`` may be None."""

    decision_id: str
    verdict: str
    error_type: str | None
    confidence: float
    annotator: str
    corrected_action: int | None


def worst_first(store: Path, *, limit: int, of_days: Iterable[dt.date] | None = None) -> list[Unlabelled]:
    """Unlabelled decisions: failed results first, then by the least probability of the action that was taken.

    Args:
        store: Root of the feedback store.
        limit: At most so many.
        of_days: Only of these UTC days; of all when None.
    """
    wanted = days(store) if of_days is None else list(of_days)
    open_days = [day for day in wanted if day_state(store, day).unlabelled]
    with reading(store) as connection:
        rows = connection.execute("SELECT DISTINCT decision FROM labels").fetchall() if connection else []
        labelled = pa.array([identifier for (identifier,) in rows], type=pa.string())
    worst: list[tuple[tuple[bool, float, str], Unlabelled]] = []
    for table in decisions_of(store, open_days, _COLUMNS):
        left = table.filter(pc.invert(pc.is_in(table.column("decision_id"), value_set=labelled)))
        if left.num_rows:
            worst = sorted([*worst, *_worst_of(left, limit)])[:limit]
    return [row for _, row in worst]


def _worst_of(table: pa.Table, limit: int) -> list[tuple[tuple[bool, float, str], Unlabelled]]:
    action = table.column("action").to_numpy()
    flat = pc.list_flatten(table.column("probabilities")).to_numpy()
    probability = flat.reshape(table.num_rows, -1)[np.arange(table.num_rows), action]
    well = pc.is_in(pc.utf8_lower(table.column("result")), value_set=pa.array(WELL)).to_numpy().astype(np.bool_)
    by_id = pc.sort_indices(table.column("decision_id")).to_numpy()
    order = by_id[np.lexsort((probability[by_id], well[by_id]))][:limit]
    chosen = table.select([name for name in _COLUMNS if name != "probabilities"]).take(pa.array(order)).to_pylist()
    return [
        ((bool(well[place]), float(probability[place]), row["decision_id"]), _unlabelled(row, probability[place]))
        for place, row in zip(order.tolist(), chosen, strict=True)
    ]


def _unlabelled(row: dict[str, Any], probability: float) -> Unlabelled:
    allowed = tuple(action for action, may in enumerate(row.pop("mask")) if may)
    return Unlabelled(**row, probability=round(float(probability), 6), allowed=allowed)


# ---------------------------------------------------------------------------------------------- sheets


def write_sheet(path: Path, rows: Iterable[Unlabelled]) -> None:
    """The decisions as a CSV file, with empty columns for the answers; opens in a spreadsheet.

    The last column, ``allowed_actions``, names what may be given as the corrected action.
    """
    file = io.StringIO()
    writer = csv.writer(file)
    told = [name for name in Unlabelled._fields if name not in ("action", "allowed")]
    writer.writerow([*told, "action", *_ANSWER, "allowed_actions"])
    for row in rows:
        cells = {**row._asdict(), "time": row.time.isoformat()}
        allowed = " ".join(map(action_name, row.allowed))
        writer.writerow([*(cells[name] for name in told), action_name(row.action), *("" for _ in _ANSWER), allowed])
    write_bytes(path, file.getvalue().encode())


def read_sheet(path: Path, annotator: str) -> list[Answer]:
    """The answers in a CSV file: rows with a verdict; the others are not answered yet.

    Args:
        path: A file with the columns ``decision_id`` and ``verdict`` at least, as :func:`write_sheet` makes it.
        annotator: Who answers, where the row does not say.

    Raises:
        FeedbackError: it cannot be read, its last line has no line end (it may be half a line, and half a number), or
            an answer makes no sense; the message names row and field.
    """
    sheet = read_csv(path, error=FeedbackError)
    for name in ("decision_id", "verdict"):
        if name not in sheet.columns:
            raise FeedbackError(f"column {name!r} is missing", file=path, remedy="write it with --csv FILE")
    return [_answer(row, annotator) for row in sheet.rows if row.cells["verdict"]]


def _answer(row: CsvRow, annotator: str) -> Answer:
    cells = {name: row.cells.get(name, "") for name in _ANSWER}
    action = cells["corrected_action"]
    number = action_number(action)
    if action and number is None:
        remedy = f"give a name such as {ACTION_NAMES[0]}, or a number below {len(ACTION_NAMES)}"
        raise row.fail(f"unknown action {action!r}", "corrected_action", remedy)
    return Answer(
        decision_id=row.text("decision_id"),
        verdict=row.choice("verdict", VERDICTS),
        error_type=row.choice("error_type", ERROR_TYPES) if cells["error_type"] else None,
        confidence=row.number_in("confidence", 0.001, 1) if cells["confidence"] else 1.0,
        annotator=check_annotator(cells["annotator"] or annotator),
        corrected_action=number,
    )


def check_annotator(name: str) -> str:
    """``name``; raises ``FeedbackError`` where it is empty, has blanks or is too long."""
    if not name or len(name) > LONGEST_TEXT or len(name.split()) != 1 or not name.isprintable():
        remedy = "give one word with --annotator"
        raise FeedbackError(f"not a name of an annotator: {name!r}", field="annotator", remedy=remedy)
    return name


def action_name(action: int) -> str:
    """The name of an action of the built-in line; its number where it has none."""
    return ACTION_NAMES[action] if 0 <= action < len(ACTION_NAMES) else str(action)


def action_number(text: str) -> int | None:
    """An action by its name or number, also as spreadsheets write one (``25.0``); None where there is none."""
    if text in ACTION_NAMES:
        return ACTION_NAMES.index(text)
    number = _NUMBER.fullmatch(text)
    return int(number[1]) if number and int(number[1]) < len(ACTION_NAMES) else None


# ---------------------------------------------------------------------------------------------- answers


class Dropped(NamedTuple):
    """What became of answers: the file in the inbox (None: nothing new), how many it has, how many stood already."""

    file: Path | None
    labels: int
    already: int


def drop_answers(store: Path, inbox: Path, answers: Sequence[Answer], now: dt.datetime) -> Dropped:
    """Puts answers into the inbox as labels, like any other file; what is the latest word already is left out.

    An answer that differs from the latest label of its decision supersedes it. The id of a label follows from decision,
    answer and the number of labels before, so that answers given twice are one label.

    Raises:
        FeedbackError: an answer names a decision that did not come, or a decision twice.
    """
    seen: set[str] = set()
    rows: list[dict[str, Any]] = []
    with reading(store) as connection:
        for answer in answers:
            if answer.decision_id in seen:
                raise FeedbackError("a decision is answered twice", decision=answer.decision_id, remedy="keep one row")
            seen.add(answer.decision_id)
            identifier = _label_id(connection, answer)
            if identifier is not None:
                rows.append({"kind": "label", "label_id": identifier, "time": now.isoformat(), **answer._asdict()})
    if not rows:
        return Dropped(None, 0, len(answers))
    data = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    path = inbox / f"labels-{digest_bytes(data)[:16]}.jsonl"
    write_bytes(path, data)
    return Dropped(path, len(rows), len(answers) - len(rows))


def _label_id(connection: sqlite3.Connection | None, answer: Answer) -> str | None:
    """Id of the label that the answer becomes; None where the latest label says the same."""
    known = connection and connection.execute("SELECT 1 FROM decisions WHERE id = ?", (answer.decision_id,)).fetchone()
    if connection is None or not known:
        remedy = "agentpipe feedback label lists those that came"
        raise FeedbackError("there is no such decision", decision=answer.decision_id, remedy=remedy)
    query = "SELECT id FROM labels WHERE decision = ? ORDER BY time, id"
    labels = [identifier for (identifier,) in connection.execute(query, (answer.decision_id,))]
    if labels and labels[-1] == _id_of(answer, len(labels) - 1):
        return None
    return _id_of(answer, len(labels))


def _id_of(answer: Answer, before: int) -> str:
    return f"label-{digest_bytes(canonical_json([before, *answer]))[:32]}"
