from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentpipe.errors import CorruptError, EvaluationError
from agentpipe.evaluation import drift, drift_bootstrap, drift_rows
from agentpipe.evaluation.drift import DriftResult, policy_drift, smoothed_kl
from agentpipe.evaluation.drift_bootstrap import bootstrap_mean
from agentpipe.evaluation.reference import ReferenceObservations, collect_reference
from agentpipe_tests.evaluation.fakes import PROFILE, Builder, FakeTable, Guessing, make_environments

ROWS, ACTIONS = 1200, 4


def make_reference(rows=ROWS, seed=0):
    rng = np.random.default_rng(seed)
    mask = rng.random((rows, ACTIONS)) < 0.7
    mask[np.arange(rows), rng.integers(0, ACTIONS, rows)] = True
    return ReferenceObservations(
        observation=rng.normal(size=(rows, 3)).astype(np.float32),
        last_action=rng.integers(0, ACTIONS, rows),
        time=rng.random(rows).astype(np.float32),
        mask=mask,
        segment=rng.integers(0, 4, rows).astype(np.int8),
        cell=np.array(["sensor-1", "load-5"])[rng.integers(0, 2, rows)],
        environment=np.arange(rows) // 10,
    )


class Linear:
    """A softmax of fixed weights over the allowed actions."""

    def __init__(self, seed, spread=1.0):
        self.weights = np.random.default_rng(seed).normal(size=(3, ACTIONS)) * spread

    def act(self, observation, last_action, time, mask):
        logits = np.where(mask, observation @ self.weights, -np.inf)
        p = np.exp(logits - logits.max(axis=1, keepdims=True))
        return SimpleNamespace(probabilities=(p / p.sum(axis=1, keepdims=True)).astype(np.float32))


class Fixed:
    def __init__(self, probabilities):
        self.probabilities = probabilities

    def act(self, observation, last_action, time, mask):
        return SimpleNamespace(probabilities=self.probabilities)


def naive_kl(p, q, mask, smoothing):
    result = []
    for i in range(len(p)):
        legal = [a for a in range(mask.shape[1]) if mask[i, a]]
        total = 0.0
        for a in legal:
            pa = (1 - smoothing) * float(p[i, a]) + smoothing / len(legal)
            qa = (1 - smoothing) * float(q[i, a]) + smoothing / len(legal)
            total += pa * np.log(pa / qa)
        result.append(total)
    return np.array(result)


def test_kl_of_two_coins_is_the_textbook_value():
    # 0.5 ln(0.5/0.25) + 0.5 ln(0.5/0.75) = 0.143841
    kl = smoothed_kl([[0.5, 0.5]], [[0.25, 0.75]], np.ones((1, 2), bool), 1e-12)
    assert kl[0] == pytest.approx(0.1438410362, abs=1e-9)


def test_kl_is_not_symmetric():
    ones = np.ones((1, 2), bool)
    assert smoothed_kl([[0.25, 0.75]], [[0.5, 0.5]], ones, 1e-12)[0] == pytest.approx(0.1308120, abs=1e-6)


def test_an_empty_bin_is_finite_and_large():
    kl = smoothed_kl([[1.0, 0.0]], [[0.0, 1.0]], np.ones((1, 2), bool), 1e-6)
    assert kl[0] == pytest.approx(np.log(1 / 5e-7), rel=1e-4)


def test_a_single_legal_action_cannot_drift():
    assert smoothed_kl([[1.0, 0.0]], [[1.0, 0.0]], np.array([[True, False]]))[0] == 0.0


@pytest.mark.parametrize("smoothing", [0.0, 1.0, -0.1, float("nan")])
def test_smoothing_must_be_inside(smoothing):
    with pytest.raises(EvaluationError, match="smoothing"):
        smoothed_kl([[1.0]], [[1.0]], np.ones((1, 1), bool), smoothing)


def test_an_empty_mask_is_refused():
    with pytest.raises(EvaluationError, match="row 1"):
        smoothed_kl([[1.0], [1.0]], [[1.0], [1.0]], np.array([[True], [False]]))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.floats(1e-9, 0.5))
