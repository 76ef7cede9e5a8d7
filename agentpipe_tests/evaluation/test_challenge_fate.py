"""Every combination of what is known of a candidate against a table of rules written down here anew."""

from itertools import product

import pytest

from agentpipe.errors import EvaluationError
from agentpipe.evaluation.challenge_fate import Standing, decide
from agentpipe.evaluation.challenge_result import VERDICTS

GOOD = {
    "candidate": "new",
    "champion": "now",
    "parent": "now",
    "past_champions": ("old", "now"),
    "compared_with": "now",
    "verdict": "PROMOTE",
    "reasons": ("not worse",),
    "drift_against": "now",
    "drift": "OK",
}


def fate(**changes):
    return decide(Standing(**{**GOOD, **changes}))


@pytest.mark.parametrize(
    ("changes", "action", "reason"),
    [
        ({}, "promote", "not worse"),
        ({"parent": "old"}, "promote", "not worse"),  # compared again with the present champion: that counts
        ({"parent": None}, "promote", "not worse"),
        ({"candidate": "now"}, "refuse", "is the champion already"),
        ({"candidate": "old"}, "refuse", "was champion before"),
        ({"gates_passed": False}, "refuse", "gate"),
        ({"why_not_promotable": ("the demo profile is for a first look",)}, "refuse", "demo profile"),
        ({"rejected_by": "ann"}, "refuse", "ann rejected it"),
        ({"champion": None, "parent": None, "past_champions": ()}, "promote", "the first"),
        ({"champion": None, "past_champions": ()}, "hold", "lost"),
        ({"older_than_champion": True}, "refuse", "older"),
        ({"missing_labels": 3}, "retrain", "3 correction"),
        ({"compared_with": None, "verdict": None}, "compare_again", "not compared"),
        ({"compared_with": "old"}, "compare_again", "compared against old, but the champion is now"),
        ({"verdict": "NOT_BETTER_ENOUGH"}, "refuse", "NOT_BETTER_ENOUGH: not worse"),
        ({"verdict": "VETO_CELL"}, "refuse", "VETO_CELL"),
        ({"verdict": "INSUFFICIENT_DATA"}, "refuse", "INSUFFICIENT_DATA"),
        ({"drift": None, "drift_against": None}, "compare_again", "not measured for drift"),
        ({"drift_against": "old"}, "compare_again", "measured for drift against old"),
        ({"drift": "NO_CHAMPION", "drift_against": None}, "compare_again", "not measured for drift"),
        ({"drift": "REVIEW"}, "hold", "REVIEW"),
        ({"drift": "INSUFFICIENT_DATA"}, "hold", "INSUFFICIENT_DATA"),
    ],
)
def test_each_rule(changes, action, reason):
    found = fate(**changes)
    assert found.action == action
    assert reason in found.reason


SPACE = {
    "candidate": ("new", "now", "old"),
    "champion": (None, "now"),
    "parent": (None, "now", "old"),
    "gates_passed": (True, False),
    "why_not_promotable": ((), ("demo",)),
    "rejected_by": (None, "ann"),
    "older_than_champion": (False, True),
    "missing_labels": (0, 2),
    "compared_with": (None, "now", "old"),
    "verdict": (None, *VERDICTS),
    "drift_against": (None, "now", "old"),
    "drift": (None, "OK", "REVIEW", "INSUFFICIENT_DATA", "NO_CHAMPION"),
}


def expected(s):
    """The rules as one flat list of (condition, action); the first that holds."""
    table = [
        (s["candidate"] == s["champion"] or s["candidate"] in ("now", "old"), "refuse"),
        (not s["gates_passed"] or s["why_not_promotable"] or s["rejected_by"], "refuse"),
        (s["champion"] is None and s["parent"] is not None, "hold"),
        (s["champion"] is None, "promote"),
        (s["older_than_champion"], "refuse"),
        (s["missing_labels"], "retrain"),
        (s["verdict"] is None or s["compared_with"] != "now", "compare_again"),
        (s["verdict"] != "PROMOTE", "refuse"),
        (s["drift"] is None or s["drift_against"] != "now", "compare_again"),
        (s["drift"] != "OK", "hold"),
        (True, "promote"),
    ]
    return next(action for condition, action in table if condition)


def test_every_combination_of_what_is_known():
    seen = set()
    for values in product(*SPACE.values()):
        known = dict(zip(SPACE, values, strict=True))
        found = decide(Standing(**known, past_champions=("old", "now")))
        assert found.action == expected(known), known
        assert found.reason
        seen.add(found.action)
    assert seen == {"promote", "hold", "refuse", "compare_again", "retrain"}


def test_nothing_but_a_comparison_with_the_present_champion_promotes_past_it():
    for values in product(*SPACE.values()):
        known = dict(zip(SPACE, values, strict=True))
        if known["champion"] is None:
            continue
        if decide(Standing(**known, past_champions=("old", "now"))).action == "promote":
            assert (known["compared_with"], known["verdict"], known["candidate"]) == ("now", "PROMOTE", "new")
            assert not known["older_than_champion"]
            assert not known["missing_labels"]


def test_an_unknown_verdict_is_an_error():
    with pytest.raises(EvaluationError, match="no verdict"):
        fate(verdict="MAYBE")
