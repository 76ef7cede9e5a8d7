import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from agentpipe.environments.catalog import load_catalog
from agentpipe.environments.layout import OBSERVATION_NAMES, Purpose
from agentpipe.environments.line_profile import default_profile
from agentpipe.environments.rules import RulesPlayer
from agentpipe.errors import CorruptError, EvaluationError
from agentpipe.evaluation.drift_classifier import joint_drift
from agentpipe.evaluation.drift_features import adjusted, bin_edges, bin_shares, distances, stability_index
from agentpipe.evaluation.drift_sample import decided_observations, recorded_observations
from agentpipe.evaluation.drift_text import one_line, plain
from agentpipe.evaluation.input_drift import InputDriftResult, InputLimits, input_drift, thinned
from agentpipe.evaluation.reference import collect_reference
from agentpipe.experience.store.shard import map_shard, open_shard
from agentpipe_tests.experience.fakes import make_episodes, write_shard
from agentpipe_tests.strategies import project_table

NAMES = ["temperature", "current", "pressure", "spare"]


def sample(rows, seed, shift=0.0):
    """Three independent normal features, the second moved by ``shift``, and a constant one."""
    values = np.random.default_rng(seed).normal(size=(rows, 4)).astype(np.float32)
    values[:, 1] += np.float32(shift)
    values[:, 3] = 7.0
    return values


# Population stability ----------------------------------------------------------------------------------------------


