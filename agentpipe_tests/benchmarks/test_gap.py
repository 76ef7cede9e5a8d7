"""What lies between a policy and the oracle: the players' parts, the observers' densities, the sums."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from scipy.stats import multivariate_normal, norm

from agentpipe.environments.catalog import load_catalog
from agentpipe.environments.datafiles import data_dir
from agentpipe.environments.fixed import build_fixed
from agentpipe.environments.layout import (
    A_MACHINE,
    CHANNELS,
    FALSE_ALARM,
    MACHINES,
    MODES,
    PHYSICAL_MODES,
    Purpose,
    block_start,
)
from agentpipe.environments.line_profile import default_profile
from agentpipe.environments.physics import LOAD_RESPONSE
from agentpipe.environments.players import OraclePlayer, RandomPlayer
from agentpipe.environments.table import load_table
from agentpipe.errors import InputError
from agentpipe.evaluation.rollout import play_first_episodes
from agentpipe.learning.options import NetworkOptions
from agentpipe.learning.policy.player import PolicyPlayer
from agentpipe.learning.succession.champion import ChampionStore
from benchmarks import report
from benchmarks.difficulty import Line, spread
from benchmarks.gap import __main__ as gap
from benchmarks.gap import explain
from benchmarks.gap import report as gap_report
from benchmarks.gap.classifier import ARMS, PLAIN, chosen_of, collect, fit
from benchmarks.gap.filter import CONSTANT, GROWING, offsets_density, pattern_density
from benchmarks.gap.log import ReceivedLog
from benchmarks.gap.model import Heard, Packets, Reports, World, model_of
from benchmarks.gap.observer import IdealObserver, Told, Untold
from benchmarks.gap.patterns import CASES, severity_of
from benchmarks.gap.play import LADDER, REST, shapley
from benchmarks.gap.players import (
    PARTS,
    HybridPlayer,
    MoreMeasuring,
    NoMeasuring,
    Policy,
    RuleMeasuring,
    TrueDiagnosis,
    Watched,
)
from benchmarks.gap.sight import EveryPacket, MeansOnly

QUIET = (0.1, 0.0, 60.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.2)
"""noise and drift alone: no ripple, no steps, no impulses"""
NOISE, LAG = np.array([0.2, 0.3, 0.25, 0.2, 0.25]), np.array([12.0, 1.0, 0.5, 2.0, 1.0])


@pytest.fixture(scope="module")
def line():
    return Line(load_catalog(), load_table(data_dir() / "disturbances.csv"), default_profile(), 0)


@pytest.fixture(scope="module")
def environments(line):
    return spread(line.catalog.environments("validation"), 30)


@pytest.fixture(scope="module")
def fixed(line, environments):
    off = frozenset()
    return build_fixed(environments, line.table, line.profile, seed=0, purpose=Purpose.VALIDATION, off=off)


@pytest.fixture(scope="module")
def package():
    return gap.untrained()  # believes and remembers


def play(line, environments, player, episodes=1):
    pool = line.pool(environments, Purpose.VALIDATION)
    return play_first_episodes(pool, player, episodes, environment_ids=[one.environment_id for one in environments])


# ------------------------------------------------------------------------------------------------- players


@pytest.mark.parametrize("extras", [{}, {"perception": 8, "actor_head": "unit"}, {"memory": 4}])
def test_a_hybrid_that_leaves_everything_to_the_policy_plays_like_the_policy(line, environments, extras):
    package = gap.untrained(NetworkOptions(hidden=(8,), **extras))
    whole = play(line, environments, HybridPlayer("all", Policy(package), None, None, REST), 2)
    alone = play(line, environments, PolicyPlayer(package), 2)
    assert all(np.array_equal(whole[name], alone[name]) for name in alone)


def test_what_a_policy_remembers_is_kept_from_step_to_step_and_forgotten_on_reset(line, environments):
    """Beside the package itself, asked with a state that is carried by hand."""
    package = gap.untrained(NetworkOptions(hidden=(8,), perception=8, memory=4))
    policy, pool, state = Policy(package), line.pool(environments, Purpose.VALIDATION), package.fresh_memory(30)
    for step in range(6):
        policy.look(pool)
        given = (pool.observation, pool.last_action, pool.time, pool.mask)
        kept, empty = package.act(*given, memory=state), package.act(*given, memory=package.fresh_memory(30))
        np.testing.assert_array_equal(policy.best(pool, 0, 46), kept.action)
        np.testing.assert_array_equal(policy._output.probabilities, kept.probabilities)
        assert np.array_equal(kept.probabilities, empty.probabilities) == (step == 0)
        state = kept.memory
        pool.step(policy.actions)
    policy.reset()
    policy.look(pool)
    given = (pool.observation, pool.last_action, pool.time, pool.mask)
    again = package.act(*given, memory=package.fresh_memory(30))
    np.testing.assert_array_equal(policy._output.probabilities, again.probabilities)


def test_the_truth_at_once_wins_what_the_oracle_wins(line, environments, package):
    truth = play(line, environments, HybridPlayer("truth", Policy(package), NoMeasuring(), TrueDiagnosis()), 4)
    oracle = play(line, environments, OraclePlayer(), 4)
    assert truth["success"].mean() >= oracle["success"].mean() - 0.01
    assert truth["success"].mean() > 0.97


@pytest.mark.parametrize("parts", [frozenset(), frozenset({"severity"}), frozenset({"dispatch", "execution"})])
@pytest.mark.parametrize("diagnosis", [None, TrueDiagnosis()])
def test_every_way_to_share_the_work_is_legal(line, environments, package, parts, diagnosis):
    """The pool itself refuses an illegal action; whoever declares a false alarm must find rejecting legal."""
    found = play(line, environments, HybridPlayer("some", Policy(package), RuleMeasuring(), diagnosis, parts))
    assert found["steps"].max() <= 64


def test_first_diagnoses_and_mishaps_are_seen(line, environments, package):
    player = HybridPlayer("truth", Policy(package), NoMeasuring(), TrueDiagnosis())
    watched = Watched(player, len(environments), 12)
    found = play(line, environments, watched, 12)
    assert watched.right.all()
    assert 0.0 < watched.mishap.mean() < 0.05
    assert (watched.mishap & found["success"]).any()
    assert (found["steps"][watched.mishap & found["success"]] > 8).all()  # ordered again, or retried


def test_extra_measurements_are_made_before_the_first_declaration(line, environments, package):
    """This policy measures nothing by itself."""
    policy, pool = Policy(package), line.pool(environments, Purpose.VALIDATION)
    player = HybridPlayer("more", policy, MoreMeasuring(policy, 3), None, REST)
    measured = []
    for _ in range(4):
        actions = player.act(pool).actions
        measured.append(bool((actions < A_MACHINE).all()) - bool((actions >= A_MACHINE).all()))
        pool.step(actions)
    assert measured == [1, 1, 1, -1]


# --------------------------------------------------------------------------------------------------- log


def test_the_log_holds_every_packet_that_the_historian_averaged(line, environments):
    """Means and samples, computed from the packets alone, are those that the observation shows."""
    pool, log = line.pool(environments, Purpose.VALIDATION), ReceivedLog(len(environments))
    player = RandomPlayer()
    log.follow(pool)
    for _ in range(12):
        pool.step(player.act(pool).actions)
        log.follow(pool)
    at = block_start("mean")
    shown = pool.observation[:, at : at + MACHINES * CHANNELS].reshape(-1, MACHINES, CHANNELS)
    for n in range(pool.size):
        for machine in range(MACHINES):
            rows = np.flatnonzero(log.machine[n, : log.count[n]] == machine)
            weight = log.samples[n, rows]
            assert weight.sum() == pool.plant().weight[n, machine]
            if len(rows):
                mean = weight @ log.values[n, rows] / weight.sum()
                np.testing.assert_allclose(mean, shown[n, machine], atol=1e-3)


# ---------------------------------------------------------------------------------------------- densities


def some_packets(seed, count):
    generator = np.random.default_rng(seed)
    times = np.sort(generator.uniform(0.0, 40.0, count))
    samples, offsets = generator.choice([1.0, 4.0], count), generator.normal(0.0, 0.1, count)
    return times, samples, offsets, generator.normal(0.0, 1.5, (count, CHANNELS)), np.zeros((count, CHANNELS), np.bool_)


def density(kind, effect, severity, scatter, packets, sensor, process):
    world = (sensor, 0.25, NOISE, LAG, process)
    x, P = np.empty(15), np.empty((17, 15))
    return pattern_density(kind, effect, severity, scatter, 400.0, packets, world, x, P)


def covariance(seed):
    root = np.random.default_rng(seed).normal(size=(CHANNELS, CHANNELS))
    return 0.05 * (root @ root.T) + 0.05 * np.eye(CHANNELS)


@pytest.mark.parametrize(("kind", "severity"), [(CONSTANT, 0.0), (GROWING, 0.3)])
def test_without_steps_and_impulses_the_density_is_the_joint_normal_of_all_readings(kind, severity):
    """One normal over 7 × 5 readings with its covariance written out, against the filter that goes packet by packet."""
    times, samples, offsets, values, stuck = some_packets(0, 7)
    scatter, process, effect = covariance(1), covariance(2), np.array([1.0, -2.0, 0.5, 0.0, 3.0])
    mean, whole = np.zeros((7, CHANNELS)), np.zeros((7, CHANNELS, 7, CHANNELS))
    for i in range(7):
        grown = severity + (1 - severity) * np.maximum(times[i] - LAG, 0.0) / 400.0
        strength = 0.55 + 0.65 * np.minimum(grown, 1.0) if kind == GROWING else 1.0
        mean[i] = strength * effect + LOAD_RESPONSE * offsets[i]
        for j in range(7):
            drift = 0.2**2 * math.sqrt(times[i] * times[j]) / 60.0
            whole[i, :, j] = scatter + drift * np.eye(CHANNELS)
        whole[i, :, i] += (process + np.diag((NOISE + 0.1) ** 2)) / samples[i]
    expected = multivariate_normal(mean.ravel(), whole.reshape(35, 35)).logpdf(values.ravel())
    found = density(kind, effect, severity, scatter, (times, samples, offsets, values, stuck), QUIET, process)
    assert found == pytest.approx(expected, abs=1e-8)


def test_one_reading_with_steps_and_impulses_is_a_mixture_of_six_normals():
    sensor = (0.1, 0.05, 60.0, 0.04, 0.2, 3.0, 0.1, 0.0, 0.0)
    scatter, process, effect = covariance(3), covariance(4), np.array([0.0, 2.0, 0.0, 0.0, 0.0])
    times, samples, offsets, values, stuck = some_packets(5, 1)
    stuck[0, [0, 2, 3, 4]] = True  # what only repeats says nothing
    ripple = 0.05 * math.sin(2 * math.pi * (0.25 + times[0] / 60.0))
    root, expected = 1.0 / math.sqrt(samples[0]), 0.0
    for p_step, step in ((0.8, 0.0), (0.2, 0.04)):
        gain = 1.0 + ripple + step
        centre = gain * (2.0 + LOAD_RESPONSE[1] * offsets[0]) + 10.0 * (gain - 1.0)
        variance = gain**2 * (scatter[1, 1] + process[1, 1] / samples[0]) + ((0.3 + 0.1) * root) ** 2
        for p_impulse, impulse in ((1.0 - 0.1 * root, 0.0), (0.05 * root, 3.0 * root), (0.05 * root, -3.0 * root)):
            expected += p_step * p_impulse * norm(centre + impulse, math.sqrt(variance)).pdf(values[0, 1])
    found = density(CONSTANT, effect, 0.0, scatter, (times, samples, offsets, values, stuck), sensor, process)
    assert found == pytest.approx(math.log(expected), abs=1e-8)


def test_offsets_without_spikes_are_an_ar2_process():
    """The joint normal of the offsets heard in steps 0, 1, 3 of the process 0.7, 0.2 from two equal values."""
    sigma, heard = 0.05, np.array([True, True, False, True])
    loads = np.zeros((4, 4))  # offset of each step as a sum of the start and three innovations
    loads[0, 0] = 2.1 * sigma
    before = loads[0].copy()
    for step in range(1, 4):
        loads[step] = 0.7 * loads[step - 1] + 0.2 * before
        loads[step, step] += sigma
        before = loads[step - 1]
    rows = np.flatnonzero(heard)
    whole = (loads @ loads.T)[np.ix_(rows, rows)] + 1e-8 * np.eye(3)
    offsets = np.array([0.05, 0.11, 9.0, -0.02])
    expected = multivariate_normal(np.full(3, 0.18), whole).logpdf(offsets[rows])
    found = offsets_density((heard, offsets, np.zeros(4)), 0.18, (sigma, 0.0, 0.3, 0.0, 60.0))
    assert found == pytest.approx(expected, abs=1e-6)


def test_of_one_packet_the_mean_says_as_much_as_the_packet(fixed):
    """Quiet sensors, no load: the two ways to see must agree on every hypothesis."""
    model = model_of(fixed)
    values = np.random.default_rng(6).normal(0.0, 1.5, (MACHINES, CHANNELS))
    flat = np.zeros(MACHINES)
    packets = Packets(np.arange(MACHINES, dtype=np.int8), flat + 3.0, flat + 4.0, flat, values, values > 99.0)
    received = Heard(packets, Reports(np.array([True]), np.zeros(1), np.zeros(1)), 400.0, 0, MACHINES)
    world = World(QUIET, 0.0, NOISE, np.full(CHANNELS, 1.0))
    patterns, _ = model.line(0, MACHINES)
    given = (model, received, world, patterns.effect, patterns.extra, np.ones(len(patterns.machine), np.bool_))
    every, means = EveryPacket().readings(*given), MeansOnly().readings(*given)
    assert means[0] == pytest.approx(every[0], abs=1e-8)
    np.testing.assert_allclose(means[1], every[1], atol=1e-8)


# ------------------------------------------------------------------------------------------------ observers


def test_the_patterns_of_the_true_fault_are_what_the_simulator_wrote(line, environments, fixed):
    model, pool = model_of(fixed), line.pool(environments, Purpose.VALIDATION)
    checked = 0
    for episode in range(2):
        pool.reset(episode)
        truth = pool.hidden()
        for n in np.flatnonzero(truth.mode < PHYSICAL_MODES):
            patterns, _ = model.line(int(fixed.topology[n]), int(fixed.machines[n]))
            wanted = (int(truth.machine[n]) * len(MODES) + int(truth.mode[n])) * CASES
            rows = np.flatnonzero(patterns.hypothesis == wanted)
            effect = np.zeros((MACHINES, CHANNELS))
            effect[patterns.machine[rows]] = patterns.effect[rows]
            gain = fixed.gain[fixed.line[n]].reshape(MACHINES, CHANNELS)
            np.testing.assert_allclose((effect * gain).ravel(), truth.effect[n], atol=1e-5)
            checked += 1
    assert checked > 20


def test_probabilities_before_anything_is_received_are_those_of_the_simulator(line, environments, fixed):
    model, pool = model_of(fixed), line.pool(environments, Purpose.VALIDATION)
    _, prior = model.line(0, 7)
    chances = np.exp(prior).reshape(7, len(MODES), CASES)
    assert chances.sum() == pytest.approx(1.0)
    drawn = []
    for episode in range(200):
        pool.reset(episode)
        drawn.append(pool.hidden().mode.copy())
    share = np.bincount(np.concatenate(drawn), minlength=len(MODES)) / np.size(drawn)
    assert share[FALSE_ALARM] == pytest.approx(chances.sum(axis=(0, 2))[FALSE_ALARM], abs=0.015)
    assert [round(severity_of(case), 4) for case in (0, 5)] == [0.1583, 0.7417]


@pytest.mark.parametrize(
    ("knows", "sight"), [("told", EveryPacket()), ("untold", EveryPacket()), ("told", MeansOnly())]
)
def test_an_observer_names_most_faults_and_knows_how_often(line, environments, fixed, package, knows, sight):
    knowledge = Told(sight, fixed) if knows == "told" else Untold(sight, line.table)
    observer = IdealObserver(model_of(fixed), knowledge, fixed)
    player = HybridPlayer("observer", Policy(package), RuleMeasuring(), observer)
    watched = Watched(player, len(environments), 1)
    found = play(line, environments, watched)
    assert watched.right.mean() >= 0.85
    assert found["success"].mean() >= 0.85
    assert np.mean(player.claims()) == pytest.approx(watched.right.mean(), abs=0.15)


# ---------------------------------------------------------------------------------------------- attribution


def test_costs_of_the_parts_add_up_and_a_part_that_changes_nothing_costs_nothing():
    """Alone a loses 1 of 4 and b nothing; together they lose 2; so a costs 1.5 of 4, b 0.5, c 0 (worked by hand)."""
    whole = {frozenset(): 4, frozenset("a"): 3, frozenset("b"): 4, frozenset("ab"): 2}

    def success(parts):
        return np.arange(4)[None] < whole[parts - {"c"}]

    costs = {part: float(values.sum()) for part, values in shapley(success, ("a", "b", "c")).items()}
    assert costs == pytest.approx({"a": 1.5, "b": 0.5, "c": 0.0})


def test_steps_of_the_short_table_join_the_oracle_to_the_policy():
    assert explain.STEPS[0][1] == LADDER[0] == "oracle"
    assert explain.STEPS[-1][2] == LADDER[-1] == "policy"
    assert all(one[2] == following[1] for one, following in zip(explain.STEPS, explain.STEPS[1:], strict=False))


# ----------------------------------------------------------------------------------------------- classifiers


def test_examples_come_from_every_environment_where_more_are_wanted_than_there_are():
    assert spread(range(10), 4) == [0, 2, 5, 7]
    assert spread(range(10), 25) == list(range(10))


def test_moments_are_labelled_with_the_truth_and_every_arm_learns_from_them(line, package):
    lines = spread(line.catalog.environments("train"), 200)
    found = collect(Policy(package), line.pool(lines, Purpose.COLLECT), 3)
    assert len(found.label) == 600
    assert set(found.label // len(MODES)) <= set(range(MACHINES))
    assert ((found.label % len(MODES) != FALSE_ALARM) | (found.label == FALSE_ALARM)).all()
    few = chosen_of(found, np.arange(400))
    for arm in ARMS:
        made = fit(arm, few, passes=30)
        assert made.right(few).mean() > (0.5 if arm == PLAIN else 0.6)


def test_shared_weights_do_not_care_which_machine_it_is(line, package):
    """On a line whose couplings are left out, exchanging two machines exchanges their scores, but for their place."""
    lines = spread(line.catalog.environments("train"), 60)
    found = collect(Policy(package), line.pool(lines, Purpose.COLLECT), 1)
    made = fit("shared", found, passes=1)
    inputs = made.inputs(found.observation, found.remembered)
    swapped = inputs._replace(machines=inputs.machines.flip(1), present=inputs.present.flip(1), feeds=inputs.feeds * 0)
    plain = inputs._replace(feeds=inputs.feeds * 0)
    scores = [made.network(one).detach().numpy().reshape(-1, MACHINES, len(MODES)) for one in (plain, swapped)]
    np.testing.assert_allclose(scores[0][:, :, :FALSE_ALARM], scores[1][:, ::-1, :FALSE_ALARM], atol=1e-5)


# ------------------------------------------------------------------------------------------------ the report


def test_a_curve_tends_to_where_its_gains_shrink_to():
    """0.80, 0.90, 0.95: each gain is half the one before, so another 0.05 is to come."""
    assert gap_report.extrapolated([0.80, 0.88, 0.92]) == pytest.approx(0.96)
    assert gap_report.extrapolated([0.80, 0.90, 0.98]) is None, "more than all"
    assert gap_report.extrapolated([0.80, 0.85, 0.95]) is None
    assert gap_report.extrapolated([0.80, 0.90]) is None


def test_the_champion_of_a_home_is_explained(tmp_path, package):
    with pytest.raises(InputError, match="no champion"):
        gap.champion_of(tmp_path)
    package.save(tmp_path / "packages" / "first")
    store = ChampionStore(tmp_path / "champion")
    store.promote(package.digest, "packages/first", expected=None, reason="the first")
    assert gap.champion_of(tmp_path).digest == package.digest


@pytest.mark.slow
def test_a_smoke_run_leaves_results_that_the_page_and_the_document_can_show(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gap, "SMOKE", explain.Sizes(6, 1, 6, 1, 6, (60, 120, 240), (1, 1, 1)))
    path = gap.main(["--smoke", "--out", str(tmp_path)])
    content = json.loads(path.read_text())
    for name in ("training", "validation", "hold-out"):
        steps, rows = content["short"][name], content["ladder"][name]
        gone = rows[0]["success"]["value"] - rows[-1]["success"]["value"]
        assert sum(step["lost"]["value"] for step in steps) == pytest.approx(gone, abs=1e-5)
        shared = sum(part["value"] for part in content["parts"][name].values())
        whole = rows[2]["success"]["value"] - rows[-1]["success"]["value"]
        assert shared == pytest.approx(whole, abs=1e-5)
        assert set(content["parts"][name]) == set(PARTS)
    page = capsys.readouterr().out
    assert gap_report.section(content) in page
    assert gap_report.section(content) in report.results(tmp_path)
    once = gap_report.filled("# A page\n\nIts text.\n", content)
    assert once.startswith("# A page\n\nIts text.\n\n## The gap to the oracle\n")
    assert gap_report.short_table(content) in once
    assert gap_report.filled(f"{once}\nMore.\n", content) == f"{once}\nMore.\n"
