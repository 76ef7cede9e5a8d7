"""What becomes of a candidate: promoted, held for a person, refused, compared again, or trained again (S19).

A pure function of what is known, so that every case can be listed and tested. The first rule that applies decides:

 1. It is the champion, or has been: refuse. A policy that was left comes back by a rollback only.
 2. A gate failed, its bundle is not promotable, or a person has rejected it: refuse.
 3. There is no champion: promote, the first whose gates pass; hold where it names a parent, since then the champion
    that it began from is lost.
 4. It is older than the champion (an old partition run again): refuse.
 5. The champion has learned corrections that it has not: train it again from the champion, so that a night that races
    with a feedback run loses neither's corrections.
 6. It was not compared with the present champion: compare again.
 7. The verdict is not PROMOTE: refuse.
 8. Its drift from the present champion was not measured: compare again.
 9. Drift is not OK: hold, for a person to judge. Too few rows is not "no drift".
10. Promote.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from agentpipe.errors import EvaluationError
from agentpipe.evaluation.challenge_result import PROMOTE, VERDICTS
from agentpipe.evaluation.drift import OK

if TYPE_CHECKING:
    from collections.abc import Collection

Action = Literal["promote", "hold", "refuse", "compare_again", "retrain"]
OLDER = "it is older than the champion"
"""Reason of a refusal by the fourth rule."""


@dataclass(frozen=True)
class Standing:
    """What is known of a candidate."""

    candidate: str
    """digest"""
    champion: str | None
    """digest of the champion now; ``None`` = there is none yet"""
    parent: str | None
    """digest of the champion that its training began from; ``None`` = from random weights"""
    past_champions: Collection[str] = ()
    """digests of every champion there ever was"""
    gates_passed: bool = True
    why_not_promotable: tuple[str, ...] = ()
    """empty where its bundle may become champion"""
    rejected_by: str | None = None
    """the person who rejected it, where it was held before"""
    older_than_champion: bool = False
    """its partition lies before the champion's: by the day, and of one day the feedback before the night"""
    missing_labels: int = 0
    """labels that the champion's lineage was trained on and the candidate's was not"""
    compared_with: str | None = None
    """digest of the champion in the comparison; ``None`` = not compared"""
    verdict: str | None = None
    """of the comparison"""
    reasons: tuple[str, ...] = ()
    """of the comparison"""
    drift_against: str | None = None
    """digest of the champion in the drift measurement; ``None`` = not measured"""
    drift: str | None = None
    """``OK``, ``REVIEW`` or ``INSUFFICIENT_DATA``"""


@dataclass(frozen=True)
class Fate:
    """What becomes of a candidate, and why."""

    action: Action
    reason: str

    @property
    def overtaken(self) -> bool:
        """Another candidate was faster; what this one has learned was judged by nobody."""
        return self.action in ("retrain", "compare_again") or (self.action == "refuse" and self.reason == OLDER)


def decide(standing: Standing) -> Fate:
    """What becomes of a candidate; see the module for the rules.

    Raises:
        EvaluationError: there is no such verdict.
    """
    for rule in (_known, _unfit, _first, _behind, _compared, _measured):
        fate = rule(standing)
        if fate is not None:
            return fate
    return Fate("promote", "; ".join(standing.reasons) or "not worse than the champion")


def _known(standing: Standing) -> Fate | None:
    if standing.candidate == standing.champion:
        return Fate("refuse", "it is the champion already")
    if standing.candidate in standing.past_champions:
        return Fate("refuse", "it was champion before: agentpipe champion rollback brings it back")
    return None


def _unfit(standing: Standing) -> Fate | None:
    if not standing.gates_passed:
        return Fate("refuse", "a gate did not pass")
    if standing.why_not_promotable:
        return Fate("refuse", f"not promotable: {'; '.join(standing.why_not_promotable)}")
    if standing.rejected_by is not None:
        return Fate("refuse", f"{standing.rejected_by} rejected it")
    return None


def _first(standing: Standing) -> Fate | None:
    if standing.champion is not None:
        return None
    if standing.parent is not None:
        return Fate("hold", f"it began from {standing.parent[:12]}, but there is no champion: was champion.json lost?")
    return Fate("promote", "the first promotable bundle whose gates pass")


def _behind(standing: Standing) -> Fate | None:
    if standing.older_than_champion:
        return Fate("refuse", OLDER)
    if standing.missing_labels > 0:
        count = standing.missing_labels
        return Fate("retrain", f"the champion has learned {count} correction(s) that this candidate has not")
    return None


def _compared(standing: Standing) -> Fate | None:
    fate = _outdated("compared", standing.compared_with if standing.verdict else None, standing.champion)
    if fate is not None:
        return fate
    if standing.verdict not in VERDICTS:
        raise EvaluationError(f"no verdict {standing.verdict!r}", remedy=f"one of {', '.join(VERDICTS)}")
    if standing.verdict != PROMOTE:
        return Fate("refuse", f"{standing.verdict}: {'; '.join(standing.reasons)}")
    return None


def _measured(standing: Standing) -> Fate | None:
    fate = _outdated("measured for drift", standing.drift_against if standing.drift else None, standing.champion)
    if fate is not None or standing.drift == OK:
        return fate
    return Fate("hold", f"drift is {standing.drift}: a person must judge it")


def _outdated(what: str, against: str | None, champion: str | None) -> Fate | None:
    assert champion is not None
    if against is None:
        return Fate("compare_again", f"it was not {what} against the champion")
    if against != champion:
        return Fate("compare_again", f"it was {what} against {against[:12]}, but the champion is {champion[:12]}")
    return None
