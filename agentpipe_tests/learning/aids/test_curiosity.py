"""The bonus against a plain count; cells tell apart what is worth telling apart."""

from collections import Counter
from math import sqrt

import numpy as np
import pytest
import torch

from agentpipe.environments.layout import ACTION_COUNT, OBSERVATION_NAMES, block_start
from agentpipe.learning.aids.curiosity import BITS, TABLE, Cells, Curiosity
from agentpipe.learning.aids.options import AidOptions
from agentpipe.learning.samples.rollout import Rollout
from agentpipe_tests.learning.aids.told import copied, rollout_of, warning

NAMES = tuple(f"o{index}" for index in range(6))
ALWAYS = AidOptions(curiosity="always", curiosity_weight=0.5)


def places(cells, rollout):
    out = np.empty(rollout.live, np.int64)
    cells.place(rollout, out)
    return out


def line_rollout(observations):
    """One step an environment, of normalised observations given by feature."""
    rollout = Rollout(1, len(observations), len(OBSERVATION_NAMES) + 12, ACTION_COUNT)
    rollout.encoded.zero_()
    for row, features in enumerate(observations):
        for name, value in features.items():
            rollout.encoded[0, row, OBSERVATION_NAMES.index(name)] = value
    return rollout


def test_bonus_is_weight_over_the_root_of_the_count():
    """Against a dictionary over the places of two rollouts; the second rollout counts on."""
    aid, counts = Curiosity(ALWAYS, NAMES, seed=1), Counter()
    for seed in range(2):
        rollout = rollout_of(5, 40, seed=seed)
        rollout.encoded[..., 1:] = 0.0  # few cells
        where = places(aid.cells, rollout)
        counts.update(where.tolist())
        expected = [0.5 / sqrt(counts[place]) for place in where.tolist()]
        np.testing.assert_allclose(aid.bonus(rollout).reshape(-1), expected, rtol=1e-6)
    assert max(counts.values()) > 5
    assert aid.figures()["aids/curiosity_cells"] == len(counts)


def test_order_of_the_environments_makes_no_difference():
    rollout, turned = rollout_of(3, 20), rollout_of(3, 20)
    order = np.arange(20)[::-1].copy()
    turned.encoded.copy_(rollout.encoded[:, order])
    turned.action.copy_(rollout.action[:, order])
    turned.segment[:] = rollout.segment[:, order]
    bonus, other = (Curiosity(ALWAYS, NAMES, seed=1).bonus(part) for part in (rollout, turned))
    np.testing.assert_array_equal(bonus[:, order], other)


@pytest.mark.parametrize("field", ["action", "segment"])
def test_action_and_segment_are_part_of_the_cell(field):
    cells, rollout = Cells(NAMES, seed=0), rollout_of(2, 50)
    before = places(cells, rollout)
    getattr(rollout, field)[:] += 1
    assert np.mean(before == places(cells, rollout)) < 0.05


def test_similar_observations_share_cells_and_opposite_ones_do_not():
    """SimHash: at a small angle a all bits agree with probability (1 - a / pi)^16; here a is about 0.001."""
    cells, rollout = Cells(NAMES, seed=0), rollout_of(4, 50)
    before = places(cells, rollout)
    rollout.encoded[:] *= 1.5  # no other direction
    np.testing.assert_array_equal(places(cells, rollout), before)
    noise = torch.from_numpy(np.random.default_rng(1).normal(size=tuple(rollout.encoded.shape)).astype(np.float32))
    rollout.encoded += 0.001 * noise
    assert np.mean(places(cells, rollout) == before) > 0.95
    rollout.encoded.neg_()
    assert np.mean(places(cells, rollout) == before) < 0.05


def test_cells_of_the_line_know_the_order_and_not_the_readings():
    cells = Cells(OBSERVATION_NAMES, seed=0)
    plain = {"declared_machine.3": 2.0, "declared_mode.p1": 3.0}
    same = [plain, {**plain, "reading.2.1": 5.0, "mean.0.0": -3.0, "clock.elapsed": 2.0}]
    other = [{**plain, name: -1.5} for name in ("declared_machine.3", "segment.assess", "depot.1", "order.retries")]
    where = places(cells, line_rollout([*same, *other]))
    assert where[0] == where[1]
    assert len(set(where.tolist())) == 5
    assert cells.planes.shape == (len(OBSERVATION_NAMES), 0)
    assert len(cells.exact) == 41
    assert len(cells.pooled) == 8
    assert block_start("count") == cells.pooled[0]


def test_what_was_heard_counts_in_steps_of_half_a_deviation():
    cells = Cells(OBSERVATION_NAMES, seed=0)
    heard = [{f"count.{m}": value for m in range(8)} for value in (0.1, 0.4, 0.6, 0.9, -0.1)]
    where = places(cells, line_rollout(heard)).tolist()
    assert where[0] == where[1]
    assert where[2] == where[3]
    assert len({where[0], where[2], where[4]}) == 3


def test_other_names_get_projections():
    assert Cells(NAMES, seed=0).planes.shape == (6, BITS)
    assert not torch.equal(Cells(NAMES, seed=0).planes, Cells(NAMES, seed=1).planes)


def test_starts_at_a_standstill_with_an_empty_table_and_forgets_at_the_end():
    aid = Curiosity(AidOptions(patience=1, calm=2), NAMES, seed=0)
    assert aid.bonus(rollout_of(2, 4)) is None
    assert aid.figures() == {"aids/curiosity": 0.0}
    aid.updated({}, [warning("entropy", 0.05)])
    assert aid.take_notes() == [("start", "gate 4: entropy 0.05 short of 0.1, for 1 updates", 1.0)]
    assert aid.counts.shape == (TABLE,)
    assert aid.bonus(rollout_of(2, 4)).max() == pytest.approx(0.02)
    aid.updated({}, ())
    aid.updated({}, ())
    assert aid.counts.shape == (0,)
    assert aid.bonus(rollout_of(2, 4)) is None


def test_state_goes_on_where_it_was():
    aid = Curiosity(ALWAYS, NAMES, seed=1)
    aid.bonus(rollout_of(5, 40, seed=0))
    again = copied(aid, Curiosity(ALWAYS, NAMES, seed=1))
    assert again.figures() == aid.figures()
    np.testing.assert_array_equal(again.bonus(rollout_of(5, 40, seed=1)), aid.bonus(rollout_of(5, 40, seed=1)))
