"""The orchestrator: goes where entropy is highest, everywhere a little, in training alone, and says what it did."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from agentpipe.environments.compound import BACKGROUND, levels_of
from agentpipe.environments.layout import ACTION_COUNT, PROTOCOLS, SENSOR_TYPES, Purpose
from agentpipe.environments.players import RandomPlayer
from agentpipe.errors import NonFiniteError, SettingsError
from agentpipe.learning.aids.options import OrchestratorOptions
from agentpipe.learning.aids.orchestrator import Orchestrator
from agentpipe.learning.aids.orchestrator_bandit import ARMS, Bandit, arm_of, levels_of_arm
from agentpipe.learning.aids.orchestrator_log import EVERYWHERE, REASONS
from agentpipe_tests.environments.line import assert_same_bytes, catalog, make_pool, record
from agentpipe_tests.learning.tiny import TinyPool

SPECS = catalog().environments("train")[::15]
FEW = catalog().environments("train")[::150]
LEVELS = levels_of_arm(np.arange(ARMS))
OPTIONS = OrchestratorOptions(share=0.5, floor=0.2, every=2)
KNOBS = None


def arms_in_force(pool, codes):
    """Naive: of each environment, from its row of the table where the codes say so."""
    found = []
    for row, levels in enumerate(levels_of(codes)):
        own = pool.compounds.own_levels[row]
        merged = [int(own[kind]) if level < 0 else int(level) for kind, level in enumerate(levels)]
        found.append(int(arm_of(np.array(merged, np.int8))))
    return np.array(found)


class Quick:
    """Rollouts of two steps, an episode each, whose entropy is told by the combination; nothing is simulated."""

    def __init__(self, options=OPTIONS, specs=SPECS, seed=0, noise=0.2):
        self.pool, self.aid = make_pool(specs), Orchestrator(options, seed)
        self.noise, self.generator, self.episode = noise, np.random.default_rng(1), 0
        self.mask = torch.ones(2, self.pool.size, ACTION_COUNT, dtype=torch.bool)
        known = self.pool.compounds
        self.groups = known.sensor_type.astype(np.int64) * len(PROTOCOLS) + known.protocol

    def run(self, updates, entropy):
        pool = self.pool
        for _ in range(updates):
            self.aid.before(KNOBS, pool)
            parts = []
            for codes in (pool.compound, pool.next_compound()):
                noise = self.noise * self.generator.standard_normal(pool.size)
                parts.append(np.maximum(entropy(arm_of_pool(pool, codes), self.groups) + noise, 0))
            self.episode += 1
            pool.reset(self.episode)
            done = np.array([[True], [False]]) & np.ones(pool.size, bool)
            rollout = SimpleNamespace(entropy=torch.tensor(np.array(parts, np.float32)), mask=self.mask, done=done)
            self.aid.collected(rollout, pool)
        return self.aid.log


def arm_of_pool(pool, codes):
    levels = levels_of(codes)
    return arm_of(np.where(levels < 0, pool.compounds.own_levels, levels))


def shares(log, last):
    """Share of each combination in the bandit's own moves of the ``last`` decisions."""
    updates = np.unique(log["update"])[-last:]
    moves = log[np.isin(log["update"], updates) & (log["reason"] != REASONS.index("floor"))]
    counts = np.bincount(moves["arm"], moves["environments"], ARMS)
    return counts / counts.sum()


def in_sensor_and_network(arms):
    return (LEVELS[arms, 0] >= 4) & (LEVELS[arms, 1] >= 4) & (LEVELS[arms, 2] == 0)


def slope(arms, _groups):
    return 0.3 + 0.02 * LEVELS[arms].sum(axis=-1)


def test_it_finds_the_combinations_of_the_highest_entropy():
    log = Quick().run(40, lambda arms, groups: slope(arms, groups) + 0.4 * in_sensor_and_network(arms))
    assert in_sensor_and_network(np.arange(ARMS)).sum() == 4
    assert shares(log, 10) @ in_sensor_and_network(np.arange(ARMS)) > 0.95


def test_it_follows_when_they_move():
    driver = Quick()
    driver.run(30, lambda arms, groups: slope(arms, groups) + 0.4 * in_sensor_and_network(arms))
    alone = LEVELS[:, 2] * (LEVELS[:, 0] == 0) * (LEVELS[:, 1] == 0) == 5
    assert alone.sum() == 1
    log = driver.run(30, lambda arms, groups: slope(arms, groups) + 0.8 * alone[arms])
    assert shares(log, 5) @ alone > 0.7
    assert shares(log, 5) @ in_sensor_and_network(np.arange(ARMS)) < 0.01


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_where_entropy_is_the_same_everywhere_it_goes_everywhere(noise):
    """The negative control: chance is not taken for a pattern."""
    log = Quick(noise=noise).run(60, lambda arms, _: np.full(len(arms), 0.5))
    found = shares(log, 30)
    assert 1 / np.sum(found**2) > 150  # as many as would share the moves evenly
    assert found.max() < 4 / ARMS
    tripled = (LEVELS > 0).all(axis=1)
    assert found @ tripled == pytest.approx(125 / 216, abs=0.06)


