import numpy as np
import pytest

from agentpipe.environments.layout import Purpose
from agentpipe.errors import CorruptError, EvaluationError
from agentpipe.evaluation.attribution import (
    AttributionReport,
    attribute_failures,
    causes_markdown,
    same_disturbance,
    sample_rows,
)
from agentpipe.evaluation.causes import CAUSES, PAIRS, SINGLES, decide_causes
from agentpipe.evaluation.holdout import evaluate
from agentpipe_tests.evaluation.fakes import (
    PROFILE,
    Builder,
    FakePool,
    FakeTable,
    Knowing,
    expected_causes,
    make_environments,
)

HOLDOUT, TRAIN = make_environments(30), make_environments(15, split="train")
EPISODES = 3


def judged(player=None, build=None):
    return evaluate(
        [player or Knowing()], HOLDOUT, FakeTable(), PROFILE, seed=4, purpose=Purpose.REPORT, episodes_per_env=EPISODES,
        trained_on=TRAIN, build=build or Builder(),
    )  # fmt: skip


def attributed(report, player=None, build=None, **options):
    arguments = {"seed": 4, "purpose": Purpose.REPORT, **options}
    return attribute_failures(
        report, player or Knowing(), HOLDOUT, FakeTable(), PROFILE, build=build or Builder(), **arguments
    )


@pytest.fixture(scope="module")
def report():
    return judged()


@pytest.fixture(scope="module")
def attribution(report):
    return attributed(report)


def naive_cause(active):
    """What switching off one or two of the ``active`` disturbances can repair."""
    if len(active) == 1:
        return next(iter(active))
    return "compound" if len(active) == 2 else "policy_or_information"


def test_each_failure_gets_the_cause_that_made_it(attribution):
    truth = expected_causes(0.3, HOLDOUT, 4, Purpose.REPORT, EPISODES)
    expected = {key: naive_cause(active) for key, active in truth.items() if active}
    rows = attribution.table.to_pylist()
    assert {(row["environment_id"], row["episode"]): row["cause"] for row in rows} == expected
    assert set(expected.values()) == set(CAUSES)  # the sample shows every cause


def test_the_share_attributed_is_that_of_known_causes(attribution):
    rows = attribution.table.to_pylist()
    known = sum(row["cause"] != "policy_or_information" for row in rows)
    summary = attribution.summary
    assert summary["attributed"] == pytest.approx(known / len(rows), abs=1e-6)
    assert summary["ci95"][0] < summary["attributed"] < summary["ci95"][1]
    assert sum(item["count"] for item in summary["causes"].values()) == summary["failures"] == len(rows)
    assert sum(sum(counts.values()) for counts in summary["by_cell"].values()) == len(rows)


def test_a_failure_of_skill_is_not_blamed_on_a_disturbance():
    class Stubborn(Knowing):
        def act(self, pool):
            decision = super().act(pool)
            decision.actions = (pool.right + 2) % 4  # always wrong, always allowed
            return decision

    result = attributed(judged(Stubborn()), Stubborn())
    assert result.summary["attributed"] == 0.0
    assert result.summary["causes"]["policy_or_information"]["count"] == 90
    assert result.summary["control"] == {}  # no success to take a control from


def test_switching_a_disturbance_off_spoils_no_success_here(attribution):
    assert {kind: item["flips"] for kind, item in attribution.summary["control"].items()} == {
        "sensor": 0, "network": 0, "load": 0,
    }  # fmt: skip


def test_luck_shows_in_the_control():
    class Fickle(FakePool):  # with anything switched off, the outcome is a coin's
        def active(self, row):
            coin = (self.environments[row].index + self.episode[row]) % 2
            return {"sensor"} - self.off if not self.off else ({"other"} if coin else set())

    class Fickles(Builder):
        def __call__(self, environments, table, profile, *, seed, purpose, threads=1, off=frozenset(), first_episode=0):
            return Fickle(list(environments), seed, purpose, off=off)

    class Never(Fickle):
        def active(self, row):
            return set() if not self.off else super().active(row)

    class Nevers(Fickles):
        def __call__(self, environments, *arguments, off=frozenset(), **options):
            return Never(list(environments), options["seed"], options["purpose"], off=off)

    failing = attributed(judged(build=Fickles()), build=Fickles())
    assert failing.summary["attributed"] == pytest.approx(0.5, abs=0.01)
    control = attributed(judged(build=Nevers()), build=Nevers()).summary["control"]
    assert control["sensor"]["share"] == pytest.approx(
        0.5, abs=0.01
    )  # the same coin: the share attributed means nothing


def test_a_replay_that_ends_otherwise_is_left_out(report):
    result = attributed(report, build=Builder(rate=0.2))  # another world: some failures do not come back
    still = {key for key, active in expected_causes(0.2, HOLDOUT, 4, Purpose.REPORT, EPISODES).items() if active}
    rows = result.table.to_pylist()
    assert {(row["environment_id"], row["episode"]) for row in rows if row["replayed"]} == still
    assert 0 < result.summary["replayed"] == len(still) < len(rows)
    assert sum(item["count"] for item in result.summary["causes"].values()) == len(still)


def test_when_nothing_can_be_replayed_no_share_is_claimed(report):
    summary = attributed(report, build=Builder(rate=0.0)).summary
    assert (summary["status"], summary["attributed"], summary["replayed"]) == ("NOT_REPLAYABLE", None, 0)
    assert summary["failures"] > 0


