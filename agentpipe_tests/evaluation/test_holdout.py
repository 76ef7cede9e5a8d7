import numpy as np
import pyarrow.parquet as pq
import pytest

from agentpipe.environments.layout import Purpose
from agentpipe.errors import ActionError, CorruptError, EvaluationError, VersionError
from agentpipe.evaluation.columns import column
from agentpipe.evaluation.holdout import evaluate, purpose_for_split
from agentpipe.evaluation.report import EvaluationReport
from agentpipe.storage import read_json, write_json
from agentpipe_tests.evaluation.fakes import (
    PROFILE,
    Builder,
    FakeTable,
    Guessing,
    Knowing,
    expected_causes,
    make_environments,
)

HOLDOUT, TRAIN = make_environments(30), make_environments(30, split="train")


def run(players=None, environments=HOLDOUT, episodes=3, seed=1, build=None, trained_on=TRAIN, purpose=Purpose.REPORT):
    return evaluate(
        players or [Knowing(), Guessing()],
        environments,
        FakeTable(),
        PROFILE,
        seed=seed,
        purpose=purpose,
        episodes_per_env=episodes,
        trained_on=trained_on,
        build=build or Builder(),
    )


@pytest.fixture(scope="module")
def report():
    return run()


def test_every_environment_gives_exactly_its_first_episodes(report):
    table = report.table.to_pylist()
    assert [(row["player"], row["environment_id"], row["episode"]) for row in table] == [
        (player, spec.environment_id, episode)
        for player in ("policy", "random")
        for spec in HOLDOUT
        for episode in range(3)
    ]


def test_success_is_what_a_naive_count_gives(report):
    truth = expected_causes(0.3, HOLDOUT, 1, Purpose.REPORT, 3)
    successes = sum(not active for active in truth.values())
    figures = report.player("policy")
    assert figures["successes"] == successes
    assert figures["success"] == pytest.approx(successes / 90, abs=1e-6)
    assert figures["failures_by_segment"] == {"identify": 0, "assess": 0, "dispatch": 0, "execute": 90 - successes}
    assert figures["failures_by_reason"] == {"late": 90 - successes}


def test_short_episodes_are_not_over_represented(report):
    # lengths cycle 1, 2, 3: every environment has one of each, whatever finished first
    steps = column(report.table, "steps").reshape(2, 30, 3)
    assert (np.sort(steps, axis=2) == [1, 2, 3]).all()


def test_decision_time_is_seconds_over_decisions(report):
    figures = report.player("random")
    assert figures["decision_seconds"] == 2.0
    assert figures["decision_seconds_ci95"] == [2.0, 2.0]
    assert figures["mean_steps"] == 2.0


def test_slices_add_up_to_the_whole(report):
    figures = report.player("policy")
    for name in ("by_cell", "by_kind", "by_intensity", "by_mode", "by_topology"):
        parts = figures[name].values()
        assert sum(part["episodes"] for part in parts) == 90
        assert sum(part["episodes"] * part["success"] for part in parts) == pytest.approx(
            figures["successes"], abs=1e-3
        )
    assert figures["by_cell"]["sensor-1"]["environments"] == 2
    assert set(figures["by_topology"]) == {"serial", "ring"}


def test_pairs_compare_the_same_episodes(report):
    paired = report.summary["paired"]["policy-random"]
    difference = report.player("policy")["success"] - report.player("random")["success"]
    assert paired["difference"] == pytest.approx(difference, abs=2e-6)
    assert paired["ci95"][0] < paired["difference"] < paired["ci95"][1]
    assert paired["environments"] == 30


def test_the_policy_comes_first_in_every_pair():
    summary = run([Guessing(), Knowing("rules"), Knowing()]).summary
    assert set(summary["paired"]) == {"policy-random", "policy-rules", "random-rules"}


def test_same_input_gives_same_figures_twice(report):
    players = [Knowing(), Guessing()]
    first, second = run(players), run(players)  # the same player objects, their streams already used
    assert first.digest == second.digest == report.digest
    assert first.summary == second.summary


def test_another_seed_or_purpose_gives_other_episodes(report):
    assert run(seed=2).digest != report.digest
    assert run(purpose=Purpose.PROMOTION).digest != report.digest


def test_fewer_episodes_are_a_prefix(report):
    less = run(episodes=1)
    first = report.table.filter(np.asarray(column(report.table, "episode") == 0))
    assert less.table.to_pylist() == first.to_pylist()


def test_more_environments_do_not_change_those_there_were(report):
    few = run(environments=HOLDOUT[:7], players=[Knowing()]).table.to_pylist()
    assert few == report.table.to_pylist()[: len(few)]


def test_disjointness_is_recorded(report):
    assert report.summary["disjoint"] == {"training_environments": 30, "environment_overlap": 0, "template_overlap": 0}


def test_a_trained_environment_is_refused():
    with pytest.raises(EvaluationError, match="1 of the judged environments were trained on") as error:
        run(trained_on=[*TRAIN, HOLDOUT[4]])
    assert error.value.where["environment"] == HOLDOUT[4].environment_id


def test_a_trained_template_is_refused_on_the_holdout():
    with pytest.raises(EvaluationError, match="template that was trained on"):
        run(environments=HOLDOUT[:3], trained_on=HOLDOUT[5:9])