def test_it_tells_groups_of_environments_apart():
    """Sensors of one type make sensor disturbances hard, one protocol those of the network."""
    first, second = (levels_of_arm(np.arange(ARMS))[:, kind] == 5 for kind in (0, 1))

    def entropy(arms, groups):
        sensors, protocol = groups // len(PROTOCOLS), groups % len(PROTOCOLS)
        return 0.3 + 0.5 * (first[arms] & (sensors == 1)) + 0.5 * (second[arms] & (protocol == 3) & (sensors != 1))

    log = Quick().run(50, entropy)
    late = log[(log["update"] > 30) & (log["reason"] > 0)]
    sensors, protocol = late["group"] // len(PROTOCOLS), late["group"] % len(PROTOCOLS)
    for rows, hard in ((sensors == 1, first), ((protocol == 3) & (sensors != 1), second)):
        assert np.average(hard[late["arm"][rows]], weights=late["environments"][rows]) > 0.8
    other = (protocol != 3) & (sensors != 1)
    assert np.average((first | second)[late["arm"][other]], weights=late["environments"][other]) < 0.6


@pytest.mark.parametrize(("share", "floor", "every"), [(0.5, 0.2, 1), (0.3, 0.05, 3), (1.0, 1.0, 2), (0.02, 0.1, 1)])
def test_the_floor_goes_round_all_combinations_evenly(share, floor, every):
    options = OrchestratorOptions(share=share, floor=floor, every=every)
    driver = Quick(options)
    log = driver.run(24 * every, lambda arms, _: 2.0 * (arms == 17))
    size = round(share * len(SPECS))
    each = int(np.ceil(floor * size))
    moves = log[log["reason"] == REASONS.index("floor")]
    counts = np.bincount(moves["arm"], moves["environments"], ARMS)
    assert counts.sum() == 24 * each
    assert counts.max() - counts.min() <= 1
    assert (moves["group"] == EVERYWHERE).all()
    by_update = {int(update): int(log["environments"][log["update"] == update].sum()) for update in log["update"]}
    assert by_update == {1 + every * number: size for number in range(24)}


def test_every_variant_of_a_level_is_used_and_background_where_there_is_none():
    driver = Quick(OrchestratorOptions(share=1.0, floor=1.0, every=1))
    seen = Counter()
    for _ in range(6):
        driver.run(1, slope)
        seen.update(map(int, driver.pool.next_compound().ravel()))
    levels, places = np.array(list(seen)) % 8, np.array(list(seen)) // 8
    assert set(seen) == {BACKGROUND, *(level + 8 * place for level in range(1, 6) for place in range(5))}
    assert set(levels.tolist()) == {1, 2, 3, 4, 5, 6}
    assert places.max() == 4
    counts = np.array([seen[3 + 8 * place] for place in range(5)])
    assert counts.max() < 1.5 * counts.min()


# ------------------------------------------------------------------------------------------- what was really played


def play(pool, player, aid, steps, entropy):
    """One update in the line itself, looked at step by step.

    Returns:
        Decisions with a choice and their entropy by row, part of the rollout and compound; episodes that began by row
        and compound.
    """
    aid.before(KNOBS, pool)
    size = pool.size
    entropies = np.zeros((steps, size), np.float32)
    mask, done = np.zeros((steps, size, ACTION_COUNT), bool), np.zeros((steps, size), bool)
    seen, begun, part = defaultdict(lambda: [0, 0.0]), Counter(), np.zeros(size, int)
    for step in range(steps):
        mask[step] = pool.mask
        entropies[step] = entropy(step) * pool.mask.sum(axis=1)
        for row in range(size):
            if pool.mask[row].sum() > 1:
                cell = seen[row, int(part[row]), tuple(pool.compound[row].tolist())]
                cell[0] += 1
                cell[1] += float(entropies[step, row])
        pool.step(player.act(pool).actions)
        done[step] = pool.terminated | pool.truncated
        part |= done[step]
        begun.update((row, tuple(pool.compound[row].tolist())) for row in np.flatnonzero(done[step]).tolist())
    aid.collected(SimpleNamespace(entropy=torch.from_numpy(entropies), mask=torch.from_numpy(mask), done=done), pool)
    return seen, begun


