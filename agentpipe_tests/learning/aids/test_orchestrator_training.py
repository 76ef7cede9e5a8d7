"""Whole trainings with the orchestrator: they go on bit for bit, can be played again, and touch training alone."""

from __future__ import annotations

import dataclasses
import shutil

import numpy as np
import pytest

from agentpipe.environments.compound import levels_of
from agentpipe.environments.layout import ACTION_COUNT, Purpose
from agentpipe.environments.players import RandomPlayer
from agentpipe.experience.care.check import check_folder
from agentpipe.experience.care.shrink import regenerate_shard, shrink
from agentpipe.experience.origin import origin
from agentpipe.experience.store.shard import open_shard
from agentpipe.learning import checkpoint as checkpoints
from agentpipe.learning.aids.options import OrchestratorOptions
from agentpipe.learning.aids.orchestrator_bandit import ARMS, arm_of
from agentpipe.learning.aids.orchestrator_log import REASONS, ROW, read_log
from agentpipe.learning.options import StreamOptions
from agentpipe.learning.policy.normalisation import gather_statistics
from agentpipe.learning.samples.stream import line_source
from agentpipe.learning.trainer import train
from agentpipe_tests.environments.line import catalog, make_pool, profile, table
from agentpipe_tests.learning.tiny import tiny_options

SPECS = catalog().environments("train")[::140]
SIZE, STEPS, UPDATES = len(SPECS), 8, 7
STEERED = OrchestratorOptions(share=0.6, floor=0.25, every=2)
LOOKS = catalog().environments("validation")[::20]


def line(threads=1):
    return make_pool(SPECS, seed=5, threads=threads)


def pool_for(manifest, names):
    specs = [catalog().environment(names[index]) for index in sorted(names)]
    return make_pool(specs, seed=manifest["origin"]["seed"], purpose=Purpose[manifest["origin"]["purpose"]])


@pytest.fixture(scope="module")
def statistics():
    return gather_statistics(make_pool(SPECS, purpose=Purpose.STATISTICS), RandomPlayer(), steps=30)


def options(orchestrator=STEERED, **changes):
    made = tiny_options(budget_steps=SIZE * STEPS * UPDATES, checkpoint_every=3, validate_every=2, **changes)
    return dataclasses.replace(made, orchestrator=orchestrator, stream=StreamOptions())


def run(directory, statistics, chosen, pool=None, **changes):
    source = line_source(SPECS, table().version, origin(5, "TRAIN", profile().digest))
    return train(pool or line(chosen.threads), statistics, chosen, directory=directory, source=source, **changes)


class Looks:
    """Plays the same validation environments at each look, and keeps every byte that was seen."""

    def __init__(self):
        self.seen = []

    def __call__(self, _):
        pool = make_pool(LOOKS, purpose=Purpose.VALIDATION)
        for _ in range(20):
            pool.step(RandomPlayer().act(pool).actions)
        assert not pool.compound.any()
        self.seen.append(pool.observation.tobytes() + pool.reward.tobytes())
        return 0.5


@pytest.fixture(scope="module")
def whole(statistics, tmp_path_factory):
    """An uninterrupted run, its pool as it stands at the end, and what its looks at validation saw."""
    pool, looks = line(), Looks()
    result = run(tmp_path_factory.mktemp("whole"), statistics, options(), pool, validate=looks)
    return result, pool, looks


def log_of(result):
    arrays = checkpoints.load(result.checkpoint).arrays["aids"]
    log = np.zeros(len(arrays["orchestrator/log_update"]), ROW)
    for name in ROW.names:
        log[name] = arrays[f"orchestrator/log_{name}"]
    return log


def ended(result):
    shards = [(path.name, open_shard(path).digest) for path in result.shards]
    return checkpoints.load(result.checkpoint).digest, result.package.digest, result.aid_log, shards


