"""Replayed samples: what each row of the batch holds, what an update may cost, and that it learns off-policy."""

import numpy as np
import pytest
import torch

from agentpipe.errors import LearningError
from agentpipe.experience.sampling.draw import Draw
from agentpipe.experience.sampling.prioritised import PrioritisedSampler
from agentpipe.experience.sampling.uniform import UniformSampler
from agentpipe.experience.store import records as rec
from agentpipe.learning.gradient.fused import SegmentedGradient
from agentpipe.learning.gradient.ppo import Prepared, update
from agentpipe.learning.gradient.rewards import RewardScaler
from agentpipe.learning.options import PpoOptions, ReplayOptions
from agentpipe.learning.policy.network import PolicyNetwork
from agentpipe.learning.samples.batch import Batch
from agentpipe.learning.samples.replay import Replay, replayed_rows
from agentpipe.learning.workers import Workers
from agentpipe_tests.learning.recorded import MemorySet, MemoryShard, right_actions, tiny_shard
from agentpipe_tests.learning.tiny import ACTIONS, CHOICES, WIDTH, tiny_options

GAMMA = 0.9


class Fixed:
    """Draws what it is told."""

    name = "fixed"

    def __init__(self, ids, weights=None):
        self.ids = np.array(ids, np.int64)
        self.weights = np.ones(len(ids), np.float32) if weights is None else np.array(weights, np.float32)

    def draw(self, count):
        return Draw(self.ids[:count], self.weights[:count])


class Learning(Fixed):
    def update(self, ids, errors):
        self.told = dict(zip(ids.tolist(), errors.tolist(), strict=True))


def network(seed=0):
    net = PolicyNetwork(WIDTH, ACTIONS, tiny_options().network)
    net.initialise(torch.Generator().manual_seed(seed))
    return net


def prepared(rows, net, live=0, centre=0.0, scale=1.0):
    batch = Batch.allocate(live + rows, net.encoded_size, ACTIONS)
    return Prepared(batch, {}, np.full(4, centre), np.full(4, scale))


def fill(samples, sampler, net, rows, live=0, threads=1, number=1, **options):
    scale = {name: options.pop(name) for name in ("centre", "scale") if name in options}
    with Workers(threads) as workers:
        replay = Replay(samples, sampler, ReplayOptions(**options), net, workers)
        return replay.fill(prepared(rows, net, live, **scale), live, RewardScaler(1, GAMMA), GAMMA, number=number)


def judged(net, records):
    """Value and log-probability of every record under the network, by torch alone."""
    observation, time = (torch.from_numpy(records[name].copy()) for name in ("observation", "time"))
    last, mask = torch.from_numpy(records["last_action"].astype(np.int64)), rec.unpack_masks(records["mask"], ACTIONS)
    with torch.no_grad():
        logits, value = net.heads(net.encode(observation, last, time)[0], last, torch.from_numpy(mask))
    log_probability = logits.log_softmax(1)[torch.arange(len(records)), torch.from_numpy(records["action"].astype(int))]
    return value.numpy().astype(np.float64), log_probability.numpy().astype(np.float64)


def by_definition(net, episode, final_value):
    """v_s, A_s and rho_s of one episode, from the recursion in float64; rewards are not scaled (deviation 1)."""
    value, log_probability = judged(net, episode)
    ratio = np.exp(log_probability - episode["log_probability"])
    rho, target, advantage = np.minimum(1, ratio), np.zeros(len(value)), np.zeros(len(value))
    v_next = target_next = final_value
    for s in reversed(range(len(value))):
        advantage[s] = episode["reward"][s] + GAMMA * target_next - value[s]
        delta = rho[s] * (episode["reward"][s] + GAMMA * v_next - value[s])
        target[s] = value[s] + delta + GAMMA * rho[s] * (target_next - v_next)
        v_next, target_next = value[s], target[s]
    return target, advantage, rho, log_probability


def spread(shard, seed=3):
    """Behaviour probabilities that differ from step to step, so that ratios lie on both sides of one."""
    shard.records["log_probability"] = np.log(np.random.default_rng(seed).uniform(0.1, 0.9, len(shard.records)))
    return shard