def test_the_log_is_what_the_pool_played():
    """Held against every step of every environment, looked at one by one."""
    pool, player = make_pool(FEW), RandomPlayer()
    aid = Orchestrator(OrchestratorOptions(share=0.6, floor=0.3, every=3), 4)
    generator = np.random.default_rng(0)
    weights = generator.random((40, pool.size)).astype(np.float32)
    for number in range(7):
        before = aid.log
        played = [play(pool, player, aid, 12, lambda step: weights[step])]
        wanted = pool.next_compound()
        steered = {int(row): tuple(wanted[row].tolist()) for row in np.flatnonzero(aid._row_of >= 0)}
        played += [play(pool, player, aid, 12, lambda step: weights[step]) for _ in range(2)]
        rows = aid.log[len(before) :]
        assert (rows["update"] == 1 + 3 * number).all()
        assert rows["environments"].sum() == len(steered) == round(0.6 * len(FEW))
        arms, totals = arms_in_force(pool, wanted), defaultdict(lambda: [0, 0, 0, 0.0])
        for row, codes in steered.items():
            cell = totals[int(arms[row])]
            cell[0] += 1
            for seen, begun in played:
                cell[1] += begun[row, codes]
                for part in (0, 1):
                    cell[2] += seen[row, part, codes][0]
                    cell[3] += seen[row, part, codes][1]
        for arm, wanted_row in totals.items():
            here = rows[rows["arm"] == arm]
            names = ("environments", "episodes", "decisions", "entropy")
            assert [here[name].sum() for name in names] == pytest.approx(wanted_row), arm
        assert set(rows["arm"].tolist()) == set(totals)
        assert all(counts > 0 for counts in (rows["episodes"].sum(), rows["decisions"].sum()))


def test_samples_are_one_mean_an_environment_and_part_of_a_rollout():
    """Parts: before its first new episode, and since; whoever plays under a combination tells of it, steered or not."""
    pool, aid = make_pool(FEW), Orchestrator(OrchestratorOptions(share=0.6, every=100, discount=1.0), 4)
    weights = np.random.default_rng(0).random((14, pool.size)).astype(np.float32)
    known, bandit = pool.compounds, Bandit(1.0, 1e9)
    fields = known.sensor_type, known.protocol, known.topology, known.own_mode
    parts = 0
    for _ in range(4):
        seen, _ = play(pool, RandomPlayer(), aid, 14, lambda step: weights[step])
        samples = []
        for (row, _, codes), (decisions, summed) in seen.items():
            arm = arms_in_force(pool, np.tile(np.array(codes, np.uint8), (pool.size, 1)))[row]
            assert arm >= 0
            samples.append((arm, [int(field[row]) for field in fields], summed / decisions, decisions))
        bandit.hear(*(np.array(column) for column in zip(*samples, strict=True)))
        parts += len(samples)
    assert 4 * len(FEW) < parts < 8 * len(FEW)
    for name, array in bandit.state().items():
        np.testing.assert_allclose(getattr(aid.bandit, name), array, rtol=1e-6, atol=1e-9)


def test_only_environments_with_a_choice_count():
    driver = Quick(specs=FEW)
    driver.mask[:] = False
    driver.mask[:, :, 3] = True
    log = driver.run(4, lambda arms, _: np.full(len(arms), 0.7))
    assert log["decisions"].sum() == 0
    assert np.isnan(log["expected"]).all()
    assert not driver.aid.bandit.sums.any()
    assert driver.aid.figures() == {}


# --------------------------------------------------------------------------------------------------- going on


@pytest.mark.parametrize("stop", [1, 2, 3, 4, 6])
def test_going_on_from_a_checkpoint_equals_going_on(stop):
    def begin(threads=1):
        return make_pool(FEW, threads=threads), Orchestrator(OrchestratorOptions(0.5, 0.2, 3), 4)

    def go_on(pool, aid, first, last):
        frames = []
        for number in range(first, last):
            play(
                pool, RandomPlayer(), aid, 9, lambda step, k=number: np.full(pool.size, 0.1 + step / 9 + k, np.float32)
            )
            frames.append((pool.compound.copy(), pool.next_compound(), pool.observation.copy(), aid.figures()))
        return frames

    pool, aid = begin()
    go_on(pool, aid, 0, stop)
    content, arrays = aid.state()
    content, arrays = json.loads(json.dumps(content)), {name: array.copy() for name, array in arrays.items()}
    other, again = begin(threads=2)
    other.restore(pool.snapshot())
    again.restore(content, arrays)
    again.take_notes(), aid.take_notes()
    for one, two in zip(go_on(pool, aid, stop, 9), go_on(other, again, stop, 9), strict=True):
        assert all(a.tobytes() == b.tobytes() for a, b in zip(one[:3], two[:3], strict=True))
        assert one[3] == two[3]
    assert aid.log.tobytes() == again.log.tobytes()
    assert aid.take_notes() == again.take_notes()
    for name, array in aid.state()[1].items():
        assert array.tobytes() == again.state()[1][name].tobytes(), name
    other.close()