def test_kl_matches_a_naive_loop_and_is_never_negative(seed, smoothing):
    reference = make_reference(12, seed)
    p = Linear(seed).act(reference.observation, None, None, reference.mask).probabilities
    q = Linear(seed + 1, 20.0).act(reference.observation, None, None, reference.mask).probabilities
    kl = smoothed_kl(p, q, reference.mask, smoothing)
    np.testing.assert_allclose(kl, np.maximum(naive_kl(p, q, reference.mask, smoothing), 0), atol=1e-9)
    assert (kl >= 0).all()


def test_kl_is_the_sum_of_relative_entropies_over_many_blocks(monkeypatch):
    from scipy.special import rel_entr

    monkeypatch.setattr(drift_rows, "BLOCK", 7)
    reference = make_reference(100, 5)
    p = Linear(1).act(reference.observation, None, None, reference.mask).probabilities.astype(np.float64)
    q = Linear(2).act(reference.observation, None, None, reference.mask).probabilities.astype(np.float64)
    floor = 1e-6 / reference.mask.sum(axis=1, keepdims=True) * reference.mask
    p_smooth, q_smooth = (1 - 1e-6) * p + floor, (1 - 1e-6) * q + floor
    np.testing.assert_allclose(
        smoothed_kl(p, q, reference.mask), rel_entr(p_smooth, q_smooth).sum(axis=1), rtol=1e-9, atol=1e-12
    )


def test_a_bad_row_is_named_whichever_block_it_is_in(monkeypatch):
    monkeypatch.setattr(drift_rows, "BLOCK", 4)
    mask = np.ones((11, 2), bool)
    good = np.full((11, 2), 0.5)
    for change, message in ((np.nan, "row 9, action 1"), (0.7, "sum to one .row 9")):
        bad = good.copy()
        bad[9, 1] = change
        with pytest.raises(EvaluationError, match=message):
            drift_rows.check_probabilities(bad, mask, "candidate")
    mask[10] = False
    with pytest.raises(EvaluationError, match="row 10"):
        smoothed_kl(good, good, mask)
    with pytest.raises(EvaluationError, match="shape"):
        smoothed_kl(good, good[:5], np.ones((11, 2), bool))


# Intervals ---------------------------------------------------------------------------------------------------------


def naive_bootstrap(values, cluster, draws, seed):
    rng = np.random.default_rng(seed)
    names = sorted(set(cluster))
    members = {name: [v for v, c in zip(values, cluster, strict=True) if c == name] for name in names}
    means = []
    for _ in range(draws):
        rows = [value for name in rng.choice(names, len(names)) for value in members[name]]
        means.append(sum(rows) / len(rows))
    return np.quantile(means, [0.025, 0.975])


def test_the_bootstrap_agrees_with_a_naive_one_that_draws_whole_environments():
    rng = np.random.default_rng(0)
    cluster = rng.integers(0, 40, 300)
    values = rng.gamma(1.0, size=40)[cluster] + 0.1 * rng.random(300)
    low, high = bootstrap_mean(values, cluster, seed=1, draws=4000)
    expected = naive_bootstrap(values, cluster, 4000, 2)
    np.testing.assert_allclose([low, high], expected, rtol=0.04)
    alone_low, alone_high = bootstrap_mean(values, np.arange(300), seed=1, draws=4000)
    assert high - low > 1.7 * (alone_high - alone_low)  # rows of one environment tell less than independent ones


def test_a_bootstrap_is_the_same_again_and_another_for_another_key():
    values, cluster = np.arange(50.0), np.arange(50) // 2
    first = bootstrap_mean(values, cluster, seed=3, key="cell load-1")
    assert bootstrap_mean(values, cluster, seed=3, key="cell load-1") == first
    assert bootstrap_mean(values, cluster, seed=3, key="cell load-2") != first
    assert bootstrap_mean(values, cluster, seed=4, key="cell load-1") != first


