"""Candidate against champion on the same episodes: the verdict, its reasons, and what it rests on."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from agentpipe.environments.catalog import load_catalog
from agentpipe.environments.datafiles import data_dir
from agentpipe.environments.layout import Purpose
from agentpipe.environments.line_profile import default_profile
from agentpipe.environments.players import RandomPlayer
from agentpipe.environments.rules import RulesPlayer
from agentpipe.environments.table import load_table
from agentpipe.errors import CorruptError, EvaluationError, VersionError
from agentpipe.evaluation.challenge import challenge, judge
from agentpipe.evaluation.challenge_looks import Look
from agentpipe.evaluation.challenge_result import Challenge
from agentpipe.evaluation.challenge_statistics import Limits
from agentpipe.evaluation.columns import column
from agentpipe.evaluation.holdout import identity
from agentpipe_tests.evaluation.fakes import PROFILE, Builder, FakeTable, Guessing, Knowing, draw, make_environments

HOLDOUT, TRAIN = make_environments(300), make_environments(15, split="train")
WIDE = Limits(margin=0.2, cell_margin=0.05)


class Weak(Knowing):
    """Answers wrong in the environments that ``where`` names."""

    def __init__(self, where, name="weak"):
        super().__init__(name, "weights-2")
        self.where = where

    def act(self, pool):
        wrong = np.array([self.where(spec) for spec in pool.environments])
        actions = np.where(wrong, (pool.right + 2) % 4, pool.right).astype(np.int64)
        return SimpleNamespace(actions=actions, probabilities=np.ones(pool.size, np.float32))


def look(first=0, episodes=2, number=1):
    return Look(number, number, "new", "now", "question", first, episodes, "2026-01-01T00:00:00+00:00")


def compare(candidate=None, champion=None, *, environments=HOLDOUT, limits=None, at=None, of=None, **options):
    candidate, champion = candidate or Knowing(), champion or Knowing()
    if of is None:
        of = (identity(candidate) or "new", identity(champion) or "now")
    return challenge(
        candidate,
        champion,
        environments,
        FakeTable(),
        PROFILE,
        seed=3,
        look=replace(at or look(), candidate=of[0], champion=of[1]),
        trained_on=options.pop("trained_on", TRAIN),
        limits=limits or Limits(),
        build=options.pop("build", None) or Builder(rate=0.1),
        **options,
    )


@pytest.fixture(scope="module")
def worse():
    """A candidate that always fails in one cell."""
    return compare(Weak(lambda spec: spec.cell == "network-3"), limits=WIDE)


def test_an_equal_candidate_is_promoted_since_it_is_not_inferior():
    result = compare()
    figures = result.figures
    assert result.verdict == "PROMOTE"
    assert (figures["difference"], figures["only_candidate"], figures["only_champion"]) == (0.0, 0, 0)
    assert figures["low"] == pytest.approx(-2.995732 / 300, abs=1e-6)
    assert (figures["environments"], figures["environments_needed"], figures["episodes"]) == (300, 300, 600)
    assert "does not lack 1.00%" in result.reasons[0]


def test_one_environment_less_is_too_few_and_never_promotes():
    result = compare(environments=HOLDOUT[:-1])
    assert result.verdict == "INSUFFICIENT_DATA"
    assert result.reasons[0] == "299 environments cannot show a margin of 1.00%: 300 are needed"
    better = compare(Knowing(), Guessing(), environments=HOLDOUT[:-1])
    assert better.figures["difference"] > 0.3
    assert better.verdict == "INSUFFICIENT_DATA"


def test_a_cell_without_enough_environments_is_too_few():
    without = [spec for spec in HOLDOUT if spec.cell != "load-5"]
    result = compare(environments=without, limits=WIDE)
    assert (result.verdict, result.reasons[-1]) == ("INSUFFICIENT_DATA", "fewer than 10 environments in load-5")
    thin = compare(environments=HOLDOUT[:135], limits=WIDE)
    assert thin.verdict == "INSUFFICIENT_DATA"
    assert compare(environments=HOLDOUT[:135], limits=WIDE, cell_environments=9).verdict == "PROMOTE"


def test_a_worse_candidate_is_inferior_and_the_better_one_promoted():
    worse, better = compare(Guessing(), Knowing()), compare(Knowing(), Guessing())
    assert worse.verdict == "NOT_BETTER_ENOUGH"
    assert worse.reasons[0].startswith("inferior: success -")
    assert better.verdict == "PROMOTE"


def test_one_that_may_be_worse_is_undecided():
    result = compare(Weak(lambda spec: spec.index in (4, 77)))
    assert result.verdict == "NOT_BETTER_ENOUGH"
    assert result.reasons[0].startswith("undecided: success -0.")


def test_a_cell_that_is_worse_vetoes(worse):
    assert worse.verdict == "VETO_CELL"
    assert len(worse.reasons) == 1
    assert worse.reasons[0].startswith("worse in network-3: -")
    cells = worse.figures["by_cell"]
    assert [cell for cell, part in cells.items() if part["worse"]] == ["network-3"]
    assert cells["network-3"]["environments"] == 20
    assert cells["sensor-1"]["p_holm"] == 1.0


def test_figures_are_what_a_naive_count_gives(worse):
    champion = {
        (spec.environment_id, episode): all(
            draw(3, Purpose.PROMOTION, spec.index, episode, s) >= 0.1 for s in (1, 2, 3)
        )
        for spec in HOLDOUT
        for episode in range(2)
    }
    lost = [key for key, success in champion.items() if success and key[0].endswith(".network-3")]
    figures = worse.figures
    assert figures["success"]["champion"] == pytest.approx(sum(champion.values()) / 600, abs=1e-6)
    assert (figures["only_champion"], figures["only_candidate"]) == (len(lost), 0)
    assert figures["difference"] == pytest.approx(-len(lost) / 600, abs=1e-6)
    cell = figures["by_cell"]["network-3"]
    assert (cell["only_champion"], cell["episodes"], cell["success"]["candidate"]) == (len(lost), 40, 0.0)
    by_line = np.array([sum(key[0].startswith(f"holdout-T{line}.") for key in lost) / -30 for line in range(20)])
    half = stats.t.ppf(0.975, 19) * stats.sem(by_line)
    assert figures["by_template"]["templates"] == 20
    assert figures["by_template"]["ci95"] == pytest.approx([by_line.mean() - half, by_line.mean() + half], abs=2e-6)


def test_swapping_the_two_changes_every_sign(worse):
    swapped = compare(Knowing(), Weak(lambda spec: spec.cell == "network-3"), limits=WIDE).figures
    figures = worse.figures
    assert swapped["difference"] == -figures["difference"]
    assert (swapped["low"], swapped["high"]) == (-figures["high"], -figures["low"])
    assert (swapped["only_candidate"], swapped["only_champion"]) == (figures["only_champion"], 0)
    assert swapped["verdict"] == "PROMOTE"


@settings(max_examples=25, deadline=None)
@given(st.floats(0.01, 0.5), st.floats(0, 0.5), st.floats(0, 0.5), st.floats(0, 0.5))
def test_wider_limits_never_take_a_promotion_back(worse, margin, more, cell_margin, cell_more):
    narrow = judge(worse.report, Limits(margin, cell_margin))
    if narrow.verdict == "PROMOTE":
        assert judge(worse.report, Limits(margin + more, cell_margin + cell_more)).verdict == "PROMOTE"


# --------------------------------------------------------------------------------------------- the episodes


def test_both_play_exactly_the_look_s_episodes():
    result = compare(Guessing(), Knowing(), at=look(first=7, episodes=3))
    table = result.report.table
    episodes = column(table, "episode").reshape(2, 300, 3)
    assert (episodes == [7, 8, 9]).all()
    success = column(table, "success").reshape(2, 300, 3)[1]
    expected = [
        [all(draw(3, Purpose.PROMOTION, spec.index, e, s) >= 0.1 for s in (1, 2, 3)) for e in (7, 8, 9)]
        for spec in HOLDOUT
    ]
    assert np.array_equal(success, expected)
    assert result.report.summary["purpose"] == "promotion"


def test_the_same_look_gives_the_same_digest_and_another_look_other_episodes():
    players = (Guessing(), Knowing())
    first, again = compare(*players), compare(*players, threads=2)
    other = compare(*players, at=look(first=2, number=2))
    assert first.digest == again.digest
    assert first.figures == again.figures
    assert other.figures["episodes_digest"] != first.figures["episodes_digest"]
    assert other.figures["success"] != first.figures["success"]


def test_no_time_is_in_the_digest():
    changed = Look(1, 1, "new", "now", "question", 0, 2, "2030-01-01T00:00:00+00:00")
    assert compare(at=changed).digest == compare().digest


@pytest.mark.parametrize(("of", "role"), [(("weights-2", "weights-1"), "candidate"), (("weights-1", "x"), "champion")])
def test_a_look_of_other_policies_is_refused(of, role):
    with pytest.raises(EvaluationError, match=f"another {role}"):
        compare(of=of)


def test_progress_says_who_plays():
    told = []
    compare(progress=lambda stage, done, total: told.append((stage, done, total)))
    assert [stage for stage, done, total in told if done == total] == ["play candidate", "play champion"]


def test_training_environments_are_refused():
    with pytest.raises(EvaluationError, match="were trained on"):
        compare(trained_on=[*TRAIN, HOLDOUT[5]])
    with pytest.raises(EvaluationError, match="no environment"):
        compare(environments=[])
    with pytest.raises(EvaluationError, match="occurs twice"):
        compare(environments=[HOLDOUT[0], HOLDOUT[0]])


def test_players_must_meet_the_same_faults():
    class Drifting(Builder):
        def __call__(self, *arguments, seed, **options):
            return super().__call__(*arguments, seed=seed + len(self.built), **options)

    with pytest.raises(EvaluationError, match="different faults"):
        compare(build=Drifting())


def test_a_table_of_something_else_is_no_pair(worse):
    half = worse.report.table.slice(0, 900)
    with pytest.raises(EvaluationError, match="same episodes"):
        judge(SimpleNamespace(table=half, summary=worse.report.summary), Limits())


# ----------------------------------------------------------------------------------------- kept and shown


def test_saved_and_read_it_is_the_same(worse, tmp_path):
    loaded = Challenge.load(worse.save(tmp_path / "comparison"))
    assert (loaded.figures, loaded.digest, loaded.report.digest) == (worse.figures, worse.digest, worse.report.digest)
    assert json.loads((tmp_path / "comparison" / "challenge.json").read_text())["verdict"] == "VETO_CELL"


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"verdict": "PROMOTE"}, CorruptError),
        ({"format": 2}, VersionError),
        ({"episodes_digest": "0"}, CorruptError),
    ],
)
def test_a_changed_file_is_told(worse, tmp_path, change, error):
    path = worse.save(tmp_path / "comparison") / "challenge.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(error):
        Challenge.load(path.parent)
    path.write_text("[]")
    with pytest.raises(CorruptError):
        Challenge.load(path.parent)


def test_markdown_shows_verdict_looks_and_cells(worse):
    text = worse.markdown()
    assert text.startswith("**VETO_CELL**: worse in network-3")
    assert "Look 1 of this champion, 1 of all." in text
    assert "For lines drawn anew (20 templates): -" in text
    assert text.count("\n| ") == 16
    assert len(text.encode()) < 16_000


def test_on_the_built_in_line_rules_beat_chance_and_equal_themselves():
    catalog, profile = load_catalog(), default_profile()

    def play(candidate, champion):
        return challenge(
            candidate,
            champion,
            catalog.environments("holdout")[:300],
            load_table(data_dir() / "disturbances.csv"),
            profile,
            seed=0,
            look=look(first=5, episodes=1),
            trained_on=catalog.environments("train"),
            limits=Limits(),
        )

    rules = RulesPlayer(profile)
    assert play(rules, RandomPlayer()).verdict == "PROMOTE"
    assert play(RandomPlayer(), rules).verdict == "NOT_BETTER_ENOUGH"
    same = play(rules, rules)
    assert (same.verdict, same.figures["only_candidate"], same.figures["only_champion"]) == ("PROMOTE", 0, 0)
