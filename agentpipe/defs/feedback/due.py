"""Whether a day's feedback is to be taken in, or to train a candidate, or why not."""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import dagster as dg

from agentpipe.defs.partitions import START, candidate_key, last_closed_day
from agentpipe.defs.players import champion
from agentpipe.defs.references import Reference
from agentpipe.defs.resources import Workspace
from agentpipe.defs.under_way import OVER
from agentpipe.errors import RedisServerError
from agentpipe.storage import canonical_json, digest_bytes, typed_os_errors

FEEDBACK_TAG = "agentpipe/feedback"
"""Tag of a run that trains on a day's feedback; its value is the day and the feedback's digest."""


@dataclass(frozen=True)
class Standing:
    """What a day's feedback amounts to."""

    day: dt.date
    kind: Literal["due", "idle"]
    text: str
    digest: str
    overtaker: str = ""
    """digest of the champion that overtook the candidate of exactly this feedback; empty where none did"""

    @property
    def tag(self) -> str:
        """Value of :data:`FEEDBACK_TAG`: changes when the feedback is amended, or its candidate was overtaken."""
        after = f":{self.overtaker[:16]}" if self.overtaker else ""
        return f"{self.day.isoformat()}:{self.digest[:16]}{after}"


def store(workspace: Workspace) -> Path:
    """The feedback store of the home."""
    return workspace.root / "feedback" / "store"


def closed_days(workspace: Workspace) -> list[dt.date]:
    """The days with feedback that are over and can still be amended, oldest first."""
    from agentpipe.feedback.store import days

    last = last_closed_day()
    first = max(START, last - dt.timedelta(days=workspace.settings.feedback.late_days))
    return [day for day in days(store(workspace)) if first <= day <= last]


def untaken_days(workspace: Workspace) -> list[tuple[dt.date, str]]:
    """Closed days whose partition does not say what the store holds, each with the store's digest."""
    from agentpipe.feedback.store import day_state

    found = ((day, day_state(store(workspace), day).digest) for day in closed_days(workspace))
    versions = workspace.references.version
    return [(day, digest) for day, digest in found if versions("production_feedback", day.isoformat()) != digest]


class Waiting(NamedTuple):
    """What waits in inbox and stream."""

    digest: str
    """of all of it; empty where nothing does"""
    trouble: str
    """why the stream could not be looked at; empty where it could"""


def waiting_input(workspace: Workspace) -> Waiting:
    """What waits: files by name, size and time of change, and what the stream holds.

    The times tell a file from an earlier one of the same name and size, which a run has taken in. A Redis that is away
    keeps no file waiting.

    Raises:
        HomeError: the inbox cannot be read.
    """
    from agentpipe.feedback.inbox import listing, shown
    from agentpipe.feedback.stream import stream_of, waiting_entries

    inbox = workspace.root / "feedback" / "inbox"
    files = []
    for path in listing(inbox):
        with typed_os_errors(path), contextlib.suppress(FileNotFoundError):  # a run takes it in just now
            found = path.lstat()
            files.append((shown(path.name), found.st_size, found.st_ctime_ns))
    stream, entries, trouble = stream_of(workspace.settings), "", ""
    if stream is not None:
        try:
            entries = waiting_entries(stream)
        except RedisServerError as error:
            trouble = f"the stream is not read: {error}"
    digest = digest_bytes(canonical_json([files, entries]))[:16] if files or entries else ""
    return Waiting(digest, trouble)


def standing(workspace: Workspace, day: dt.date) -> Standing:
    """Whether the closed ``day`` is to train a candidate, or why not."""
    from agentpipe.feedback.store import day_state

    state = day_state(store(workspace), day)

    def idle(text: str) -> Standing:
        return Standing(day, "idle", text, state.digest)

    needed = workspace.settings.feedback.minimum_labels
    if state.trainable < needed:
        return idle(f"{state.trainable} labelled decisions, {needed} are needed")
    current = champion(workspace)
    if current is None:
        return idle("no champion yet that could learn from them")
    trained = workspace.references.find("policy_checkpoint", candidate_key(day, "feedback"))
    overtaker = ""
    if trained is not None and trained.consumed.get("production_feedback") == state.digest:
        if not _overtaken(workspace, trained, current.digest):
            return idle("a candidate was trained on exactly these")
        overtaker = current.digest
    weak = workspace.settings.finetuning.weak_negative
    package = workspace.root / current.package
    new, why_nothing = _new_labels(store(workspace), day, state.digest, package, current.digest, weak)
    if new < needed:
        return idle(f"{new} of {state.trainable} labelled decisions are new to the champion, {needed} are needed")
    if why_nothing:
        return idle(why_nothing)
    again = ", whose candidate another one overtook" if overtaker else ""
    return Standing(day, "due", f"{new} new labelled decisions{again}", state.digest, overtaker)


def _overtaken(workspace: Workspace, trained: Reference, champion_digest: str) -> bool:
    """The candidate of a day lost a race against one that has become champion: its corrections are still to learn.

    Judged by a gate, a comparison or a person it would not be trained again.
    """
    from agentpipe.evaluation.challenge_fate import Fate

    published = workspace.references.find("publish", trained.partition)
    bundle = workspace.references.find("triton_bundle", trained.partition)
    if published is None or bundle is None or trained.figure("parent") == champion_digest:
        return False
    if (bundle.consumed.get("policy_checkpoint"), published.data_version) != (
        trained.data_version,
        bundle.data_version,
    ):
        return False  # what was published is another one
    return Fate(published.figure("fate"), published.figure("reason")).overtaken


@functools.lru_cache(maxsize=128)
def _new_labels(
    feedback: Path, day: dt.date, digest: str, package: Path, champion_digest: str, weak_negative: float
) -> tuple[int, str]:
    """How many labels of a day the champion's lineage has not learned, and why none can teach anything, if so.

    Counted once for each state of both.
    """
    del digest, champion_digest
    from agentpipe.feedback.labelled import read_labelled
    from agentpipe.learning.policy.lineage import trained_labels
    from agentpipe.learning.succession.reach import why_nothing

    new = read_labelled(feedback, day).without(trained_labels(package))
    return len(new), why_nothing(new, weak_negative)


def feedback_waits(instance: dg.DagsterInstance, workspace: Workspace, day: dt.date) -> str:
    """What the feedback candidate of ``day`` is waiting for or doing; empty where it has ended or is not to be."""
    found = standing(workspace, day)
    runs = instance.get_runs(dg.RunsFilter(tags={FEEDBACK_TAG: found.tag}))
    if any(run.status not in OVER for run in runs):
        return f"policy_checkpoint[{candidate_key(day, 'feedback')}] runs"
    return "" if runs or found.kind == "idle" else f"{found.text} are about to be trained on"