def test_validation_may_share_a_template_with_training():
    shared = make_environments(15, split="validation")
    report = run(environments=shared[:5], trained_on=shared[5:], purpose=Purpose.VALIDATION)
    assert report.summary["disjoint"] == {"training_environments": 10, "environment_overlap": 0, "template_overlap": 1}


def test_looking_at_training_environments_is_allowed_for_tuning_and_recorded():
    report = run(environments=TRAIN, purpose=Purpose.TRAIN)
    assert report.summary["disjoint"]["environment_overlap"] == 30


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"environments": []}, "no environment"),
        ({"environments": [HOLDOUT[0], HOLDOUT[0]]}, "occurs twice"),
        ({"players": [Knowing(), Knowing()]}, "distinct names"),
        ({"episodes": 0}, "cannot play 0 episodes"),
    ],
)
def test_nonsense_is_refused(arguments, message):
    with pytest.raises(EvaluationError, match=message):
        run(**arguments)


def test_nan_names_its_environment_and_field():
    with pytest.raises(EvaluationError) as error:
        run(build=Builder(broken="nan"))
    assert error.value.where == {"environment": HOLDOUT[3].environment_id, "field": "return"}


def test_an_episode_that_never_ends_is_an_error():
    with pytest.raises(EvaluationError, match="only 0 of 1 episodes ended"):
        run(episodes=1, environments=HOLDOUT[:2], build=Builder(broken="endless"))


def test_episodes_out_of_order_are_an_error():
    with pytest.raises(EvaluationError, match="out of order"):
        run(build=Builder(broken="order"))


def test_players_must_meet_the_same_faults():
    class Drifting(Builder):
        def __call__(self, *arguments, seed, **options):
            return super().__call__(*arguments, seed=seed + len(self.built), **options)

    with pytest.raises(EvaluationError, match="different faults"):
        run(build=Drifting())


def test_an_action_against_the_mask_is_not_swallowed():
    class Wrong(Knowing):
        def act(self, pool):
            decision = super().act(pool)
            decision.actions = (decision.actions + 1) % 4
            return decision

    builder = Builder()
    with pytest.raises(ActionError):
        run([Wrong()], build=builder)
    assert builder.built[0].closed


def test_progress_ends_with_all_episodes():
    seen = []
    evaluate(
        [Knowing()], HOLDOUT, FakeTable(), PROFILE, seed=0, purpose=Purpose.REPORT, episodes_per_env=2,
        trained_on=TRAIN, build=Builder(), progress=lambda *call: seen.append(call),
    )  # fmt: skip
    assert seen[-1] == ("play policy", 60, 60)
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)


def test_splits_have_their_purpose():
    assert [purpose_for_split(s) for s in ("train", "validation", "holdout")] == [
        Purpose.TRAIN, Purpose.VALIDATION, Purpose.REPORT,
    ]  # fmt: skip
    with pytest.raises(EvaluationError, match="no split"):
        purpose_for_split("test")


# Saving ------------------------------------------------------------------------------------------------------------


def test_a_saved_report_comes_back_equal(report, tmp_path):
    again = EvaluationReport.load(report.save(tmp_path / "evaluation"))
    assert again.summary == report.summary
    assert again.table.to_pylist() == report.table.to_pylist()
    assert again.players == ("policy", "random")
    assert sorted(path.name for path in (tmp_path / "evaluation").iterdir()) == [
        "durations.json", "episodes.parquet", "summary.json",
    ]  # fmt: skip


def test_the_digest_does_not_depend_on_durations_or_chunks(report):
    import pyarrow as pa

    parts = pa.concat_tables([report.table.slice(0, 70), report.table.slice(70)])
    context = {k: v for k, v in report.summary.items() if k not in ("format", "players", "paired", "digest")}
    assert EvaluationReport.build(parts, context, {"policy": 99.0}).digest == report.digest


def test_a_changed_figure_is_noticed(report, tmp_path):
    path = report.save(tmp_path / "evaluation")
    summary = read_json(path / "summary.json")
    summary["players"]["policy"]["success"] = 0.99
    write_json(path / "summary.json", summary)
    with pytest.raises(CorruptError, match="digest"):
        EvaluationReport.load(path)


def test_a_changed_episode_is_noticed(report, tmp_path):
    path = report.save(tmp_path / "evaluation")
    flipped = ~column(report.table, "success")
    position = report.table.column_names.index("success")
    pq.write_table(report.table.set_column(position, "success", [flipped]), path / "episodes.parquet")
    with pytest.raises(CorruptError, match="digest"):
        EvaluationReport.load(path)


def test_a_truncated_file_is_a_typed_error(report, tmp_path):
    path = report.save(tmp_path / "evaluation")
    data = (path / "episodes.parquet").read_bytes()
    (path / "episodes.parquet").write_bytes(data[: len(data) // 2])
    with pytest.raises(CorruptError, match="not a Parquet file"):
        EvaluationReport.load(path)
    (path / "episodes.parquet").unlink()
    with pytest.raises(CorruptError, match="missing"):
        EvaluationReport.load(path)


def test_another_format_is_refused(report, tmp_path):
    path = report.save(tmp_path / "evaluation")
    write_json(path / "summary.json", {**report.summary, "format": 2})
    with pytest.raises(VersionError, match="format 2"):
        EvaluationReport.load(path)


def test_an_unknown_player_is_an_error(report):
    with pytest.raises(EvaluationError, match="one of policy, random"):
        report.player("oracle")