def test_an_interval_does_not_depend_on_how_environments_are_named():
    values, cluster = np.arange(60.0), np.arange(60) // 3
    expected = bootstrap_mean(values, cluster, seed=1)
    assert bootstrap_mean(values, cluster * 10**9 - 5, seed=1) == expected
    assert bootstrap_mean(values, np.char.add("e", np.char.zfill(cluster.astype(str), 3)), seed=1) == expected


def test_one_environment_has_no_interval():
    assert bootstrap_mean([1.0, 2.0], [7, 7], seed=0) == [None, None]


def test_bundles_of_many_environments_keep_the_interval(monkeypatch):
    rng = np.random.default_rng(5)
    values, cluster = np.sort(rng.gamma(1.0, size=6000)), np.arange(6000)
    expected = bootstrap_mean(values, cluster, seed=0)
    monkeypatch.setattr(drift_bootstrap, "MOST_CLUSTERS", 600)
    np.testing.assert_allclose(bootstrap_mean(values, cluster, seed=0), expected, rtol=0.02)


@pytest.mark.parametrize(
    ("values", "cluster", "draws"), [([], [], 200), ([1.0], [1, 2], 200), ([np.nan, 1.0], [1, 2], 200), ([1.0], [1], 9)]
)
def test_a_bootstrap_of_nonsense_is_refused(values, cluster, draws):
    with pytest.raises(EvaluationError):
        bootstrap_mean(values, cluster, seed=0, draws=draws)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(0, 10), min_size=2, max_size=40), st.integers(0, 5))
def test_an_interval_lies_between_the_least_and_the_largest_environment(values, seed):
    low, high = bootstrap_mean(values, np.arange(len(values)), seed=seed, draws=100)
    assert min(values) - 1e-12 <= low <= high <= max(values) + 1e-12


# The comparison ----------------------------------------------------------------------------------------------------


def test_the_same_policy_has_not_drifted():
    result = policy_drift(Linear(1), Linear(1), make_reference())
    assert (result.status, result.kl) == ("OK", 0.0)


def test_another_policy_asks_for_review_and_says_where():
    reference = make_reference()
    result = policy_drift(Linear(1), Linear(2, 3.0), reference)
    assert result.status == "REVIEW"
    p = Linear(1).act(reference.observation, None, None, reference.mask).probabilities
    q = Linear(2, 3.0).act(reference.observation, None, None, reference.mask).probabilities
    rows = naive_kl(p, q, reference.mask, 1e-6)
    assert result.kl == pytest.approx(rows.mean())
    assert result.by_cell["load-5"]["kl"] == pytest.approx(rows[reference.cell == "load-5"].mean())
    assert result.by_segment["execute"]["kl"] == pytest.approx(rows[reference.segment == 3].mean())
    for figures in (vars(result), *result.by_cell.values(), *result.by_segment.values()):
        assert figures["ci95"][0] < figures["kl"] < figures["ci95"][1]
    assert f"{result.ci95[0]:.4f} – {result.ci95[1]:.4f}" in result.markdown()
    assert sum(item["rows"] for item in result.by_cell.values()) == ROWS


def test_without_a_champion_it_says_so():
    result = policy_drift(Linear(1), None, make_reference())
    assert (result.status, result.kl, result.by_cell) == ("NO_CHAMPION", None, {})
    assert "NO_CHAMPION" in result.markdown()


def test_too_few_rows_are_never_no_drift():
    result = policy_drift(Linear(1), Linear(1), make_reference(999))
    assert (result.status, result.kl) == ("INSUFFICIENT_DATA", None)
    assert "too few" in result.markdown()


def test_a_cell_with_too_few_rows_is_never_no_drift():
    reference = make_reference()
    reference.cell[:] = "load-5"
    reference.cell[:199] = "sensor-1"
    result = policy_drift(Linear(1), Linear(1), reference)
    assert result.by_cell == {
        "load-5": {"status": "OK", "kl": 0.0, "ci95": [0.0, 0.0], "rows": 1001},
        "sensor-1": {"status": "INSUFFICIENT_DATA", "kl": None, "ci95": [None, None], "rows": 199},
    }