def test_no_failures_are_said_to_be_none():
    result = attributed(judged(build=Builder(rate=0.0)), build=Builder(rate=0.0))
    assert (result.summary["status"], result.summary["attributed"], result.table.num_rows) == ("NO_FAILURES", None, 0)
    assert "NO_FAILURES" in causes_markdown(result.summary)


def test_the_sample_is_capped_and_repeatable(report):
    first, second = attributed(report, cap=10, control_cap=5), attributed(report, cap=10, control_cap=5)
    assert (first.summary["sampled"], first.digest) == (10, second.digest)
    assert first.summary["control"]["sensor"]["sampled"] == 5
    assert first.summary["failures"] > 10


def test_pairs_are_tried_only_where_no_single_one_helps(report):
    builder = Builder()
    attributed(report, build=builder, control_cap=0)
    singles = {tuple(pool.off): pool.size for pool in builder.built if len(pool.off) == 1}
    pairs = {tuple(pool.off): pool.size for pool in builder.built if len(pool.off) == 2}
    assert len(singles) == len(pairs) == 3
    assert max(pairs.values()) < min(singles.values())
    assert all(pool.closed for pool in builder.built)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"seed": 5}, "used seed 4, not 5"), ({"purpose": Purpose.PROMOTION}, "used purpose 'report', not 'promotion'")],
)
def test_other_conditions_than_the_evaluations_are_refused(report, options, message):
    with pytest.raises(EvaluationError, match=message):
        attributed(report, **options)


def test_an_unknown_player_or_environment_is_refused(report):
    with pytest.raises(EvaluationError, match="no player 'rules'"):
        attributed(report, Knowing("rules"))
    with pytest.raises(EvaluationError, match="not among those given"):
        attribute_failures(
            report, Knowing(), HOLDOUT[:3], FakeTable(), PROFILE, seed=4, purpose=Purpose.REPORT, build=Builder()
        )


def test_other_weights_than_those_evaluated_are_refused(report):
    with pytest.raises(EvaluationError, match="used identity 'weights-1', not 'weights-2'"):
        attributed(report, Knowing(digest="weights-2"))


def test_other_players_bear_witness_to_what_no_switch_helps():
    class Wrong(Knowing):
        def act(self, pool):
            decision = super().act(pool)
            decision.actions = (pool.right + 2) % 4
            return decision

    environments, world = HOLDOUT[:10], Builder(rate=0.0)
    for others, expected in (
        ([Knowing("rules"), Knowing("oracle")], "another_player_succeeded"),
        ([Wrong("rules"), Wrong("oracle")], "oracle_failed"),
        ([Wrong("rules"), Knowing("oracle")], "none"),
        ([Knowing("random")], "none"),  # luck proves nothing
        ([], "none"),
    ):
        report = evaluate(
            [*others, Wrong()], environments, FakeTable(), PROFILE, seed=4, purpose=Purpose.REPORT, episodes_per_env=1,
            trained_on=TRAIN, build=world,
        )  # fmt: skip
        result = attribute_failures(
            report, Wrong(), environments, FakeTable(), PROFILE, seed=4, purpose=Purpose.REPORT, build=world
        )
        assert result.summary["rest"] == {
            name: 10 * (name == expected) for name in ("another_player_succeeded", "oracle_failed", "none")
        }


def test_one_disturbance_is_one_query(attribution):
    rows = same_disturbance(attribution.table, "sha-sensor-1").to_pylist()
    expected = [row for row in attribution.table.to_pylist() if row["cell"] == "sensor-1"]
    assert rows == expected
    assert rows
    assert same_disturbance(attribution.table, rows[0]["crc32"]).num_rows >= len(rows)


def test_a_saved_attribution_comes_back_and_damage_is_noticed(attribution, tmp_path):
    path = attribution.save(tmp_path / "attribution")
    again = AttributionReport.load(path)
    assert again.summary == attribution.summary
    assert again.table.to_pylist() == attribution.table.to_pylist()
    (path / "summary.json").write_bytes((path / "summary.json").read_bytes().replace(b'"failures"', b'"failure"', 1))
    with pytest.raises(CorruptError, match="digest"):
        AttributionReport.load(path)


def test_causes_are_decided_from_single_ones_first():
    def outcome(*kinds):
        return {kinds_off: np.array([kinds_off in kinds]) for kinds_off in (*SINGLES, *PAIRS)}

    cases = {
        "sensor": outcome(("sensor",)),
        "load": outcome(("load",), ("network", "load")),
        "compound": outcome(("network", "load")),
        "policy_or_information": outcome(),
    }
    for cause, helped in cases.items():
        assert CAUSES[decide_causes(helped)[0]] == cause
    assert CAUSES[decide_causes(outcome(("sensor",), ("network",)))[0]] == "compound"


def test_sampling_keeps_order_and_repeats_nothing():
    rows = np.arange(100, 200)
    drawn = sample_rows(rows, 20, seed=1)
    assert drawn.tolist() == sorted(set(drawn.tolist()))
    assert len(drawn) == 20
    assert sample_rows(rows, 100, seed=1) is rows


def test_the_table_for_people_names_every_cause(attribution):
    text = causes_markdown(attribution.summary)
    assert all(cause in text for cause in CAUSES)