def naive_psi(reference, production, smoothing=1e-3):
    ordered = sorted(reference.tolist())
    deciles = [ordered[-(-len(ordered) * k // 10) - 1] for k in range(1, 10)]
    edges = sorted({float(np.nextafter(np.float32(ordered[0]), np.float32(-np.inf))), *deciles, ordered[-1]})
    shares = []
    for values in (reference.tolist(), production.tolist()):
        counts = [0] * (len(edges) + 1)
        for value in values:
            counts[sum(value > edge for edge in edges)] += 1
        shares.append([(1 - smoothing) * count / len(values) + smoothing / len(counts) for count in counts])
    return sum((q - p) * np.log(q / p) for p, q in zip(*shares, strict=True))


def psi(reference, production):
    first, second = np.sort(reference), np.sort(production)
    edges = bin_edges(first)
    return stability_index(bin_shares(first, edges), bin_shares(second, edges))


def test_stability_of_two_bins_is_the_textbook_value():
    # (0.2 - 0.5) ln(0.2 / 0.5) + (0.8 - 0.5) ln(0.8 / 0.5) = 0.415888
    assert stability_index(np.array([0.5, 0.5]), np.array([0.2, 0.8]), 0.0) == pytest.approx(0.4158883)


def test_deciles_of_a_hundred_numbers_hold_a_tenth_each():
    values = np.arange(100, dtype=np.float32)
    edges = bin_edges(values)
    np.testing.assert_allclose(edges, [0, 9, 19, 29, 39, 49, 59, 69, 79, 89, 99], atol=1e-40)
    np.testing.assert_allclose(bin_shares(values, edges), [0, *[0.1] * 10, 0])


@settings(max_examples=60, deadline=None)
@given(
    arrays(np.float32, st.integers(1, 30), elements=st.floats(-3, 3, width=32)),
    arrays(np.float32, st.integers(1, 30), elements=st.floats(-3, 3, width=32) | st.sampled_from([0.0, 1.0])),
)
def test_stability_matches_a_naive_loop_and_is_never_negative(reference, production):
    found = psi(reference + 0.0, production + 0.0)
    assert found == pytest.approx(naive_psi(reference + 0.0, production + 0.0), abs=1e-9)
    assert found >= -1e-15
    assert psi(reference + 0.0, reference + 0.0) == 0.0


def test_half_a_standard_deviation_is_about_a_quarter():
    rng = np.random.default_rng(0)
    assert psi(rng.normal(size=200_000), rng.normal(0.5, size=200_000)) == pytest.approx(0.25, abs=0.03)


@pytest.mark.parametrize("elsewhere", [6.0, 8.0])
def test_a_constant_that_becomes_another_constant_is_noticed(elsewhere):
    sevens = np.full(1000, 7, np.float32)
    assert psi(sevens, sevens) == 0.0
    assert psi(sevens, np.full(1000, elsewhere, np.float32)) > 10


def test_a_rare_flag_that_becomes_common_is_noticed():
    reference = (np.arange(2000) % 100 == 0).astype(np.float32)
    assert psi(reference, (np.arange(2000) % 2 == 0).astype(np.float32)) > 1


# Kolmogorov-Smirnov ------------------------------------------------------------------------------------------------


def test_the_distance_is_the_largest_gap_between_the_distribution_functions():
    first = np.array([[1.0], [2.0], [3.0], [4.0]], np.float32)
    assert distances(first, first + np.float32(1.5))[0][0] == 0.5
    assert distances(first, first)[0][0] == 0.0


def test_p_values_are_adjusted_by_benjamini_and_hochberg():
    # sorted p_i * m / i, made monotone from the largest down
    np.testing.assert_allclose(adjusted([0.01, 0.04, 0.03, 0.20]), [0.04, 0.16 / 3, 0.16 / 3, 0.20])


# All together ------------------------------------------------------------------------------------------------------


def test_the_same_distribution_has_not_moved():
    result = input_drift(sample(4000, 1), sample(3000, 2), NAMES, seed=0)
    assert (result.status, result.moved, result.joint.status, result.joint.split) == ("OK", [], "OK", "rows")
    assert result.joint.ci95[0] < 0.5 < result.joint.ci95[1]
    assert result.features[3].psi == 0.0
    assert (result.features[3].ks, result.features[3].p_value) == (0.0, 1.0)


def test_a_moved_feature_is_named_and_the_others_are_not():
    result = input_drift(sample(4000, 1), sample(3000, 2, shift=1.0), NAMES, seed=0)
    assert result.status == "REVIEW"
    assert [item.name for item in result.moved] == ["current"]
    assert result.worst(1)[0].name == "current"
    assert result.features[1].production_mean == pytest.approx(1.0, abs=0.06)
    assert "current" in result.markdown()
    assert "1 of 4 features moved beyond a limit" in result.reason()


def test_a_moved_dependence_is_seen_by_the_classifier_alone():
    rng = np.random.default_rng(3)
    apart = rng.normal(size=(4000, 2)).astype(np.float32)
    together = apart.copy()
    together[:, 1] = 0.95 * together[:, 0] + np.sqrt(1 - 0.95**2) * rng.normal(size=4000)
    result = input_drift(apart, together, ["a", "b"], seed=0)
    assert (result.status, result.moved, result.joint.status) == ("REVIEW", [], "REVIEW")


@pytest.mark.parametrize(("rows", "others"), [(999, 5000), (5000, 999), (5000, 0)])
def test_too_few_rows_are_never_no_drift(rows, others):
    result = input_drift(sample(rows, 1), sample(others, 2), NAMES, seed=0)
    assert (result.status, result.features, result.joint) == ("INSUFFICIENT_DATA", [], None)
    assert f"{others:,} production and {rows:,} training observations" in result.markdown()


def test_what_is_not_finite_is_refused_by_row_and_feature():
    bad = sample(2000, 1)
    bad[17, 2] = np.nan
    with pytest.raises(EvaluationError, match=r"production is not finite \[row 17, feature 2\]"):
        input_drift(sample(2000, 2), bad, NAMES, seed=0)
    bad[17, 2] = np.inf
    with pytest.raises(EvaluationError, match="reference is not finite"):
        input_drift(bad, sample(10, 2), NAMES, seed=0)  # also where there are too few rows


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(EvaluationError, match="shape"):
        input_drift(sample(2000, 1), sample(2000, 2)[:, :3], NAMES, seed=0)
    with pytest.raises(EvaluationError, match="shape"):
        input_drift(np.empty((2000, 0)), np.empty((2000, 0)), [], seed=0)
    with pytest.raises(EvaluationError, match="groups"):
        input_drift(sample(2000, 1), sample(2000, 2), NAMES, seed=0, production_groups=[1, 2])


@pytest.mark.parametrize("limits", [{"psi": 0.0}, {"ks": 1.0}, {"accuracy": 0.4}, {"alpha": 0}, {"minimum_rows": 10}])
def test_impossible_limits_are_refused(limits):
    with pytest.raises(EvaluationError):
        InputLimits(**limits)


def test_a_result_survives_json_and_is_the_same_again():
    first, second = sample(1500, 1), sample(1500, 2, shift=0.4)
    result = input_drift(first, second, NAMES, seed=5)
    again = InputDriftResult.from_dict(result.to_dict())
    assert again.to_dict() == result.to_dict()
    assert again.markdown() == result.markdown()
    assert input_drift(first, second, NAMES, seed=5).to_dict() == result.to_dict()
    few = input_drift(first[:5], second, NAMES, seed=5)
    assert InputDriftResult.from_dict(few.to_dict()) == few
    for content in ({}, {**result.to_dict(), "colour": 1}, {**result.to_dict(), "features": [{"name": "a"}]}):
        with pytest.raises(EvaluationError, match="not a result of input drift"):
            InputDriftResult.from_dict(content)


def test_rows_are_thinned_without_repetition():
    values = np.arange(100, dtype=np.float32)[:, None]
    few = thinned(values, 10, 3)
    assert len(set(few[:, 0])) == 10
    assert (np.diff(few[:, 0]) > 0).all()
    np.testing.assert_array_equal(thinned(values, 10, 3), few)
    assert thinned(values, 100, 3) is values


# Lines -------------------------------------------------------------------------------------------------------------


def lines(count, rows, seed, places=None):
    """Rows of lines that all come from one population, each with a place of its own, and the names of the lines."""
    rng = np.random.default_rng(seed)
    of = np.repeat(np.arange(count), rows)
    centres = rng.normal(size=(count, 3)) * 2 if places is None else places
    values = (centres[of] + 0.3 * rng.normal(size=(of.size, 3))).astype(np.float32)
    return values, np.array([f"{seed if places is None else 'same'}-{line}" for line in of])


def joint(first, second, **changes):
    (reference, own), (production, of) = first, second
    return joint_drift(
        reference, production, **{"reference_groups": own, "production_groups": of, "seed": 0, "limit": 0.6, **changes}
    )


def test_recognising_a_line_is_no_drift():
    first, second = lines(60, 40, 1), lines(60, 40, 2)
    by_row = joint(first, second, reference_groups=None, production_groups=None)
    by_line = joint(first, second)
    assert (by_row.split, by_row.status) == ("rows", "REVIEW")  # it has learnt the lines by heart
    assert (by_line.split, by_line.status) == ("groups", "OK")
    assert by_line.ci95[0] < 0.5
    assert by_line.rows % 2 == 0


def test_lines_that_are_in_both_samples_stay_in_one_half():
    places = np.random.default_rng(0).normal(size=(60, 3)) * 2
    result = joint(lines(60, 40, 1, places), lines(60, 40, 2, places))
    assert (result.split, result.status) == ("groups", "OK")
    assert result.ci95[0] < 0.5 < result.ci95[1]


def test_a_difference_between_all_lines_is_still_seen():
    production, of = lines(60, 40, 2)
    moved = joint(lines(60, 40, 1), (production + 6, of))
    assert (moved.split, moved.status) == ("groups", "REVIEW")


def test_too_few_lines_are_never_no_drift_nor_drift():
    production, of = lines(9, 150, 2)
    reference, own = lines(60, 40, 1)
    result = joint((reference, own), (production, of))
    assert (result.status, result.accuracy, result.rows) == ("INSUFFICIENT_DATA", None, 0)
    whole = input_drift(
        np.concatenate([production, production + 0.01]), production, ["a", "b", "c"], seed=0,
        reference_groups=np.concatenate([of, np.char.add(of, "x")]), production_groups=of,
    )  # fmt: skip
    assert (whole.status, whole.moved) == ("INSUFFICIENT_DATA", [])
    assert "too few lines" in whole.reason()
    assert "INSUFFICIENT_DATA" in whole.joint_text()
    assert InputDriftResult.from_dict(whole.to_dict()) == whole


def test_the_same_few_lines_are_compared_row_by_row():
    places = np.random.default_rng(0).normal(size=(4, 3)) * 2
    quiet = joint(lines(4, 500, 1, places), lines(4, 500, 2, places))
    assert (quiet.split, quiet.status) == ("rows", "OK")
    production, of = lines(4, 500, 2, places)
    assert joint(lines(4, 500, 1, places), (production + 1, of)).status == "REVIEW"


# Where the samples come from ---------------------------------------------------------------------------------------


def test_recorded_observations_are_drawn_from_all_shards(tmp_path):
    rng = np.random.default_rng(0)
    shards = [open_shard(write_shard(tmp_path / name, make_episodes(rng, 8)).path) for name in ("one", "two")]
    total = sum(len(shard.records) for shard in shards)
    lines = {index: f"line-{index % 2}" for index in range(200)}
    everything = recorded_observations(shards, lines, seed=1)
    assert everything.values.shape == (total, 4)
    np.testing.assert_array_equal(everything.values[: len(shards[0].records)], shards[0].records["observation"])
    assert everything.groups[-5:].tolist() == [lines[int(e)] for e in shards[1].records["environment"][-5:]]
    few = recorded_observations(shards, lines, rows=10, seed=1)
    assert few.values.shape == (10, 4)
    known = {row.tobytes() for row in everything.values}
    assert all(row.tobytes() in known for row in few.values)
    with pytest.raises(EvaluationError, match="cannot draw"):
        recorded_observations([], lines, seed=1)
    with pytest.raises(EvaluationError, match="has no line"):
        recorded_observations(shards, {}, seed=1)


def test_a_damaged_record_is_not_compared(tmp_path):
    shard = write_shard(tmp_path / "one", make_episodes(np.random.default_rng(0), 8))
    path = shard.path / "records.bin"
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(bytes(data))
    damaged = map_shard(shard.path, shard.manifest)
    with pytest.raises(CorruptError, match="checksum"):
        recorded_observations([damaged], {}, seed=1)


def decided(rows):
    """From (id, line, observation)."""
    ids, lines_, values = zip(*rows, strict=True) if rows else ((), (), ())
    return pa.table(
        {
            "decision_id": pa.array(ids, pa.string()),
            "line_id": pa.array(lines_, pa.string()),
            "observation": pa.array(values, pa.list_(pa.float32())),
        }
    )


def test_decided_observations_come_out_of_tables():
    table = decided([("a", "l2", [1.0, 2.0]), ("b", "l1", [3.0, 4.0]), ("c", "l2", [5.0, 6.0])])
    found = decided_observations([table.slice(1, 2), decided([]), table.slice(0, 1)], 2, seed=0)
    pairs = {(line, *row.tolist()) for line, row in zip(found.groups, found.values, strict=True)}
    assert pairs == {("l2", 1.0, 2.0), ("l1", 3.0, 4.0), ("l2", 5.0, 6.0)}
    assert decided_observations([], 2, seed=0).values.shape == (0, 2)
    with pytest.raises(EvaluationError, match="2 features instead of 3"):
        decided_observations([table], 3, seed=0)
    with pytest.raises(EvaluationError, match="instead of 2"):
        decided_observations([decided([("a", "l", [1.0, 2.0]), ("b", "l", None)])], 2, seed=0)
    with pytest.raises(EvaluationError, match="cannot draw"):
        decided_observations([table], 2, rows=0, seed=0)


@settings(max_examples=20, deadline=None)
@given(st.permutations(range(12)), st.integers(1, 14), st.integers(1, 6))
def test_the_sample_of_decisions_depends_on_no_order(order, rows, at_once):
    everything = [(f"d{number}", f"l{number % 3}", [float(number)]) for number in range(12)]
    mixed = decided([everything[number] for number in order])
    batches = [mixed.slice(start, at_once) for start in range(0, 12, at_once)]
    found = decided_observations(batches, 1, rows=rows, seed=7)
    expected = decided_observations([decided(everything)], 1, rows=rows, seed=7)
    np.testing.assert_array_equal(found.values, expected.values)
    np.testing.assert_array_equal(found.groups, expected.groups)
    assert len(found.values) == min(rows, 12)


# Text from outside -------------------------------------------------------------------------------------------------


def test_hostile_text_stays_text():
    assert plain("<img src=x onerror=alert(1)>") == "&lt;img src=x onerror=alert(1)&gt;"
    assert plain("![a](http://b) | `c`") == r"\!\[a\](http://b) \| \`c\`"
    assert one_line("a\r\nb\x00c\u202ed") == "a b c d"
    assert len(one_line("x" * 500)) == 120


# The built-in line -------------------------------------------------------------------------------------------------


def played(environments, purpose):
    """Observations of the rule-based player, and the lines of their environments."""
    profile = default_profile()
    sample = collect_reference(
        environments, project_table(), profile, RulesPlayer(profile), seed=0, rows=5000, steps=32, purpose=purpose
    )
    of = {environment.index: environment.template.line_id for environment in environments}
    return sample.observation, np.array([of[index] for index in sample.environment.tolist()])


def test_other_lines_of_the_same_kind_are_no_drift_and_worn_sensors_everywhere_are():
    catalog = load_catalog()
    training, held_out = catalog.environments("train"), catalog.environments("holdout")
    chosen = np.random.default_rng(0).permutation(len(training))[:600]
    reference, own = played([training[index] for index in chosen], Purpose.TRAIN)
    for environments, status in (
        ([held_out[index] for index in np.random.default_rng(1).permutation(len(held_out))[:600]], "OK"),
        ([environment for environment in held_out if environment.cell == "sensor-5"], "REVIEW"),
    ):
        production, of = played(environments, Purpose.REPORT)
        result = input_drift(
            reference, production, OBSERVATION_NAMES, seed=0, reference_groups=own, production_groups=of
        )
        assert (result.status, result.joint.split) == (status, "groups"), result.markdown()
