"""A policy with a memory where it is played, replayed, fine-tuned, held near a champion and compared."""

import dataclasses
import json

import numpy as np
import pytest
import torch

from agentpipe.errors import CheckpointError, LearningError, NonFiniteError, SimulationError
from agentpipe.experience.store import records as rec
from agentpipe.learning import checkpoint as checkpoints
from agentpipe.learning.gradient.anchor import Anchor
from agentpipe.learning.joint.recorded import recorded_memory
from agentpipe.learning.joint.training import JointTraining
from agentpipe.learning.policy.package import PolicyPackage
from agentpipe.learning.policy.player import PolicyPlayer
from agentpipe.learning.succession.labels import lessons
from agentpipe.learning.tensors import content_digest
from agentpipe.learning.trainer import train
from agentpipe.learning.workers import Workers
from agentpipe_tests.learning.knowing import Knowing, KnowingPool, knowing_network
from agentpipe_tests.learning.recorded import MemorySet, MemoryShard, tiny_shard
from agentpipe_tests.learning.samples.test_replay import Fixed, fill
from agentpipe_tests.learning.tiny import (
    ACTION_NAMES,
    ACTIONS,
    CHOICES,
    NAMES,
    WIDTH,
    TinyExpert,
    TinyPool,
    tiny_options,
    tiny_statistics,
    tiny_warm_up,
)


def package_of(seed=0, **changes):
    return PolicyPackage(knowing_network(seed, **changes), tiny_statistics(), NAMES, ACTION_NAMES, "tiny")


def seen(pool):
    return tuple(array.copy() for array in (pool.observation, pool.last_action, pool.time, pool.mask))


# -- the package ---------------------------------------------------------------------------------------------------


def test_a_package_with_a_memory_comes_back_and_says_so_in_its_signature(tmp_path):
    package = package_of()
    loaded = PolicyPackage.load(package.save(tmp_path / "p"))
    assert loaded.digest == package.digest
    assert loaded.memory_size == 5
    assert loaded.signature["inputs"][-1] == {"name": "memory", "dtype": "float32", "shape": [5]}
    assert loaded.signature["outputs"][-1] == {"name": "memory_next", "dtype": "float32", "shape": [5]}
    memory = np.random.default_rng(0).normal(size=(9, 5)).astype(np.float32)
    inputs = seen(KnowingPool(9))
    for mine, theirs in zip(package.act(*inputs, memory=memory), loaded.act(*inputs, memory=memory), strict=True):
        assert mine.tobytes() == theirs.tobytes()


def test_a_package_without_a_memory_has_the_signature_it_had_and_a_state_of_no_width():
    package = package_of(memory=0)
    assert [entry["name"] for entry in package.signature["inputs"]] == ["observation", "last_action", "time", "mask"]
    assert [entry["name"] for entry in package.signature["outputs"]] == ["action", "probabilities", "value"]
    assert package.act(*seen(KnowingPool(4))).memory.shape == (4, 0)


def test_a_memory_is_checked_before_it_is_used():
    package, inputs = package_of(), seen(KnowingPool(4))
    with pytest.raises(LearningError, match="without its state"):
        package.act(*inputs)
    with pytest.raises(SimulationError, match=r"memory is float32\(4, 3\), expected float32\(4, 5\)"):
        package.act(*inputs, memory=np.zeros((4, 3), np.float32))
    with pytest.raises(SimulationError, match="memory is float64"):
        package.act(*inputs, memory=np.zeros((4, 5)))
    broken = np.zeros((4, 5), np.float32)
    broken[2, 1] = np.nan
    with pytest.raises(NonFiniteError) as caught:
        package.act(*inputs, memory=broken)
    assert caught.value.where == {"environment": 2, "field": "memory"}


def test_weights_of_another_reader_are_refused_by_name(tmp_path):
    """A package whose manifest claims a memory that its weights do not have."""
    file = package_of(memory=0).save(tmp_path / "p") / "package.json"
    content = json.loads(file.read_text())
    content["network"]["memory"] = 5
    content["digest"] = content_digest(content)
    file.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"memory\.cell\.weight_hh"):
        PolicyPackage.load(tmp_path / "p")


# -- the player ----------------------------------------------------------------------------------------------------


