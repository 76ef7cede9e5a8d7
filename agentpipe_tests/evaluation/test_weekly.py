from datetime import date
from html.parser import HTMLParser

import pytest

from agentpipe.errors import EvaluationError
from agentpipe.evaluation.drift import DriftResult
from agentpipe.evaluation.weekly import DriftDay, FeedbackDay, weekly_report
from agentpipe.storage import read_json

MONDAY = date(2026, 3, 23)  # the week of a change of clocks in Europe


def drift(day, status="OK", kl=0.01, trigger="nightly"):
    cells = {"sensor-1": {"status": status, "kl": kl, "rows": 500}} if kl is not None else {}
    return DriftDay(date(2026, 3, day), trigger, DriftResult(status, 5000, "reference", 0.15, kl=kl, by_cell=cells))


def feedback(day, correct=40, wrong=10):
    return FeedbackDay(date(2026, 3, day), 200, {"correct": correct, "wrong": wrong}, quarantined=3)


def test_a_quiet_week():
    summary = weekly_report(MONDAY, [drift(24), drift(23)], [feedback(24), feedback(23)]).summary
    assert summary["status"] == "OK"
    assert [day["day"] for day in summary["drift"]["days"]] == ["2026-03-23", "2026-03-24"]
    assert summary["feedback"]["decisions"] == 400
    assert summary["feedback"]["labels"] == {"correct": 80, "wrong": 20}
    assert summary["feedback"]["share_correct"] == 0.8
    assert summary["feedback"]["quarantined"] == 6
    assert summary["last_day"] == "2026-03-29"


def test_one_drifted_candidate_asks_for_review():
    report = weekly_report(MONDAY, [drift(24), drift(25, "REVIEW", 0.4)], [])
    assert report.summary["status"] == "REVIEW"
    assert (report.summary["drift"]["worst_kl"], report.summary["drift"]["worst_day"]) == (0.4, "2026-03-25")
    assert report.summary["drift"]["days"][1]["cells_to_review"] == ["sensor-1"]
    assert "REVIEW" in report.markdown()


def test_an_empty_week_is_insufficient_data_never_no_drift():
    summary = weekly_report(MONDAY, [], []).summary
    assert summary["status"] == "INSUFFICIENT_DATA"
    assert summary["feedback"]["status"] == "INSUFFICIENT_DATA"
    assert summary["feedback"]["share_correct"] is None


@pytest.mark.parametrize("status", ["NO_CHAMPION", "INSUFFICIENT_DATA"])
def test_a_week_without_a_measurement_says_why(status):
    assert weekly_report(MONDAY, [drift(24, status, None)], []).summary["status"] == status


def test_what_could_not_be_measured_is_mentioned():
    summary = weekly_report(MONDAY, [drift(24), drift(25, "INSUFFICIENT_DATA", None)], []).summary
    assert summary["reason"] == "all 1 measured candidates stayed within the limit; 1 could not be measured"


def test_few_labels_give_no_share():
    summary = weekly_report(MONDAY, [], [feedback(24, correct=49, wrong=0)]).summary
    assert (summary["feedback"]["status"], summary["feedback"]["share_correct"]) == ("INSUFFICIENT_DATA", None)
    assert weekly_report(MONDAY, [], [feedback(24, correct=50, wrong=0)]).summary["feedback"]["share_correct"] == 1.0


def test_a_week_starts_on_monday_and_holds_seven_days():
    with pytest.raises(EvaluationError, match="Monday"):
        weekly_report(date(2026, 3, 24), [], [])
    weekly_report(MONDAY, [drift(29)], [])
    with pytest.raises(EvaluationError, match="not in the week"):
        weekly_report(MONDAY, [drift(30)], [])
    with pytest.raises(EvaluationError, match="not in the week"):
        weekly_report(MONDAY, [], [feedback(22)])


class Balance(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.outside = [], []

    def handle_starttag(self, tag, attributes):
        if tag not in ("meta", "br"):
            self.open.append(tag)
        self.outside += [value for name, value in attributes if name in ("src", "href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_and_needs_nothing_beside_it():
    page = weekly_report(MONDAY, [drift(24, trigger="<b>&")], [feedback(24)]).html
    balance = Balance()
    balance.feed(page)
    assert (balance.open, balance.outside) == ([], [])
    assert "&lt;b&gt;&amp;" in page
    assert "80.0 % of 50 labelled decisions were correct." in page
    assert len(page) < 16_000


def test_equal_weeks_have_equal_digests_and_are_saved_whole(tmp_path):
    first = weekly_report(MONDAY, [drift(24), drift(23)], [feedback(24)])
    second = weekly_report(MONDAY, [drift(23), drift(24)], [feedback(24)])
    assert first.digest == second.digest
    path = first.save(tmp_path / "2026-03-23")
    assert read_json(path / "report.json") == first.summary
    assert (path / "report.html").read_text() == first.html
