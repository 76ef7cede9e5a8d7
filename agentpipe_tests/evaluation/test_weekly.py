from datetime import date
from html.parser import HTMLParser
from io import BytesIO

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from agentpipe.errors import EvaluationError
from agentpipe.evaluation import weekly_page
from agentpipe.evaluation.canvas import LIMIT
from agentpipe.evaluation.drift import DriftResult
from agentpipe.evaluation.drift_classifier import JointDrift
from agentpipe.evaluation.drift_features import FeatureDrift
from agentpipe.evaluation.input_drift import InputDriftResult, InputLimits
from agentpipe.evaluation.label_mix import ProductionDay, ProductionWeek, share
from agentpipe.evaluation.weekly import ChampionWeek, DriftDay, FeedbackDay, Measured, weekly_report
from agentpipe.evaluation.weekly_page import Section
from agentpipe.storage import read_json

MONDAY = date(2026, 3, 23)  # the week of a change of clocks in Europe
HOSTILE = "<script>alert(1)</script>$x_1$|![a](http://b)"


def drift(day, status="OK", kl=0.01, trigger="nightly"):
    cells = {"sensor-1": {"status": status, "kl": kl, "rows": 500}} if kl is not None else {}
    ci95 = [None, None] if kl is None else [0.9 * kl, 1.1 * kl]
    result = DriftResult(status, 5000, "reference", 0.15, kl=kl, ci95=ci95, by_cell=cells)
    return DriftDay(date(2026, 3, day), trigger, result)


def feedback(day, correct=40, wrong=10):
    return FeedbackDay(date(2026, 3, day), 200, {"correct": correct, "wrong": wrong}, quarantined=3)


def inputs(status="OK", name="reading.0.1"):
    shares = [0.0, *[0.1] * 10, 0.0]
    moved = [0.0, *[0.05] * 9, 0.5, 0.05]
    edges = [float(k) for k in range(11)]
    features = [
        FeatureDrift(f"{name}{k}", status, (8 - k) / 20, 0.2, 0.01, 0.0, 1.0, 0.05, edges, shares, moved)
        for k in range(5)
    ]
    return InputDriftResult(
        status, 5000, 4000, InputLimits(), features, JointDrift(status, 0.55, [0.53, 0.57], 0.58, 4000, "groups")
    )


def production(week=MONDAY, right=80, of=100, quarantine=None):
    mix = {"correct": {"none": right}, "needs_improvement": {}, "wrong": {"planning": of - right}}
    none = {"correct": {}, "needs_improvement": {}, "wrong": {}}
    days = [
        ProductionDay(f"2026-03-{23 + n}", 100, none if n else mix, share(0 if n else right, 0 if n else of))
        for n in range(7)
    ]
    rate = share(right, of, 50)
    status = "INSUFFICIENT_DATA" if rate.value is None else "OK"
    rates = {"first_time_right": rate, "interventions": share(9, 700), "unlabelled": share(600, 700)}
    counts = {"decisions": 700, "lines": 12, "labels": of, "taken_over": 5, "corrected": 4}
    return ProductionWeek(
        week=week.isoformat(),
        status=status,
        mix=mix,
        quarantine=quarantine or {"late": 3},
        days=days,
        **rates,
        **counts,
    )


def everything(**changes):
    given = {
        "champion": ChampionWeek("a" * 64, "b" * 64, drift(23).result),
        "inputs": inputs(),
        "production": production(),
        "production_before": production(date(2026, 3, 16), right=78),
    }
    return Measured(**{**given, **changes})


def statuses(report):
    return {part["name"]: part["status"] for part in report.summary["parts"]}


# What it says ------------------------------------------------------------------------------------------------------


def test_a_quiet_week_in_which_everything_was_measured():
    report = weekly_report(MONDAY, [drift(24), drift(23)], measured=everything())
    summary = report.summary
    assert summary["status"] == "OK"
    assert statuses(report) == {"Candidates": "OK", "Champion": "OK", "Inputs": "OK", "Production": "OK"}
    assert [day["day"] for day in summary["drift"]["days"]] == ["2026-03-23", "2026-03-24"]
    assert summary["production"]["first_time_right"]["value"] == 0.8
    assert summary["change"]["first_time_right"] == 0.02
    assert summary["last_day"] == "2026-03-29"


def test_counts_stand_in_for_production_that_was_not_measured():
    summary = weekly_report(MONDAY, [drift(24)], [feedback(24), feedback(23)]).summary
    assert summary["feedback"]["decisions"] == 400
    assert summary["feedback"]["labels"] == {"correct": 80, "wrong": 20}
    assert summary["feedback"]["share_correct"] == 0.8
    assert summary["feedback"]["share_correct_ci95"] == [0.711171, 0.866633]
    assert summary["feedback"]["quarantined"] == 6