def test_moments_of_a_draw_are_those_of_its_advantages_by_segment():
    """Against the definition: neither the ratio rho nor the clamp of what a row holds is in them."""
    shard, net = spread(tiny_shard(rounds=2, size=30)), network()
    shard.records["reward"] *= 20
    with Workers(1) as workers:
        replay = Replay(MemorySet([shard]), Fixed(range(240)), ReplayOptions(evaluate=9), net, workers)
        batch = Batch.allocate(240, net.encoded_size, ACTIONS)
        centre, scale = replay.moments(batch, RewardScaler(1, GAMMA, clamp=1e9), GAMMA, 4)
    found = [by_definition(net, shard.records[at : at + 4], 0.0)[1] for at in range(0, 240, 4)]
    np.testing.assert_allclose(centre, np.mean(found, axis=0), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(scale, 1 / np.std(found, axis=0), rtol=1e-4)
    assert np.std(found) > 5


def test_a_quarter_of_the_batch():
    assert replayed_rows(112_000, 0.25) == 37_333
    assert replayed_rows(300, 0.25) == 100
    assert replayed_rows(300, 0.0) == 0


@pytest.mark.parametrize("threads", [1, 2])
def test_rows_hold_what_v_trace_says_of_the_drawn_steps(threads):
    """Against torch and the definition: two shards, a step drawn twice, an episode drawn in the middle."""
    shards = [spread(tiny_shard(size=3, seed=seed)) for seed in (0, 1)]
    samples, net = MemorySet(shards), network()
    ids = [1, 30, 25, 1, 27, 11]
    weights = [0.5, 1.0, 2.0, 0.5, 1.5, 0.25]
    batch, figures = fill(
        samples, Fixed(ids, weights), net, 6, live=2, threads=threads, evaluate=9, centre=0.1, scale=2.0
    )
    assert len(batch.action) == 8
    assert (batch.weight[:2] == 1).all()
    expected = []
    for chosen, weight in sorted(zip(ids, weights, strict=True)):
        shard, record = shards[chosen // 24], chosen % 24
        episode, step = divmod(record, 4)
        steps = shard.records[4 * episode : 4 * episode + 4]
        target, advantage, rho, log_probability = by_definition(net, steps, 0.0)
        scaled = rho[step] * (advantage[step] - 0.1) * 2.0
        expected.append((steps[step], log_probability[step], scaled, target[step], weight))
    for row, (record, log_probability, advantage, target, weight) in enumerate(expected, start=2):
        assert int(batch.action[row]) == record["action"]
        assert int(batch.last_action[row]) == record["last_action"]
        assert int(batch.segment[row]) == record["segment"]
        assert batch.mask[row].tolist() == rec.unpack_masks(record["mask"], ACTIONS).tolist()
        seen = torch.from_numpy(record["observation"].copy())
        encoded, _ = net.encode(seen, torch.tensor(int(record["last_action"])), torch.tensor(record["time"]))
        torch.testing.assert_close(batch.encoded[row], encoded)
        assert float(batch.log_probability[row]) == pytest.approx(log_probability, abs=1e-5)
        assert float(batch.advantage[row]) == pytest.approx(advantage, abs=1e-5)
        assert float(batch.returns[row]) == pytest.approx(target, abs=1e-5)
        assert float(batch.weight[row]) == weight
    assert figures["samples/replayed"] == 6
    assert (figures["samples/replay_first"], figures["samples/replay_last"]) == (1, 30)
    assert figures["share/live"] == pytest.approx(0.25)
    assert figures["share/fixed"] == pytest.approx(0.75)
    assert figures["replay/episodes"] == 4


def test_batch_does_not_depend_on_the_number_of_threads():
    samples, net = MemorySet([spread(tiny_shard(rounds=3, size=400, seed=seed)) for seed in (0, 1)]), network()
    batches = [
        fill(samples, UniformSampler(samples.size, seed=1), net, 4_000, threads=threads)[0] for threads in (1, 2, 3)
    ]
    for name in Batch.__dataclass_fields__:
        first, *others = (getattr(batch, name) for batch in batches)
        assert all(torch.equal(first, other) for other in others)


def test_no_room_no_replay():
    batch, figures = fill(MemorySet([tiny_shard(size=2)]), Fixed([0]), network(), 0, live=5)
    assert len(batch.action) == 5
    assert figures == {}


def test_ratio_starts_at_one_and_the_gradient_is_rho_times_advantage():
    """The clipped surrogate's loss at the start is -rho A, whatever the clip range: nothing is clipped."""
    samples, net = MemorySet([spread(tiny_shard(size=8))]), network()
    batch, _ = fill(samples, Fixed(range(64)), net, 64, evaluate=9)
    sums = SegmentedGradient(net, (1e-4,) * 4, 0.5, Workers(1))(batch, torch.arange(64), 0.0)
    assert sums[0] == pytest.approx(-float((batch.weight * batch.advantage).sum()), rel=1e-4)
    assert sums[10:14].tolist() == [0, 0, 0, 0]


def test_cut_episode_goes_on_with_the_value_of_its_final_observation_a_terminated_one_does_not():
    net, whole = network(), tiny_shard(rounds=1, size=1)
    steps = whole.records.copy()
    final = np.zeros(1, rec.final_dtype(WIDTH, ACTIONS))[0]
    final["observation"], final["time"], final["last_action"] = 0.7, 0.4, 10
    final["mask"] = rec.pack_masks(np.ones(ACTIONS, np.bool_))
    ahead = judged_final(net, final)
    for shard, expected in ((whole, 0.0), (MemoryShard([steps], {0: final}), ahead)):
        batch, _ = fill(MemorySet([shard]), Fixed([0, 1, 2, 3]), net, 4, evaluate=9)
        target = by_definition(net, shard.records, expected)[0]
        np.testing.assert_allclose(batch.returns.numpy(), target, atol=1e-5)
    assert abs(ahead) > 1e-3


def judged_final(net, final):
    last = torch.tensor([int(final["last_action"])])
    encoded, _ = net.encode(torch.from_numpy(final["observation"].copy()[None]), last, torch.tensor([final["time"]]))
    mask = torch.ones(1, ACTIONS, dtype=torch.bool)
    return net.heads(encoded, last, mask)[1].item()


def test_advantages_are_clamped():
    shard = tiny_shard(size=4)
    shard.records["reward"] *= 1e3
    batch, _ = fill(MemorySet([shard]), Fixed(range(32)), network(), 32, evaluate=9, scale=1e3, advantage_clamp=2.5)
    assert float(batch.advantage.abs().max()) == 2.5


def test_rewards_have_the_live_scale_and_do_not_move_it():
    scaler = RewardScaler(2, 0.5)
    scaler(np.array([[2.0, 0.0], [2.0, 4.0]], np.float32), np.array([[False, True], [True, False]]))
    before = scaler.state()["moments"].tolist(), scaler.deviation
    assert scaler.scale(np.array([1.0, -100.0], np.float32)).tolist() == pytest.approx([1 / before[1], -5.0])
    assert (scaler.state()["moments"].tolist(), scaler.deviation) == before


def test_steps_to_evaluate_are_bounded_and_what_is_left_out_is_told():
    samples = MemorySet([tiny_shard(size=64)])
    sampler = UniformSampler(samples.size, seed=1)
    batch, figures = fill(samples, sampler, network(), 100, live=300, evaluate=1.0)
    assert figures["replay/evaluated"] <= 100
    assert figures["samples/replayed"] + figures["replay/left_out"] == 100
    assert figures["replay/left_out"] > 20
    assert len(batch.action) == 300 + figures["samples/replayed"]
    assert figures["share/live"] == pytest.approx(300 / len(batch.action))


def test_what_the_limit_leaves_out_is_not_always_the_same_part_of_the_set():
    """The prioritised sampler draws in order: leaving out the last ones would never replay the newest episodes."""
    samples = MemorySet([tiny_shard(size=64)])
    lows, highs = [], []
    for number in range(8):
        _, figures = fill(samples, Fixed(range(samples.size)), network(), samples.size, evaluate=0.25, number=number)
        lows.append(figures["samples/replay_first"])
        highs.append(figures["samples/replay_last"])
    assert min(lows) < samples.size * 0.1
    assert max(highs) > samples.size * 0.9


def test_one_episode_is_used_however_small_the_limit():
    _, figures = fill(MemorySet([tiny_shard(size=8)]), Fixed([5, 40]), network(), 2, evaluate=0.01)
    assert figures["replay/episodes"] == 1
    assert figures["samples/replayed"] == 1


def test_sampler_is_told_how_wrong_the_critic_was():
    samples, net = MemorySet([spread(tiny_shard(size=2))]), network()
    sampler = Learning([0, 5, 5, 9])
    batch, _ = fill(samples, sampler, net, 4, evaluate=9)
    value = judged(net, samples.shards[0].records)[0]
    for row, chosen in enumerate([0, 5, 5, 9]):
        assert sampler.told[chosen] == pytest.approx(abs(float(batch.returns[row]) - value[chosen]), abs=1e-5)


def test_records_of_another_shape_are_refused():
    shard = tiny_shard(size=2)
    shard.manifest["action_count"] = 7
    with pytest.raises(LearningError, match="the network has 12") as caught:
        Replay(MemorySet([shard]), Fixed([0]), ReplayOptions(), network(), Workers(1))
    assert caught.value.where["field"] == "action_count"


@pytest.mark.parametrize("kind", [UniformSampler, PrioritisedSampler])
def test_state_brings_back_the_same_draws(kind):
    samples, net = MemorySet([tiny_shard(size=32)]), network()

    def made():
        return Replay(samples, kind(samples.size, seed=4), ReplayOptions(evaluate=9), net, Workers(1))

    def draws(replay, count):
        return [
            replay.fill(prepared(20, net), 0, RewardScaler(1, GAMMA), GAMMA, number=number)[1]["samples/replay_digest"]
            for number in range(count)
        ]

    whole, part, resumed = made(), made(), made()
    expected = draws(whole, 6)
    assert draws(part, 3) == expected[:3]
    resumed.restore(*part.state())
    assert draws(resumed, 3) == expected[3:]
    assert len(set(expected)) == 6


def test_state_of_other_trajectories_is_refused():
    net = network()
    first, second = (
        Replay(
            MemorySet([tiny_shard(size=2, digest=name)]), UniformSampler(16, seed=1), ReplayOptions(), net, Workers(1)
        )
        for name in "ab"
    )
    with pytest.raises(LearningError, match="other recorded trajectories"):
        second.restore(*first.state())


@pytest.mark.parametrize(("shuffled", "low", "high"), [(False, 0.9, 1.0), (True, 0.0, 0.6)])
def test_learns_from_replay_alone_what_a_uniform_player_recorded(shuffled, low, high):
    """Off-policy: not one live step; a third of the recorded actions is right. Negative control: rewards that were
    dealt to the wrong environments teach nothing."""
    shard, net = tiny_shard(rounds=4, size=256, shuffled=shuffled), network()
    samples = MemorySet([shard])
    sampler, options = UniformSampler(samples.size, seed=1), PpoOptions(epochs=2, minibatch=256, clip=(0.2,) * 4)
    optimiser, order = torch.optim.Adam(net.parameters(), lr=3e-3), torch.Generator().manual_seed(0)
    with Workers(1) as workers:
        replay = Replay(samples, sampler, ReplayOptions(evaluate=9), net, workers)
        gradient = SegmentedGradient(net, options.clip, 0.5, workers)
        for number in range(40):
            batch, _ = replay.fill(prepared(512, net), 0, RewardScaler(1, GAMMA), GAMMA, number=number)
            update(net, optimiser, gradient, batch, options, order, entropy_weight=0.0)
    fresh = tiny_shard(rounds=1, size=512, seed=77)
    fresh.records["action"] = right_actions(fresh)
    clear = fresh.records["observation"][:, :CHOICES].max(axis=1) > 0.9
    right = np.exp(judged(net, fresh.records)[1])[clear].mean()
    assert low < right < high
