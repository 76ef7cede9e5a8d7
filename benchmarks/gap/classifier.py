"""What labelled examples teach a network that names machine and cause at the policy's moments.

Three arms. *Plain*: two layers over the observation, as the policy and the diagnoser have them. *Shared*: one network
for every machine, which sees the machine, the sums over the machines that it feeds and that feed it, and the line as a
whole; then one exchange between neighbours. *Shared, remembering*: the same with what
:mod:`benchmarks.gap.remembered` says of every channel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from agentpipe.environments.geometry import downstream_matrices
from agentpipe.environments.layout import (
    A_MACHINE,
    A_MODE,
    A_REJECT,
    CHANNELS,
    FALSE_ALARM,
    MACHINES,
    MODES,
    block_start,
)
from agentpipe.environments.state import ORDER_MACHINE, ORDER_MODE, ORDER_VERIFIED
from benchmarks.gap.log import ReceivedLog
from benchmarks.gap.players import declarations
from benchmarks.gap.remembered import remembered

if TYPE_CHECKING:
    from agentpipe.environments.players import Actions
    from agentpipe.environments.pool import LinePool
    from benchmarks.gap.players import Policy

    Floats = npt.NDArray[np.float32]
    Bools = npt.NDArray[np.bool_]
    Rows = npt.NDArray[np.int64]

PLAIN, SHARED, REMEMBERING = ARMS = ("plain", "shared", "shared, remembering")
OBSERVED: Final = block_start("segment")
O_MEAN, O_AGE, O_COUNT = block_start("mean"), block_start("age"), block_start("count")
O_PRESENT, O_TOPOLOGY, O_LINK = block_start("present"), block_start("topology"), block_start("link")
CLASSES: Final = MACHINES * len(MODES)
PLAIN_WIDTH, SHARED_WIDTH, BATCH, LIMIT = 256, 128, 1_024, 8.0
NEVER: Final = -30.0
"""score of what cannot be"""


class Examples(NamedTuple):
    """n moments at which the policy declared a machine or a false alarm for the first time in an episode."""

    observation: Floats
    """f32[n, OBSERVED]"""
    remembered: Floats
    """f32[n, 8, NUMBERS]"""
    label: Rows
    """i64[n]: true machine * modes + true mode; machine 0 for a false alarm"""
    environment: Rows
    """i64[n]"""


def collect(policy: Policy, pool: LinePool, episodes: int) -> Examples:
    """The first ``episodes`` episodes of each environment, up to the policy's first declaration."""
    log, done = ReceivedLog(pool.size), np.zeros(pool.size, np.int64)
    parts: list[tuple[npt.NDArray[np.generic], ...]] = []
    pool.reset()
    policy.reset()
    while (done < episodes).any():
        log.follow(pool)
        policy.look(pool)
        stops = (pool.segment == 0) & (policy.actions >= A_MACHINE)
        rows = np.flatnonzero(stops & (done < episodes))
        truth = pool.hidden()
        machine = np.where(truth.mode == FALSE_ALARM, 0, truth.machine)[rows].astype(np.int64)
        seen = pool.observation[rows, :OBSERVED]
        parts.append((seen, remembered(log, rows), machine * len(MODES) + truth.mode[rows], rows))
        done[rows] += 1
        ends = np.where(pool.segment == 1, A_REJECT, policy.actions)
        pool.step(np.where(stops, A_MODE + FALSE_ALARM, ends).astype(np.int64))  # the shortest way to the next episode
    return Examples(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def chosen_of(examples: Examples, rows: Rows) -> Examples:
    """The ``rows`` i64[k] of ``examples``."""
    return Examples(
        examples.observation[rows], examples.remembered[rows], examples.label[rows], examples.environment[rows]
    )


class Inputs(NamedTuple):
    """What a network reads of n moments."""

    machines: torch.Tensor
    """f32[n, 8, d] of each machine, or f32[n, d] for the plain network"""
    feeds: torch.Tensor
    """f32[n, 8, 8] coupling of each machine to those that it feeds"""
    present: torch.Tensor
    """f32[n, 8, 1]"""


def machine_features(observation: Floats, extra: Floats | None) -> tuple[Floats, Floats, Floats]:
    """What the shared network reads.

    Args:
        observation: f32[n, OBSERVED].
        extra: what is remembered f32[n, 8, NUMBERS], or None.

    Returns:
        Features f32[n, 8, d], couplings f32[n, 8, 8] and presence f32[n, 8, 1].
    """
    n = len(observation)
    present = observation[:, O_PRESENT : O_PRESENT + MACHINES, None]
    feeds = downstream_matrices()[observation[:, O_TOPOLOGY:O_LINK].argmax(axis=1)]
    last, means = (observation[:, at : at + MACHINES * CHANNELS].reshape(n, MACHINES, CHANNELS) for at in (0, O_MEAN))
    own = [means, last, *(observation[:, at : at + MACHINES, None] for at in (O_AGE, O_COUNT))]
    core = means
    if extra is not None:
        own.append(extra)
        core = np.concatenate([extra[:, :, :CHANNELS], means], axis=2)
    core = core * present
    ties = (feeds > 0).astype(np.float32)
    around = [feeds @ core, feeds.transpose(0, 2, 1) @ core, ties.sum(axis=2)[..., None], ties.sum(axis=1)[..., None]]
    whole = [core.sum(axis=1) / present.sum(axis=1), np.abs(core).max(axis=1), observation[:, O_TOPOLOGY:OBSERVED]]
    line = np.broadcast_to(np.concatenate(whole, axis=1)[:, None], (n, MACHINES, sum(part.shape[1] for part in whole)))
    place = np.broadcast_to(np.eye(MACHINES, dtype=np.float32), (n, MACHINES, MACHINES))
    return np.concatenate([*own, *around, line, place], axis=2).astype(np.float32), feeds, present


class SharedNetwork(torch.nn.Module):
    """The same weights for every machine: two layers, an exchange between neighbours, a score for each mode.

    Args:
        inputs: features of a machine.
    """

    def __init__(self, inputs: int) -> None:
        super().__init__()
        width = SHARED_WIDTH
        self.first, self.second = torch.nn.Linear(inputs, width), torch.nn.Linear(width, width)
        self.exchange, self.score = torch.nn.Linear(3 * width, width), torch.nn.Linear(width, len(MODES))

    def forward(self, given: Inputs) -> torch.Tensor:
        """Scores f32[n, CLASSES]."""
        own = torch.relu(self.second(torch.relu(self.first(given.machines)))) * given.present
        both = [own, torch.bmm(given.feeds, own), torch.bmm(given.feeds.transpose(1, 2), own)]
        scores = self.score(torch.relu(self.exchange(torch.cat(both, dim=2))))
        scores = scores.masked_fill(given.present < 0.5, NEVER)
        alarm = torch.logsumexp(scores[:, :, FALSE_ALARM], dim=1, keepdim=True)
        never = torch.full_like(alarm, NEVER).expand(-1, MACHINES - 1)
        last = torch.cat([alarm, never], dim=1)[:, :, None]
        return torch.cat([scores[:, :, :FALSE_ALARM], last], dim=2).flatten(1)


class PlainNetwork(torch.nn.Module):
    """Two layers over the observation.

    Args:
        inputs: of the observation.
    """

    def __init__(self, inputs: int) -> None:
        super().__init__()
        layers = [torch.nn.Linear(inputs, PLAIN_WIDTH), torch.nn.ReLU(), torch.nn.Linear(PLAIN_WIDTH, PLAIN_WIDTH)]
        self.layers = torch.nn.Sequential(*layers, torch.nn.ReLU(), torch.nn.Linear(PLAIN_WIDTH, CLASSES))

    def forward(self, given: Inputs) -> torch.Tensor:
        """Scores f32[n, CLASSES]."""
        scores: torch.Tensor = self.layers(given.machines)
        return scores


@dataclass
class Classifier:
    """A trained network and the scaling of what it reads."""

    arm: str
    network: torch.nn.Module
    mean: Floats
    scale: Floats

    def inputs(self, observation: Floats, extra: Floats) -> Inputs:
        """What the network reads, scaled."""
        features, feeds, present = _features(self.arm, observation, extra)
        scaled = ((features - self.mean) / self.scale).clip(-LIMIT, LIMIT)
        return Inputs(*(torch.from_numpy(np.ascontiguousarray(part)) for part in (scaled, feeds, present)))

    def scores(self, observation: Floats, extra: Floats) -> Floats:
        """f32[n, CLASSES] of ``observation`` f32[n, OBSERVED] and what is remembered f32[n, 8, NUMBERS]."""
        with torch.inference_mode():
            found: Floats = self.network(self.inputs(observation, extra)).numpy()
        return found

    def right(self, examples: Examples) -> Bools:
        """bool[n]: where it names the true machine and mode."""
        found: Bools = self.scores(examples.observation, examples.remembered).argmax(axis=1) == examples.label
        return found


def _features(arm: str, observation: Floats, extra: Floats) -> tuple[Floats, Floats, Floats]:
    features, feeds, present = machine_features(observation, extra if arm == REMEMBERING else None)
    return (observation if arm == PLAIN else features), feeds, present


def fit(arm: str, examples: Examples, *, passes: int, rate: float = 2e-3, seed: int = 0) -> Classifier:
    """Trains a network by cross-entropy; its rate rises and falls once.

    Args:
        arm: one of :data:`ARMS`.
        examples: labelled.
        passes: times that they are gone through.
        rate: highest learning rate of AdamW.
        seed: of weights and order.
    """
    torch.manual_seed(seed)
    features, _, _ = _features(arm, examples.observation, examples.remembered)
    flat = features.reshape(-1, features.shape[-1])
    network: torch.nn.Module = (PlainNetwork if arm == PLAIN else SharedNetwork)(features.shape[-1])
    made = Classifier(arm, network, flat.mean(axis=0), flat.std(axis=0) + 1e-3)
    given, label = made.inputs(examples.observation, examples.remembered), torch.from_numpy(examples.label)
    size = min(BATCH, len(label))
    optimiser = torch.optim.AdamW(network.parameters(), lr=rate, weight_decay=1e-3)
    total = passes * (len(label) // size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, total_steps=total + 1)
    for _ in range(passes):
        order = torch.randperm(len(label))
        for at in range(0, len(label) - size + 1, size):
            rows = order[at : at + size]
            scores = network(Inputs(*(part[rows] for part in given)))
            loss = torch.nn.functional.cross_entropy(scores, label[rows])
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            schedule.step()
    return made


class ClassifierDiagnosis:
    """Names what a classifier finds likeliest, less what a verification has refuted.

    Args:
        classifier: trained.
        size: environments of the pool.
    """

    def __init__(self, classifier: Classifier, size: int) -> None:
        self._classifier, self._log = classifier, ReceivedLog(size)
        self._named, self._refuted = np.zeros((size, 2), np.int64), np.zeros((size, CLASSES), np.bool_)

    def follow(self, pool: LinePool) -> None:
        """Hears what the last step brought, and what a verification has refuted."""
        self._refuted[pool.plant().step == 0] = False
        self._log.follow(pool)
        order = pool.plant().order.astype(np.int64)
        rows = np.flatnonzero(order[:, ORDER_VERIFIED] == 2)
        self._refuted[rows, order[rows, ORDER_MACHINE] * len(MODES) + order[rows, ORDER_MODE]] = True

    def declare(self, pool: LinePool, asked: Bools) -> Actions:
        """The machine, then the mode that was the likeliest with it."""
        rows = np.flatnonzero(asked & (pool.plant().order[:, ORDER_MACHINE] < 0))
        if len(rows):
            scores = self._classifier.scores(pool.observation[rows, :OBSERVED], remembered(self._log, rows))
            there = np.repeat(pool.observation[rows, O_PRESENT : O_PRESENT + MACHINES] > 0, len(MODES), axis=1)
            best = np.where(self._refuted[rows] | ~there, -np.inf, scores).argmax(axis=1)
            self._named[rows] = np.stack([best // len(MODES), best % len(MODES)], axis=1)
        return declarations(pool, self._named[:, 0], self._named[:, 1])