def test_it_steers_and_says_so(whole):
    result, pool, _ = whole
    log = log_of(result)
    assert sorted(set(log["update"].tolist())) == [1, 3, 5, 7]
    assert log["environments"].sum() == 4 * round(0.6 * SIZE)
    assert [entry.update for entry in result.aid_log if entry.aid == "orchestrator"] == [1, 3, 5, 7]
    assert result.update_log[-1]["orchestrator/environments"] == round(0.6 * SIZE)
    assert (pool.next_compound().any(axis=1)).sum() == round(0.6 * SIZE)
    steered = log[log["decisions"] > 0]
    assert (steered["entropy"] / steered["decisions"] < np.log(ACTION_COUNT)).all()
    assert np.isfinite(log["expected"][log["update"] > 1]).all()
    assert read_log(result.left["orchestrator"]).tobytes() == log.tobytes()


def test_entries_of_the_shards_are_what_the_log_says(whole):
    """Every episode that began under a combination is in a shard, but for those that nobody took a step in."""
    result, pool, _ = whole
    played = np.concatenate([open_shard(path).episodes for path in result.shards])
    rows = {spec.index: row for row, spec in enumerate(SPECS)}
    given = played["compound"].any(axis=1)
    assert 0.2 < given.mean() < 0.8
    own = pool.compounds.own_levels[[rows[index] for index in played["environment"].tolist()]]
    levels = levels_of(played["compound"])
    arms = arm_of(np.where(levels < 0, own, levels))[given]
    waiting = (pool.last_action == ACTION_COUNT) & pool.compound.any(axis=1)
    late = arm_of(levels_of(pool.compound[waiting]))
    log = log_of(result)
    began = np.bincount(np.concatenate([arms, late]), minlength=ARMS)
    np.testing.assert_array_equal(np.bincount(log["arm"], log["episodes"], ARMS).astype(int), began)


def test_its_shards_shrink_and_come_back_byte_for_byte(whole, tmp_path):
    result, _, _ = whole
    for path in result.shards:
        copy = shutil.copytree(path, tmp_path / path.name)
        digest = open_shard(copy).digest
        assert check_folder(copy).ok
        shrink(copy, pool_for)  # plays every episode again, and compares every byte
        assert check_folder(copy).ok
        assert regenerate_shard(copy, pool_for).digest == digest


def test_validation_is_the_same_with_and_without_it(whole, statistics, tmp_path):
    _, _, looks = whole
    others = Looks()
    result = run(tmp_path, statistics, options(None), validate=others)
    assert len(looks.seen) > 3
    assert others.seen == looks.seen
    assert not any(name.startswith("orchestrator/") for name in result.update_log[-1])
    assert all(not open_shard(path).episodes["compound"].any() for path in result.shards)


def test_threads_make_no_difference(whole, statistics, tmp_path):
    other = run(tmp_path, statistics, options(threads=2), validate=Looks())
    assert ended(other)[1:] == ended(whole[0])[1:]
    assert log_of(other).tobytes() == log_of(whole[0]).tobytes()


@pytest.mark.parametrize("update", [1, 2, 4])
def test_an_interrupted_run_ends_as_an_uninterrupted_one(whole, statistics, tmp_path, update):
    asked = iter([False] * update + [True])
    part = run(tmp_path, statistics, options(), validate=Looks(), stop=lambda: next(asked))
    assert (part.reason, part.updates) == ("interrupted", update)
    resumed = run(tmp_path, statistics, options(), validate=Looks(), resume=part.checkpoint)
    assert ended(resumed) == ended(whole[0])


def test_a_run_that_was_killed_ends_as_an_uninterrupted_one(whole, statistics, tmp_path):
    class KilledError(Exception):
        pass

    def dies(stage, done, *_):
        if stage == "training" and done >= 5 * SIZE * STEPS:
            raise KilledError

    with pytest.raises(KilledError):
        run(tmp_path, statistics, options(), validate=Looks(), progress=dies)
    last = checkpoints.latest(tmp_path / "checkpoints")
    assert last.name.startswith("update-000003")
    resumed = run(tmp_path, statistics, options(), validate=Looks(), resume=last)
    assert ended(resumed) == ended(whole[0])


def test_the_floor_is_part_of_every_decision(whole):
    log = log_of(whole[0])
    floor = log[log["reason"] == REASONS.index("floor")]
    each = int(np.ceil(0.25 * round(0.6 * SIZE)))
    assert [int(floor["environments"][floor["update"] == update].sum()) for update in (1, 3, 5, 7)] == [each] * 4
    assert set(floor["arm"].tolist()) == set(range(4 * each))