@pytest.mark.parametrize("missing", ["champion", "inputs", "production"])
def test_what_was_not_measured_is_insufficient_data_never_ok(missing):
    report = weekly_report(MONDAY, [drift(24)], measured=everything(**{missing: None}))
    assert report.summary["status"] == "INSUFFICIENT_DATA"
    assert statuses(report)[missing.capitalize()] == "INSUFFICIENT_DATA"
    assert report.summary["reason"].startswith(f"{missing.capitalize()}: ")


def test_an_empty_week_is_insufficient_data_never_no_drift():
    report = weekly_report(MONDAY, [], [])
    assert report.summary["status"] == "INSUFFICIENT_DATA"
    assert set(statuses(report).values()) == {"INSUFFICIENT_DATA"}
    assert report.summary["feedback"]["share_correct"] is None
    assert report.plots == {}


def test_one_drifted_candidate_asks_for_review():
    report = weekly_report(MONDAY, [drift(24), drift(25, "REVIEW", 0.4)], measured=everything())
    assert report.summary["status"] == "REVIEW"
    assert (report.summary["drift"]["worst_kl"], report.summary["drift"]["worst_day"]) == (0.4, "2026-03-25")
    assert report.summary["drift"]["days"][1]["cells_to_review"] == ["sensor-1"]
    assert "REVIEW" in report.markdown()


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"champion": ChampionWeek("a", "b", drift(23, "REVIEW", 0.4).result)}, "Champion"),
        ({"inputs": inputs("REVIEW")}, "Inputs"),
        ({"inputs_since": inputs("REVIEW")}, "Inputs since last week"),
        ({"production": production(right=40)}, "Production"),
    ],
)
def test_the_worst_part_is_the_reports_status(changes, part):
    report = weekly_report(MONDAY, [drift(24)], measured=everything(**changes))
    assert report.summary["status"] == statuses(report)[part] == "REVIEW"
    assert [name for name, status in statuses(report).items() if status != "OK"] == [part]
    # too little elsewhere does not hide it
    assert weekly_report(MONDAY, [], measured=everything(**changes)).summary["status"] == "REVIEW"


@pytest.mark.parametrize("status", ["NO_CHAMPION", "INSUFFICIENT_DATA"])
def test_candidates_without_a_measurement_say_why(status):
    report = weekly_report(MONDAY, [drift(24, status, None)], measured=everything())
    assert statuses(report)["Candidates"] == report.summary["status"] == status


@pytest.mark.parametrize(
    ("champion", "status"),
    [
        (ChampionWeek(None, None), "NO_CHAMPION"),
        (ChampionWeek(None, "b"), "NO_CHAMPION"),
        (ChampionWeek("a", "a"), "OK"),
        (ChampionWeek("a", "b"), "INSUFFICIENT_DATA"),
        (ChampionWeek("a", "b", DriftResult("INSUFFICIENT_DATA", 10, "r", 0.15)), "INSUFFICIENT_DATA"),
    ],
)
def test_a_champion_without_one_before_it_says_why(champion, status):
    assert statuses(weekly_report(MONDAY, [drift(24)], measured=everything(champion=champion)))["Champion"] == status


def test_what_could_not_be_measured_is_mentioned():
    summary = weekly_report(MONDAY, [drift(24), drift(25, "INSUFFICIENT_DATA", None)]).summary
    assert summary["parts"][0]["reason"] == "all 1 measured candidates stayed within the limit; 1 could not be measured"


def test_few_labels_give_no_share():
    summary = weekly_report(MONDAY, [], [feedback(24, correct=49, wrong=0)]).summary
    assert (summary["feedback"]["status"], summary["feedback"]["share_correct"]) == ("INSUFFICIENT_DATA", None)
    assert weekly_report(MONDAY, [], [feedback(24, correct=50, wrong=0)]).summary["feedback"]["share_correct"] == 1.0
    report = weekly_report(MONDAY, [drift(24)], measured=everything(production=production(right=9, of=10)))
    assert statuses(report)["Production"] == report.summary["status"] == "INSUFFICIENT_DATA"


def test_a_status_that_does_not_exist_is_refused():
    champion = ChampionWeek("a", "b", DriftResult("FINE", 10, "r", 0.15, kl=0.1))
    with pytest.raises(EvaluationError, match="'FINE' is no status"):
        weekly_report(MONDAY, [], measured=Measured(champion=champion))