def test_a_player_remembers_each_row_and_forgets_at_borders():
    package, pool = package_of(), KnowingPool(12, 2)
    player, state = PolicyPlayer(package), np.zeros((12, 5), np.float32)
    for _ in range(9):
        state[pool.last_action == ACTIONS] = 0.0
        expected = package.act(*seen(pool), memory=state)
        state = expected.memory
        decision = player.act(pool)
        assert decision.actions.tolist() == expected.action.tolist()
        assert decision.values.tobytes() == expected.value.tobytes()
        pool.step(decision.actions)


def test_a_player_that_is_reset_or_gets_another_pool_begins_anew():
    package = package_of()
    player, other = PolicyPlayer(package), PolicyPlayer(package)
    pool, again = KnowingPool(6, 2), KnowingPool(6, 2)
    again.last_action[:] = pool.last_action[:] = 1  # as if an episode went on
    player.act(pool)
    first = other.act(again)
    assert player.act(pool).values.tobytes() != first.values.tobytes()
    player.reset()
    assert player.act(pool).values.tobytes() == first.values.tobytes()
    player.act(KnowingPool(3, 2))
    assert player.act(pool).values.tobytes() == first.values.tobytes()


def test_remembering_what_someone_else_decided_is_what_acting_remembers():
    package, pool = package_of(), KnowingPool(6, 2)
    state = np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)
    *inputs, mask = seen(pool)
    assert package.remember(*inputs, state).tobytes() == package.act(*inputs, mask, memory=state).memory.tobytes()


# -- recorded episodes ---------------------------------------------------------------------------------------------


def along(network, records, state=None):
    """The states before each record of one episode, one after the other, and behind the last."""
    state, before = torch.zeros(1, 5) if state is None else state, []
    with torch.no_grad():
        for record in records:
            before.append(state[0])
            observation = torch.from_numpy(record["observation"].copy()[None])
            last, time = torch.tensor([int(record["last_action"])]), torch.tensor([float(record["time"])])
            state = network.encode(observation, last, time, state)[1]
    return torch.stack(before), state[0]


@pytest.mark.parametrize("threads", [1, 2])
def test_memory_along_recorded_episodes_is_that_of_one_who_watched_them(threads, monkeypatch):
    monkeypatch.setattr("agentpipe.learning.joint.recorded.EPISODES", 2)
    network, shards = knowing_network(), [tiny_shard(size=3, seed=seed) for seed in (0, 1)]
    source, record, length = np.array([0, 0, 0, 1, 1]), np.array([0, 8, 20, 4, 12]), np.array([4, 4, 2, 4, 4])
    with Workers(threads) as workers:
        before, behind = recorded_memory(network, shards, source, record, length, workers)
    place = 0
    for episode, (shard, first, steps) in enumerate(zip(source, record, length, strict=True)):
        states, last = along(network, shards[shard].records[first : first + steps])
        torch.testing.assert_close(before[place : place + steps], states)
        torch.testing.assert_close(behind[episode], last)
        place += steps