@pytest.mark.parametrize("count", [1, 3, 200])
def test_rows_are_parted_by_label_however_many_there_are(count):
    labels = np.array([f"cell-{number}" for number in np.random.default_rng(0).integers(0, count, 500)])
    parts = drift._parts(labels)
    assert list(parts) == sorted(set(labels.tolist()))
    for name, rows in parts.items():
        assert rows.tolist() == [row for row, label in enumerate(labels) if label == name]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p, mask: p.__setitem__((3, 0), np.nan), "row 3"),
        (lambda p, mask: p.__setitem__((3, slice(None)), 0.1 * mask[3]), "sum to one"),
        (lambda p, mask: p.__setitem__((3, slice(None)), np.where(mask[3], 0.0, 1.0)), "not allowed"),
    ],
)
def test_bad_probabilities_are_refused(change, message):
    reference = make_reference()
    reference.mask[3] = [True, True, False, False]
    good = Linear(1).act(reference.observation, None, None, reference.mask).probabilities
    bad = good.copy()
    change(bad, reference.mask)
    with pytest.raises(EvaluationError, match=message):
        policy_drift(Fixed(bad), Fixed(good), reference)
    with pytest.raises(EvaluationError, match="champion"):
        policy_drift(Fixed(good), Fixed(bad), reference)


def test_probabilities_of_another_shape_are_refused():
    with pytest.raises(EvaluationError, match="shape"):
        policy_drift(Fixed(np.ones((ROWS, 3))), Linear(1), make_reference())


def test_a_result_survives_json():
    result = policy_drift(Linear(1), Linear(2, 3.0), make_reference())
    again = DriftResult.from_dict(result.to_dict())
    assert again.to_dict() == result.to_dict()
    assert again.reference_digest == make_reference().digest
    with pytest.raises(EvaluationError, match="not a drift result"):
        DriftResult.from_dict({"status": "OK", "colour": 1})


# The reference -----------------------------------------------------------------------------------------------------


def test_a_saved_reference_comes_back_equal(tmp_path):
    reference = make_reference(50)
    again = ReferenceObservations.load(reference.save(tmp_path / "reference.npz"))
    assert again.digest == reference.digest
    np.testing.assert_array_equal(again.cell, reference.cell)


def test_damage_to_a_reference_is_noticed(tmp_path):
    path = make_reference(50).save(tmp_path / "reference.npz")
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 0xFF
    path.write_bytes(bytes(data))
    with pytest.raises(CorruptError):
        ReferenceObservations.load(path)
    with pytest.raises(CorruptError):
        ReferenceObservations.load(tmp_path / "none.npz")


def test_a_reference_row_without_an_action_is_refused():
    good = make_reference(5)
    mask = good.mask.copy()
    mask[2] = False
    with pytest.raises(EvaluationError, match="row 2"):
        ReferenceObservations(
            good.observation, good.last_action, good.time, mask, good.segment, good.cell, good.environment
        )


def test_collected_rows_are_what_the_pool_showed():
    environments = make_environments(15)

    def collect(rows, seed=3):
        return collect_reference(
            environments, FakeTable(), PROFILE, Guessing(), seed=seed, rows=rows, steps=8, build=Builder()
        )

    reference = collect(60)
    assert reference.rows == 60
    for index in range(60):  # the fake shows its environment in the second feature, and forbids one action
        assert reference.observation[index, 1] == reference.environment[index]
        assert reference.cell[index] == environments[reference.environment[index]].cell
        assert not reference.mask[index, (int(reference.observation[index, 0]) + 1) % 4]
    assert collect(60).digest == reference.digest
    assert collect(60, seed=4).digest != reference.digest
    everything = collect(10_000)
    assert everything.rows == 15 * 8
    pairs = list(zip(everything.environment, everything.observation[:, 2], everything.time, strict=True))
    assert len(set(pairs)) == len(pairs)


def test_an_empty_reference_is_refused():
    with pytest.raises(EvaluationError, match="cannot collect"):
        collect_reference([], FakeTable(), PROFILE, Guessing(), seed=0, build=Builder())
