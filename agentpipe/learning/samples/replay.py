"""Recorded steps in each update: drawn by a sampler, judged by V-trace, put behind the live ones.

The recorded part of a batch is m = share / (1 - share) x live steps. A draw names steps; V-trace needs what follows
them, so the current network goes over each drawn episode from its first drawn step on, once however often the episode
was drawn. A drawn step then becomes a row of the batch with

    log_probability = log pi(a|s) of the current policy, so that the ratio of the clipped surrogate starts at 1
    advantage       = clamp(rho_s (A_s - mean) / deviation)
    returns         = v_s
    weight          = the sampler's importance weight

rho_s, A_s and v_s as in :mod:`~agentpipe.learning.gradient.vtrace`; mean and deviation are those of the live advantages
of the step's segment: both parts of the batch have one zero and one unit. At the start of the update the gradient of
such a row is rho_s (A_s - mean) / deviation * grad log pi, as in Espeholt et al. (2018, section 4.1). Rewards get the
scale of the live ones and their clamp, without moving that scale.

With a memory an episode is gone over from its first step, drawn or not: the state at a drawn step is what the current
memory makes of all that came before.

What an update costs is bounded: of the drawn episodes, in random order, as many are used as ``evaluate`` x m evaluated
steps allow; the rest of that draw is left out (long episodes a little more often: the one that would cross the limit is
not begun), and the log tells the share that came of it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agentpipe.errors import LearningError
from agentpipe.learning.gradient.advantages import segment_scale
from agentpipe.learning.gradient.vtrace import Targets, vtrace
from agentpipe.learning.joint.recorded import recorded_memory
from agentpipe.learning.policy.compiled import CompiledPolicy
from agentpipe.storage import digest_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agentpipe.experience.sampling.draw import Sampler
    from agentpipe.experience.sampling.sets import SampleSet
    from agentpipe.experience.store.shard import Shard
    from agentpipe.learning.gradient.ppo import Prepared
    from agentpipe.learning.gradient.rewards import RewardScaler
    from agentpipe.learning.options import ReplayOptions
    from agentpipe.learning.policy.network import PolicyNetwork
    from agentpipe.learning.samples.batch import Batch
    from agentpipe.learning.workers import Workers

BLOCK = 1_024
"""recorded steps that go through the network together: their activations stay in the cache"""

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]


def replayed_rows(live: int, share: float) -> int:
    """Rows that make up ``share`` of a batch beside ``live`` ones."""
    return round(live * share / (1.0 - share))


def open_replay(
    shards: Sequence[Shard], options: ReplayOptions, network: PolicyNetwork, workers: Workers, seed: int
) -> Replay | None:
    """The recorded part of a run's updates; ``None`` where nothing is recorded or nothing of it is asked for.

    Raises:
        SamplingError, LearningError: the shards are of different shapes, or of another shape than the network.
    """
    from agentpipe.experience.sampling.sets import SampleSet

    if not shards or options.share == 0:
        return None
    samples = SampleSet(shards, fresh=options.fresh)
    if samples.size == 0:
        return None
    return Replay(samples, _sampler(samples, options, seed), options, network, workers)


def _sampler(samples: SampleSet, options: ReplayOptions, seed: int) -> Sampler:
    from agentpipe.experience.sampling.causal import CausalSampler
    from agentpipe.experience.sampling.prioritised import PrioritisedSampler
    from agentpipe.experience.sampling.uniform import UniformSampler

    if options.sampler == "causal":
        alpha, beta = options.causal_alpha, options.causal_beta
        return CausalSampler(samples.influence, seed=seed, floor=options.floor, alpha=alpha, beta=beta)
    if options.sampler == "prioritised":
        return PrioritisedSampler(samples.size, seed=seed, alpha=options.alpha, beta=options.prioritised_beta)
    return UniformSampler(samples.size, seed=seed)


class Replay:
    """The recorded part of every update of one run.

    Args:
        samples: the recorded steps; of the shape of the network's input.
        sampler: over ``samples``.
        options: share, limits, clips.
        network: the one that learns.
        workers: share the evaluation; the result does not depend on how many there are.

    Raises:
        LearningError: the records are of another observation or action space than the network.
    """

    def __init__(
        self,
        samples: SampleSet,
        sampler: Sampler,
        options: ReplayOptions,
        network: PolicyNetwork,
        workers: Workers,
    ) -> None:
        self.samples, self.sampler, self.options = samples, sampler, options
        self.network, self.workers = network, workers
        for shard in samples.shards:
            for field, size in (("observation_size", network.observation_size), ("action_count", network.action_count)):
                if int(shard.manifest[field]) != size:
                    text = f"recorded with {field} {shard.manifest[field]}, the network has {size}"
                    remedy = "replay what was recorded in the same kind of environment"
                    raise LearningError(text, file=shard.path, field=field, remedy=remedy)

    def fill(
        self, prepared: Prepared, live: int, scaler: RewardScaler, discount: float, *, number: int
    ) -> tuple[Batch, dict[str, Any]]:
        """Draws, and writes the drawn steps behind the ``live`` rows of the batch.

        Args:
            prepared: batch with room behind its live rows, and the scale of the live advantages.
            live: rows that are there.
            scaler: of rewards; has seen the live ones.
            discount: gamma.
            number: of the update; decides what is left out where the limit binds.

        Returns:
            The batch cut to the rows that are filled, and figures for the log.

        Raises:
            CorruptError: a shard was cut short while it was used.
        """
        if len(prepared.batch.weight) == live:
            return prepared.batch, {}
        batch, chosen, seen, targets = self._draw(prepared.batch, live, scaler, discount, number)
        at, segment = chosen.position, seen.segment[chosen.position]
        scaled = (targets.advantage[at] - prepared.centre[segment]) * prepared.scale[segment] * targets.rho[at]
        limit = self.options.advantage_clamp
        batch.log_probability[live:] = torch.from_numpy(seen.log_probability[at])
        batch.advantage[live:] = torch.from_numpy(np.clip(scaled, -limit, limit))
        batch.returns[live:] = torch.from_numpy(targets.value[at])
        batch.segment[live:] = torch.from_numpy(segment)
        batch.weight[live:] = torch.from_numpy(chosen.weights)
        error = np.abs(targets.value - seen.value)[at]
        learn = getattr(self.sampler, "update", None)
        if learn is not None:
            learn(chosen.ids, error)
        return batch, self._figures(chosen, targets, error, live)

    def moments(self, batch: Batch, scaler: RewardScaler, discount: float, segments: int) -> tuple[Doubles, Doubles]:
        """Mean of the drawn steps' advantages in each segment f64[S], and one over their deviation f64[S].

        For whoever has no live samples to take zero and unit from; a draw as large as ``batch`` is spent on it.
        """
        _, chosen, seen, targets = self._draw(batch, 0, scaler, discount, 0)
        at = chosen.position
        return segment_scale(targets.advantage[at], seen.segment[at].astype(np.int8), segments)

    def _draw(
        self, batch: Batch, live: int, scaler: RewardScaler, discount: float, number: int
    ) -> tuple[Batch, _Chosen, _Seen, Targets]:
        """Draws as many steps as there is room for behind ``live``, and judges them; fills the inputs of their rows."""
        room = len(batch.weight) - live
        self.samples.still_whole()
        draw = self.sampler.draw(room)
        chosen = _Chosen.of(
            self.samples,
            draw.ids,
            draw.weights,
            limit=int(self.options.evaluate * room),
            number=number,
            whole=self.network.memory is not None,
        )
        batch = batch.first(live + len(chosen.ids))
        before, behind = self._memory(chosen)
        policy = CompiledPolicy(self.network, self.workers.threads)
        seen = self._evaluate(policy, chosen, batch, live, before)
        targets = vtrace(
            scaler.scale(seen.reward),
            seen.value,
            seen.log_probability - seen.behaviour,
            chosen.first,
            chosen.length,
            self._final_values(policy, chosen, behind),
            discount,
            rho_bar=self.options.rho_bar,
            c_bar=self.options.c_bar,
        )
        return batch, chosen, seen, targets

    def _figures(self, chosen: _Chosen, targets: Targets, error: Floats, live: int) -> dict[str, Any]:
        rows = len(chosen.ids)
        return {
            "samples/replayed": rows,
            "samples/replay_first": int(chosen.ids.min()),
            "samples/replay_last": int(chosen.ids.max()),
            "samples/replay_digest": digest_bytes(chosen.ids.astype("<i8").tobytes())[:16],
            "share/live": live / (live + rows),
            f"share/{self.sampler.name}": rows / (live + rows),
            "replay/episodes": len(chosen.first),
            "replay/evaluated": len(targets.rho),
            "replay/left_out": chosen.left_out,
            "replay/rho_mean": float(targets.rho[chosen.position].mean(dtype=np.float64)),
            "replay/rho_clipped_share": targets.clipped / len(targets.rho),
            "replay/value_error": float(error.mean(dtype=np.float64)),
            "replay/weight_mean": float(chosen.weights.mean(dtype=np.float64)),
        }

    def _memory(self, chosen: _Chosen) -> tuple[Tensor, Tensor]:
        """The memory before each evaluated step f32[M, units] and behind each episode f32[n, units]."""
        if self.network.memory is None:
            return torch.zeros(len(chosen.record), 0), torch.zeros(len(chosen.first), 0)
        first = chosen.record[chosen.first]
        shards = self.samples.shards
        return recorded_memory(self.network, shards, chosen.source, first, chosen.length, self.workers)

    def _evaluate(self, policy: CompiledPolicy, chosen: _Chosen, batch: Batch, live: int, before: Tensor) -> _Seen:
        """What the network says of the chosen steps; fills the inputs of the batch's rows on the way."""
        network, count = self.network, len(chosen.record)
        seen = _Seen(count)
        inside = np.searchsorted(chosen.position, [low for _, low, _ in chosen.blocks] + [count])

        @torch.inference_mode()  # holds for one thread only
        def block(worker: int, piece: int) -> None:
            source, low, high = chosen.blocks[piece]
            shard, at = self.samples.shards[source], slice(low, high)
            records = np.asarray(shard.records)[chosen.record[at]]
            last_action, action = (
                torch.from_numpy(records[name].astype(np.int64)) for name in ("last_action", "action")
            )
            mask = torch.from_numpy(shard.unpack_masks(records["mask"]))
            inputs = (_tensor(records["observation"]), last_action, _tensor(records["time"]), before[at])
            encoded = torch.empty(len(records), network.encoded_size)
            policy.encode(worker, *inputs, encoded)
            seen.log_probability[at], seen.value[at] = policy.judge(worker, (encoded, last_action, mask), action)
            seen.behaviour[at], seen.reward[at] = records["log_probability"], records["reward"]
            seen.segment[at] = records["segment"]
            rows = slice(live + int(inside[piece]), live + int(inside[piece + 1]))
            picked = torch.from_numpy(chosen.position[inside[piece] : inside[piece + 1]] - low)
            for source_rows, target in (
                (encoded, batch.encoded),
                (last_action, batch.last_action),
                (mask, batch.mask),
                (action, batch.action),
            ):
                torch.index_select(source_rows, 0, picked, out=target[rows])

        self.workers.run(block, len(chosen.blocks))
        return seen

    def _final_values(self, policy: CompiledPolicy, chosen: _Chosen, behind: Tensor) -> Floats:
        """f32[n]: V of the final observation of each episode that was cut, 0 for the others."""
        values = np.zeros(len(chosen.first), np.float32)
        for source in np.unique(chosen.source):
            shard = self.samples.shards[int(source)]
            episodes = np.flatnonzero(chosen.source == source)
            final = np.asarray(shard.episodes["final"])[chosen.row[episodes]]
            cut = final >= 0
            if not cut.any():
                continue
            records = np.asarray(shard.finals)[final[cut]]
            with torch.inference_mode():
                last_action = torch.from_numpy(records["last_action"].astype(np.int64))
                state = behind[torch.from_numpy(episodes[cut])]
                inputs = (_tensor(records["observation"]), last_action, _tensor(records["time"]), state)
                encoded = torch.empty(len(records), self.network.encoded_size)
                policy.encode(0, *inputs, encoded)
                mask = torch.from_numpy(shard.unpack_masks(records["mask"]))
                values[episodes[cut]] = policy.values(0, (encoded, last_action, mask))
        return values

    # -- checkpoints -------------------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
        """What the next draw depends on: JSON values (with the digests of the shards), and arrays."""
        state = self.sampler.state()
        arrays = {name: value for name, value in state.items() if isinstance(value, np.ndarray)}
        values = {name: value for name, value in state.items() if name not in arrays}
        return {"shards": [shard.digest for shard in self.samples.shards], "sampler": values}, arrays

    def restore(self, content: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """The inverse of :meth:`state`.

        Raises:
            LearningError: the state is of other shards.
            SamplingError: of another sampler.
        """
        mine = [shard.digest for shard in self.samples.shards]
        if content.get("shards") != mine:
            remedy = "resume with the recorded trajectories that it was made with, or start anew"
            raise LearningError("made with other recorded trajectories", field="replay", remedy=remedy)
        self.sampler.restore({**content["sampler"], **arrays})


@dataclass(frozen=True)
class _Chosen:
    """The drawn steps that are used, and the n pieces of episodes (M steps together) that have to be evaluated."""

    ids: Integers
    """[rows], by their place among the evaluated steps"""
    weights: Floats
    """[rows]"""
    position: Integers
    """[rows], place among the evaluated steps, ascending"""
    source: Integers
    """[n], which shard"""
    row: Integers
    """[n], row in its episode table"""
    first: Integers
    """[n], place of the first evaluated step"""
    length: Integers
    """[n], evaluated steps"""
    record: Integers
    """[M], record in its shard"""
    blocks: list[tuple[int, int, int]]
    """shard, first place, place behind the last: pieces for the network, each of one shard"""
    left_out: int
    """drawn steps beyond the limit"""

    @classmethod
    def of(
        cls, samples: SampleSet, ids: Integers, weights: Floats, *, limit: int, number: int, whole: bool = False
    ) -> _Chosen:
        """Chooses from a draw; at least one episode, however small the limit; ``whole``: from its first step on."""
        source, record = (array.astype(np.int64) for array in samples.locate(ids))
        row = samples.episodes(ids)[1].astype(np.int64)
        key, appeared, episode = np.unique((source << 40) + row, return_index=True, return_inverse=True)
        start = np.full(len(key), np.iinfo(np.int64).max)
        np.minimum.at(start, episode, record)
        starts, ends = _bounds(samples, source[appeared], row[appeared])
        if whole:
            start = starts
        length = ends - start
        order = np.random.default_rng(number).permutation(len(key))
        kept = np.zeros(len(key), np.bool_)
        kept[order] = np.cumsum(length[order]) <= limit
        kept[order[0]] = True
        used = kept[episode]
        # From here on only what is kept, numbered anew.
        episode = (np.cumsum(kept) - 1)[episode[used]]
        appeared, start, length = appeared[kept], start[kept], length[kept]
        first = np.cumsum(length) - length
        position = first[episode] + record[used] - start[episode]
        by_position = np.argsort(position, kind="stable")
        piece = np.repeat(np.arange(len(first)), length)
        return cls(
            ids=ids[used][by_position],
            weights=weights[used][by_position],
            position=position[by_position],
            source=source[appeared],
            row=row[appeared],
            first=first,
            length=length,
            record=np.arange(len(piece)) + (start - first)[piece],
            blocks=_blocks(source[appeared][piece]),
            left_out=int(len(ids) - used.sum()),
        )


class _Seen:
    """Of each evaluated step: value and log-probability under the current network, and what the record says."""

    def __init__(self, count: int) -> None:
        self.value, self.log_probability, self.behaviour, self.reward = np.zeros((4, count), np.float32)
        self.segment = np.zeros(count, np.int8)


def _bounds(samples: SampleSet, source: Integers, row: Integers) -> tuple[Integers, Integers]:
    """First record of each episode, and the one behind its last."""
    first, behind = np.zeros((2, len(row)), np.int64)
    for number in np.unique(source):
        mine = source == number
        episodes = np.asarray(samples.shards[int(number)].episodes)[row[mine]]
        first[mine] = episodes["first"].astype(np.int64)
        behind[mine] = first[mine] + episodes["steps"]
    return first, behind


def _blocks(source: Integers) -> list[tuple[int, int, int]]:
    """Cuts the places 0 to M into blocks that do not cross shards; ``source`` i64[M] ascends."""
    edges = [0, *(np.flatnonzero(np.diff(source)) + 1), len(source)]
    return [
        (int(source[low]), at, min(at + BLOCK, int(high)))
        for low, high in itertools.pairwise(edges)
        for at in range(int(low), int(high), BLOCK)
    ]


def _tensor(column: npt.NDArray[Any]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(column))