def test_a_week_starts_on_monday_and_holds_seven_days():
    with pytest.raises(EvaluationError, match="Monday"):
        weekly_report(date(2026, 3, 24), [], [])
    weekly_report(MONDAY, [drift(29)], [])
    with pytest.raises(EvaluationError, match="not in the week"):
        weekly_report(MONDAY, [drift(30)], [])
    with pytest.raises(EvaluationError, match="not in the week"):
        weekly_report(MONDAY, [], [feedback(22)])
    for field in ("production", "production_before"):
        with pytest.raises(EvaluationError, match="was given for that of"):
            weekly_report(MONDAY, [], measured=Measured(**{field: production(date(2026, 3, 9))}))


# How it is shown ---------------------------------------------------------------------------------------------------


class Balance(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.outside, self.images, self.tags = [], [], 0, set()

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        if tag not in ("meta", "br", "img"):
            self.open.append(tag)
        for name, value in attributes:
            if name in ("src", "href", "srcset", "action", "data"):
                if value.startswith("data:image/png;base64,"):
                    self.images += 1
                else:
                    self.outside.append(value)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def read(page):
    balance = Balance()
    balance.feed(page)
    assert (balance.open, balance.outside) == ([], [])
    assert "url(" not in page
    assert "@import" not in page
    return balance


@pytest.fixture(scope="module")
def hostile():
    """Every text from outside wants to be more than text."""
    return weekly_report(
        MONDAY,
        [drift(24, trigger=HOSTILE), drift(25, "INSUFFICIENT_DATA", None, trigger=HOSTILE)],
        measured=everything(
            champion=ChampionWeek(HOSTILE, f"{HOSTILE}2", drift(23).result),
            inputs=inputs("REVIEW", name=HOSTILE),
            inputs_since=inputs(name=HOSTILE),
            production=production(quarantine={HOSTILE: 7, **{f"reason {n}": n for n in range(1, 40)}}),
        ),
    )


def test_the_page_is_whole_and_needs_nothing_beside_it(hostile):
    balance = read(hostile.html)
    assert balance.images == len(hostile.plots) == 6
    assert balance.tags.isdisjoint({"script", "link", "iframe", "object"})
    assert "&lt;script&gt;alert(1)" in hostile.html
    assert len(hostile.html) < 150_000


def test_the_markdown_fits_into_an_event_and_holds_no_markup_from_outside(hostile):
    text = hostile.markdown()
    assert len(text.encode()) <= 16_000
    assert "<" not in text
    assert "![a]" not in text
    assert "data:image" not in text


def test_every_plot_is_a_readable_png_that_fits_into_an_event(hostile):
    assert set(hostile.plots) == {
        "candidates", "champion_by_cell", "input_features", "input_distributions", "label_mix", "first_time_right"
    }  # fmt: skip
    for data in hostile.plots.values():
        image = Image.open(BytesIO(data))
        image.load()
        assert len(data) <= LIMIT
        assert len(np.unique(np.asarray(image.convert("L")))) > 5


def test_a_page_of_counts_alone_is_whole():
    page = weekly_report(MONDAY, [], [feedback(24)]).html
    read(page)
    assert "80.0 % of 50 labelled decisions were correct." in page
    assert len(page) < 16_000


@settings(max_examples=30, deadline=None)
@given(st.text(max_size=60), st.lists(st.lists(st.text(max_size=200), min_size=2, max_size=2), max_size=200))
def test_any_text_leaves_the_page_balanced_and_the_markdown_short(title, rows):
    head = {"week": title, "last_day": title, "status": "OK", "reason": title}
    sections = [Section(title, notes=[title], header=["a", "b"], rows=rows)] * 3
    read(weekly_page.page(head, sections, {}))
    assert len(weekly_page.markdown(head, sections).encode()) <= 16_000


def test_equal_weeks_have_equal_digests_and_are_saved_whole(tmp_path):
    first = weekly_report(MONDAY, [drift(24), drift(23)], measured=everything())
    second = weekly_report(MONDAY, [drift(23), drift(24)], measured=everything())
    assert first.digest == second.digest
    path = first.save(tmp_path / "2026-03-23")
    assert read_json(path / "report.json") == first.summary
    assert (path / "report.html").read_text() == first.html
    assert (path / "report.md").read_text() == first.markdown()
    content = read_json(path / "report.json")
    assert InputDriftResult.from_dict(content["inputs"]) == inputs()
    assert ProductionWeek.from_dict(content["production"]) == production()