def test_decisions_follow_from_seed_and_number_alone():
    compounds = []
    for seed in (1, 1, 2):
        driver = Quick(specs=FEW, seed=seed)
        driver.run(5, slope)
        compounds.append(driver.pool.next_compound().tobytes())
    assert compounds[0] == compounds[1] != compounds[2]


# ------------------------------------------------------------------------------------------------- training alone


@pytest.mark.parametrize("purpose", [purpose for purpose in Purpose if purpose is not Purpose.TRAIN])
def test_a_pool_for_anything_but_training_is_left_alone(purpose):
    pool, aid = make_pool(FEW, purpose=purpose), Orchestrator(OPTIONS, 0)
    play(pool, RandomPlayer(), aid, 10, lambda step: np.ones(pool.size, np.float32))
    play(pool, RandomPlayer(), aid, 10, lambda step: np.ones(pool.size, np.float32))
    plain = make_pool(FEW, purpose=purpose)
    record(plain, RandomPlayer(), 20)
    assert_same_bytes(record(pool, RandomPlayer(), 20)[1:], record(plain, RandomPlayer(), 20)[1:])
    assert not pool.compound.any()
    assert [action for action, _, _ in aid.take_notes()] == ["idle"]
    assert len(aid.log) == 0


def test_a_pool_of_the_users_own_is_left_alone():
    pool, aid = TinyPool(), Orchestrator(OPTIONS, 0)
    for _ in range(3):
        aid.before(KNOBS, pool)
        aid.collected(SimpleNamespace(), pool)
    assert [action for action, _, _ in aid.take_notes()] == ["idle"]
    assert aid.figures() == {}


@pytest.mark.parametrize("split", ["validation", "holdout"])
def test_environments_of_another_split_are_never_steered(split):
    """Also where somebody puts them into a pool for training."""
    others = catalog().environments(split)[::40]
    driver = Quick(OrchestratorOptions(share=1.0, every=1), specs=[*FEW, *others])
    driver.run(5, slope)
    assert not driver.pool.next_compound()[len(FEW) :].any()
    assert driver.pool.next_compound()[: len(FEW)].any(axis=1).all()
    assert (driver.aid.log["environments"].sum()) == 5 * len(FEW)


def test_what_is_not_steered_keeps_the_row_of_its_own():
    driver = Quick(specs=FEW)
    for _ in range(4):
        driver.run(2, slope)
        steered = driver.aid._row_of >= 0
        assert steered.sum() == round(0.5 * len(FEW))
        assert driver.pool.compound.any(axis=1).tolist() == steered.tolist()


# ---------------------------------------------------------------------------------------------------- what it says


def test_notes_and_figures_say_what_was_done():
    driver = Quick()
    driver.run(6, lambda arms, groups: slope(arms, groups) + 0.4 * in_sensor_and_network(arms))
    notes = driver.aid.take_notes()
    assert [(action, value) for action, _, value in notes] == [("steer", 234.0)] * 3
    assert notes[0][1].startswith("234 environments: 47 floor, 187 explore, 0 exploit; most often all three (")
    assert "expected entropy" in notes[1][1]
    figures = driver.aid.figures()
    assert figures["orchestrator/environments"] == 234
    assert figures["orchestrator/entropy_steered"] > figures["orchestrator/entropy_elsewhere"] > 0.3
    assert 0 < figures["orchestrator/sensor_network"] <= 1
    assert len(SENSOR_TYPES) * len(PROTOCOLS) == 25


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_an_entropy_that_is_not_finite_is_named(value):
    pool, aid = make_pool(FEW), Orchestrator(OPTIONS, 0)
    weights = np.ones((9, len(FEW)), np.float32)
    weights[7, 5] = value
    with pytest.raises(NonFiniteError, match="not finite") as caught:
        play(pool, RandomPlayer(), aid, 9, lambda step: weights[step])
    assert caught.value.where["step"] == 7
    assert caught.value.where["environment"] == FEW[5].environment_id
    assert caught.value.where["field"] == "entropy"


@pytest.mark.parametrize(
    "changes",
    [{"share": -0.1}, {"share": 1.1}, {"floor": 2}, {"every": 0}, {"discount": 0}, {"discount": 1.1}, {"certainty": 0}],
)
def test_options_that_make_no_sense_are_refused(changes):
    with pytest.raises(SettingsError, match=next(iter(changes))):
        OrchestratorOptions(**changes)