def test_a_drawn_step_is_judged_with_the_memory_of_its_whole_episode():
    network, shard = knowing_network(), tiny_shard(size=3)
    batch, figures = fill(MemorySet([shard]), Fixed([2, 9, 11]), network, 3, evaluate=9)
    assert figures["replay/episodes"] == 2
    for row, record in enumerate((2, 9, 11)):
        steps = shard.records[record // 4 * 4 :][:4]
        before, _ = along(network, steps)
        now = steps[record % 4]
        observation = torch.from_numpy(now["observation"].copy()[None])
        last, time = torch.tensor([int(now["last_action"])]), torch.tensor([float(now["time"])])
        with torch.no_grad():
            encoded, _ = network.encode(observation, last, time, before[record % 4 : record % 4 + 1])
            mask = torch.from_numpy(rec.unpack_masks(now["mask"], ACTIONS)).reshape(1, -1)
            logits, _ = network.heads(encoded, last, mask)
        torch.testing.assert_close(batch.encoded[row], encoded[0])
        expected = float(logits.log_softmax(1)[0, int(now["action"])])
        assert float(batch.log_probability[row]) == pytest.approx(expected, abs=1e-5)


def test_a_cut_episode_goes_on_with_the_memory_that_led_to_its_end():
    network, whole = knowing_network(), tiny_shard(rounds=1, size=1)
    steps = whole.records.copy()
    final = np.zeros(1, rec.final_dtype(WIDTH, ACTIONS))[0]
    final["observation"], final["time"], final["last_action"] = 0.7, 0.4, 10
    final["mask"] = rec.pack_masks(np.ones(ACTIONS, np.bool_))
    _, state = along(network, steps)
    observation = torch.from_numpy(final["observation"].copy()[None])
    inputs = (observation, torch.tensor([10]), torch.tensor([0.4]), torch.ones(1, ACTIONS, dtype=torch.bool))
    with torch.no_grad():
        value = float(network(*inputs, state[None])[2])
    batches = [
        fill(MemorySet([shard]), Fixed([3]), network, 1, evaluate=9)[0]
        for shard in (MemoryShard([steps], {0: final}), whole)
    ]
    ratio = min(1.0, np.exp(float(batches[0].log_probability[0]) - float(steps["log_probability"][3])))
    assert float(batches[0].returns[0] - batches[1].returns[0]) == pytest.approx(0.9 * ratio * value, abs=1e-5)


# -- near a champion, and labels -----------------------------------------------------------------------------------


def test_labels_cannot_teach_a_policy_with_a_memory_and_the_refusal_says_what_to_do():
    with pytest.raises(LearningError, match=r"do not hold what the policy remembered.*nightly retraining"):
        lessons(None, np.zeros(0, np.int64), knowing_network(), weak_negative=0.5, action_segment=np.zeros(ACTIONS))


def test_an_anchor_reads_what_the_learner_reads_or_refuses():
    champion, learner = package_of(), package_of(seed=1)
    learner.network.load_state_dict(champion.network.state_dict())
    made = Knowing()
    batch = made.collect().batch
    with Workers(1) as workers:
        anchor = Anchor(champion, learner.network, workers, len(batch.action))
        filled = anchor.fill(batch)
        logits, _ = champion.network.heads(batch.encoded, batch.last_action, batch.mask)
        torch.testing.assert_close(filled.anchor, logits.softmax(1) * batch.mask)
        with torch.no_grad():
            learner.network.memory.cell.bias_hh[0] += 1e-3
        with pytest.raises(LearningError, match=r"not the same.*memory\.cell\.bias_hh"):
            anchor.fill(batch)
        with pytest.raises(LearningError, match="another normalisation or other actions"):
            Anchor(champion, knowing_network(perception=0, memory=26), workers, 1)


def test_frozen_perception_and_memory_stay_and_the_memory_goes_on():
    """Nothing is learned, no truth is asked for, and what is collected is what training would collect."""
    frozen, free = Knowing(), Knowing()
    frozen.joint = JointTraining(frozen.network, frozen.pool, frozen.workers, frozen=True)
    frozen.rollout.joint = frozen.joint.record(6)
    frozen.rollout.memory = frozen.joint.memory
    for _ in range(2):
        assert torch.equal(frozen.collect().encoded, free.collect().encoded)
        assert frozen.joint.update(frozen.rollout) == {}
    assert (frozen.rollout.joint.truth == -1).all()
    assert torch.equal(frozen.joint.memory, free.joint.memory)


# -- whole runs ----------------------------------------------------------------------------------------------------


def run(directory, pool=None, **changes):
    network = dataclasses.replace(tiny_options().network, perception=8, memory=6)
    options = tiny_options(**{"network": network, "budget_steps": 2_048, **changes.pop("options", {})})
    changes.setdefault("action_names", ACTION_NAMES)
    return train(pool or KnowingPool(64), tiny_statistics(), options, directory=directory, **changes)


def weights_of(result):
    return {name: tensor.numpy().tobytes() for name, tensor in result.package.network.state_dict().items()}


def played(package, pool, steps=8):
    """Share of right decisions of the greedy policy, its memory kept from step to step."""
    player, right = PolicyPlayer(package), []
    for _ in range(steps):
        actions = player.act(pool).actions
        right.append(actions % CHOICES == pool.target)
        pool.step(actions)
    return float(np.mean(right))


@pytest.mark.parametrize(
    "network",
    [
        {"actor_head": "unit"},
        {"encoder": "mlp"},
        {"perception": 8, "memory": 8, "actor_head": "unit"},
    ],
)
def test_every_shape_of_network_learns_the_right_decisions(tmp_path, network):
    network = dataclasses.replace(tiny_options().network, **network)
    result = run(tmp_path, options={"network": network, "budget_steps": 10_240})
    assert played(result.package, TinyPool(128, 123)) > 0.9


class ShownOnce(TinyPool):
    """What is right in the middle of an episode was shown at its start, and is shown again at its end."""

    def _look(self):
        super()._look()
        hidden = np.flatnonzero((self.segment > 0) & (self.segment < 3))
        self.observation[hidden, self.target[hidden]] -= 1.0


def test_a_memory_knows_more_of_what_is_shown_no_more_than_the_observation_does(tmp_path):
    """An observation alone leaves a third by chance in two segments of four; foreseeing the end takes remembering."""
    shares = []
    for memory in (0, 32):
        network = dataclasses.replace(tiny_options().network, encoder="mlp", memory=memory)
        options = {"network": network, "budget_steps": 20_480}
        result = run(tmp_path / str(memory), pool=ShownOnce(64), options=options)
        shares.append(played(result.package, ShownOnce(512, 123)))
    assert shares[0] < (1 + 1 / 3 + 1 / 3 + 1) / 4 + 0.02
    assert shares[1] > shares[0] + 0.03


def test_a_run_with_perception_and_memory_resumes_bit_for_bit_on_any_number_of_threads(tmp_path):
    options = {"warm_up": tiny_warm_up(episodes=200), "checkpoint_every": 2}
    whole = run(tmp_path / "whole", expert=TinyExpert(), options={**options, "threads": 2})
    calls = iter([False, False, True])
    first = run(tmp_path / "parts", expert=TinyExpert(), options=options, stop=lambda: next(calls))
    assert first.reason == "interrupted"
    again = run(tmp_path / "parts", options=options, resume=first.checkpoint)
    assert again.updates == whole.updates == 4
    assert weights_of(again) == weights_of(whole)
    joint, other = (checkpoints.load(result.checkpoint).arrays["joint"] for result in (again, whole))
    assert {name: array.tobytes() for name, array in joint.items()} == {n: a.tobytes() for n, a in other.items()}
    assert len(joint) == 1 + 3 * (4 + 7)


def test_a_run_near_a_champion_leaves_its_perception_and_memory_as_they_are(tmp_path):
    parent = run(tmp_path / "parent").package
    near = run(tmp_path / "near", initial=parent, options={"kl_weight": 0.1, "budget_steps": 1_024}).package
    for name, tensor in near.network.state_dict().items():
        apart = name.startswith(("perception.", "memory."))
        assert torch.equal(tensor, parent.network.state_dict()[name]) == apart, name


def test_an_initial_policy_of_another_reader_is_refused(tmp_path):
    with pytest.raises(LearningError, match="another network"):
        run(tmp_path, initial=package_of())


def test_perception_in_environments_without_a_truth_is_refused_before_anything_is_trained(tmp_path):
    with pytest.raises(LearningError, match="perception has nothing to learn from here"):
        run(tmp_path, pool=TinyPool(8))
    assert not (tmp_path / "package").exists()


@pytest.mark.parametrize(
    ("field", "value"),
    [("encoder", "mlp"), ("actor_head", "unit"), ("perception", 9), ("memory", 0), ("activation", "relu")],
)
def test_a_checkpoint_or_an_initial_policy_of_another_encoder_is_refused_and_the_field_is_named(tmp_path, field, value):
    """Also where every shape is the same: an activation has none."""
    first = run(tmp_path, options={"budget_steps": 512})
    network = dataclasses.replace(tiny_options().network, **{"perception": 8, "memory": 6, field: value})
    other = {"network": network, "budget_steps": 512}
    with pytest.raises(CheckpointError, match=f"made under other training options: network.{field}"):
        run(tmp_path, options=other, resume=first.checkpoint)
    with pytest.raises(LearningError, match=f"another network: network.{field}"):
        run(tmp_path / "other", options=other, initial=first.package)
