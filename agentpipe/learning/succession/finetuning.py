"""Daily incremental fine-tuning (S30): labelled decisions of production, rehearsal, and an anchor to the champion.

One gradient step takes a minibatch of labelled decisions (:mod:`~agentpipe.learning.succession.labels`) and, for each
of them, ``rehearsal`` recorded steps (:mod:`~agentpipe.learning.succession.rehearsal`):

    L = mean over labelled decisions of their losses, as far as each error type lets them reach
      + mean over rehearsed steps of (clipped surrogate of V-trace advantages
                                      + value_weight (V - v)^2 / 2 + kl_weight KL(champion || policy))
      + the critic's loss in segments with planning errors

Every look at the validation split either keeps the weights or not. The split tells two sets of weights apart only
within its own noise, and says nothing of what production alone shows: so the *latest* look counts whose score lacks at
most ``tolerance`` of the best one so far, the champion's own included. After ``patience`` looks in a row beyond that,
training stops. Where no look is within the tolerance nothing was learned that is worth what was forgotten: there is no
package then, and the labels stay new.

A fine-tuning takes seconds and is not resumed: one that was killed starts again and, equal inputs given, ends with the
same bytes. The package is written aside and renamed, so that the old one or the whole new one is there.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from agentpipe.environments.layout import ACTION_SEGMENT
from agentpipe.errors import LearningError, NonFiniteError
from agentpipe.feedback.labelled import PLANNING
from agentpipe.learning.gradient.anchor import Anchor, AnchoredGradient
from agentpipe.learning.gradient.fused import VALUE
from agentpipe.learning.gradient.ppo import clip_gradients
from agentpipe.learning.options import as_json, share_at
from agentpipe.learning.policy.lineage import labels_digest
from agentpipe.learning.policy.network import PolicyNetwork
from agentpipe.learning.policy.package import PolicyPackage
from agentpipe.learning.samples.replay import open_replay
from agentpipe.learning.state import seed_of
from agentpipe.learning.succession.labels import critic_loss, label_loss, lessons
from agentpipe.learning.succession.reach import EXECUTE, why_nothing
from agentpipe.learning.succession.rehearsal import Rehearsal
from agentpipe.learning.workers import Workers, single_threaded_torch
from agentpipe.progress import silent

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from agentpipe.experience.store.shard import Shard
    from agentpipe.feedback.labelled import LabelledDecisions
    from agentpipe.learning.gradient.anchor import AnchoredBatch
    from agentpipe.learning.options import FineTuningOptions
    from agentpipe.learning.succession.labels import Lessons
    from agentpipe.progress import Progress

    Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class FineTuned:
    """A policy that learned from labels."""

    package: PolicyPackage
    """published"""
    package_path: Path
    """where"""
    labels: frozenset[str]
    """ids that it was trained on now; ``package.labels`` holds those of its ancestors, too"""
    useful: int
    """of them, labels that move something: the others had one legal action only, weight zero, or an execution error
    outside the execute segment"""
    best_validation: float | None
    """score of the package on the validation split"""
    validations: tuple[tuple[int, float], ...]
    """epoch, score; epoch 0 is the champion"""
    kept_epoch: int
    """epoch whose weights are kept"""
    log: tuple[dict[str, float], ...]
    """one row an epoch: losses, KL to the champion over the rehearsed steps, gradient norm"""


@dataclass(frozen=True)
class NotTrained:
    """Why there is no new package: the champion stays what it was, and the labels stay new."""

    reason: Literal["no_new_labels", "too_few_labels", "nothing_to_move", "forgetting"]
    """in one word"""
    explanation: str
    """the same in a sentence"""
    new_labels: int
    """labels that no ancestor was trained on"""
    validations: tuple[tuple[int, float], ...] = ()
    """epoch, score, where it came to that"""


FineTuningResult = FineTuned | NotTrained


def fine_tune(  # noqa: PLR0913 - one flat call, as train
    champion: PolicyPackage,
    feedback: LabelledDecisions,
    *,
    recorded: Sequence[Shard],
    options: FineTuningOptions,
    directory: Path,
    validate: Callable[[PolicyPackage], float] | None = None,
    seed: int = 0,
    threads: int = 1,
    progress: Progress = silent,
    parent: str | None = None,
    provenance: dict[str, Any] | None = None,
    configuration_digest: str = "",
    already: Collection[str] = (),
    action_segment: npt.NDArray[np.int8] = ACTION_SEGMENT,
) -> FineTuningResult:
    """Trains ``champion`` on labelled decisions that none of its lineage was trained on.

    Args:
        champion: weights to start from and to stay near; normalisation, names and heads stay its own. Not changed.
        feedback: labelled decisions, in any order: what comes of them depends on their ids alone.
        recorded: opened shards to rehearse from.
        options: everything that can be chosen.
        directory: gets ``package/``.
        validate: scores a policy on the validation split (higher is better); none = the weights of the last epoch.
        seed: root of what is drawn here.
        threads: workers; the result does not depend on how many there are.
        progress: told after every epoch.
        parent: digest of the policy that this one descends from.
        provenance: recorded in the package as it is.
        configuration_digest: of all settings; recorded.
        already: label ids that are left out besides those of the champion's lineage.
        action_segment: i8[A], segment of each action.

    Returns:
        The new package, or why there is none.

    Raises:
        NonFiniteError: an input, a loss, a gradient or a score is not finite; names the label where it is one's.
        LearningError: a labelled decision or the shards do not fit the champion; there is nothing to rehearse from; the
            champion has a memory, whose state no decision holds.
        CorruptError: a shard was cut short while it was used.
        DiskFullError, HomeError: the package cannot be written; what was there stays.
    """
    known = champion.labels.union(already)
    rows = _chosen(feedback.label_id, known, options.most_labels, seed)
    new = sum(label not in known for label in feedback.label_id)
    if new == 0:
        text = f"all of {len(feedback.label_id)} labels were trained on before"
        return NotTrained("no_new_labels", text if len(feedback.label_id) else "there are no labels", 0)
    if new < options.minimum_labels:
        return NotTrained("too_few_labels", f"{new} new labels, {options.minimum_labels} are needed", new)
    with single_threaded_torch(), Workers(threads) as workers:
        weak, segments = options.weak_negative, action_segment
        taught = lessons(feedback, rows, champion.network, weak_negative=weak, action_segment=segments)
        labels, useful = frozenset(taught.ids), taught.useful()
        if len(useful) == 0:
            return NotTrained("nothing_to_move", why_nothing(feedback.take(rows), weak, segments), new)
        run = _Run(champion, taught.take(useful), recorded, options, workers, seed, segments)
        run.loop(validate, progress)
        looks = tuple(run.looks)
        if run.kept_epoch == 0:
            text = f"validation fell from {looks[0][1]:.4f} to {looks[-1][1]:.4f}, more than {options.tolerance:g}"
            return NotTrained("forgetting", text, new, looks)
        package = run.package(run.kept)
        package.labels = champion.labels | labels
        package.provenance = {
            **(provenance or {}),
            "parent": parent,
            "fine_tuned_from": champion.digest,
            "configuration_digest": configuration_digest,
            "fine_tuning_options": as_json(options),
            "labels": {"count": len(labels), "digest": labels_digest(labels), "useful": len(useful)},
            "lineage_labels": {"count": len(package.labels), "digest": labels_digest(package.labels)},
            "epoch": run.kept_epoch,
            "best_validation": run.score,
        }
        path = package.save(directory / "package")
    return FineTuned(package, path, labels, len(useful), run.score, looks, run.kept_epoch, tuple(run.log))


def _chosen(ids: Sequence[str], known: frozenset[str], most: int, seed: int) -> npt.NDArray[np.int64]:
    """Rows of at most ``most`` new labels, drawn by a hash of their ids, in the order of the ids."""
    new = [row for row, label in enumerate(ids) if label not in known]
    if len({ids[row] for row in new}) < len(new):
        twice = next(ids[row] for at, row in enumerate(new) if ids[row] in {ids[other] for other in new[:at]})
        raise LearningError("a label comes twice", label=twice, remedy="give each label once")
    if len(new) > most:
        new = sorted(new, key=lambda row: hashlib.sha256(f"{seed}:{ids[row]}".encode()).digest())[:most]
    return np.array(sorted(new, key=lambda row: ids[row].encode()), np.int64)


class _Run:
    """One fine-tuning; holds what its epochs share."""

    def __init__(
        self,
        champion: PolicyPackage,
        taught: Lessons,
        recorded: Sequence[Shard],
        options: FineTuningOptions,
        workers: Workers,
        seed: int,
        action_segment: npt.NDArray[np.int8],
    ) -> None:
        self.champion, self.options, self.lessons, ppo = champion, options, taught, options.ppo
        self.network = network = self._copy(champion.network.state_dict())
        self.execute = torch.from_numpy(action_segment == EXECUTE)
        self.gradient = AnchoredGradient(network, ppo.clip, ppo.value_weight, workers, options.kl_weight)
        self.rehearsal = self._rehearsal(recorded, workers, seed)
        self.parameters = tuple(parameter for _, parameter in network.policy_parameters())
        self.optimiser = torch.optim.Adam(self.parameters, lr=options.learning_rate, eps=1e-5, fused=True)
        self.generator = torch.Generator().manual_seed(seed_of(seed, "order"))
        self.steps, self.pieces = 0, -(-len(taught) // options.minibatch)
        self.kept, self.kept_epoch = self._weights(), 0
        self.score: float | None = None
        self.best: float | None = None
        self.beyond = 0
        self.looks: list[tuple[int, float]] = []
        self.log: list[dict[str, float]] = []

    def _copy(self, weights: Weights) -> PolicyNetwork:
        theirs = self.champion.network
        network = PolicyNetwork(theirs.observation_size, theirs.action_count, theirs.options)
        network.load_state_dict(weights)
        network.set_statistics(self.champion.statistics)
        return network

    def _weights(self) -> Weights:
        return {name: tensor.detach().clone() for name, tensor in self.network.state_dict().items()}

    def _rehearsal(self, recorded: Sequence[Shard], workers: Workers, seed: int) -> Rehearsal | None:
        options = self.options
        steps = round(options.rehearsal * len(self.lessons))
        if steps == 0:
            return None
        share = dataclasses.replace(options.replay, share=options.replay.share or 0.5)  # of a batch; there is none here
        replay = open_replay(recorded, share, self.network, workers, seed_of(seed, "replay"))
        if replay is None:
            remedy = "give recorded shards, or ask for no rehearsal: without it nothing guards against forgetting"
            raise LearningError("there is nothing to rehearse from", field="recorded", remedy=remedy)
        anchor = Anchor(self.champion, self.network, workers, steps)
        return Rehearsal(replay, anchor, steps, options.ppo.discount, options.surrogate_weight)

    def package(self, weights: Weights) -> PolicyPackage:
        """The champion's package with other weights, and nothing of its provenance."""
        old = self.champion
        names = (old.observation_names, old.action_names, old.simulator_version)
        return PolicyPackage(self._copy(weights), old.statistics, *names)

    def loop(self, validate: Callable[[PolicyPackage], float] | None, progress: Progress) -> None:
        epochs = self.options.epochs
        self._look(0, validate)
        for epoch in range(1, epochs + 1):
            self._epoch(epoch)
            if epoch % self.options.validate_every == 0 or epoch == epochs:
                self._look(epoch, validate)
            row = self.log[-1]
            score = "" if self.score is None else f", validation {self.looks[-1][1]:.1%}"
            progress("fine-tuning", epoch, epochs, f"label loss {row['losses/label_loss']:.3f}{score}")
            if self.looks and self.beyond >= max(1, self.options.patience):
                return

    def _look(self, epoch: int, validate: Callable[[PolicyPackage], float] | None) -> None:
        if validate is None:
            self.kept, self.kept_epoch = self._weights(), epoch
            return
        score = float(validate(self.package(self._weights())))
        if not math.isfinite(score):
            remedy = "mend what scores policies; nothing was trained"
            raise NonFiniteError("not finite", field="validation score", step=epoch, remedy=remedy)
        self.looks.append((epoch, score))
        self.best = score if self.best is None else max(self.best, score)
        if score >= self.best - self.options.tolerance:
            self.kept, self.kept_epoch, self.score, self.beyond = self._weights(), epoch, score, 0
        else:
            self.beyond += 1

    def _epoch(self, epoch: int) -> None:
        rehearsed = None if self.rehearsal is None else self.rehearsal.epoch(epoch)
        order = torch.randperm(len(self.lessons), generator=self.generator).tensor_split(self.pieces)
        others: Sequence[torch.Tensor | None] = [None] * self.pieces
        if rehearsed is not None:
            others = torch.randperm(len(rehearsed.action), generator=self.generator).tensor_split(self.pieces)
        sums, label_loss_sum, norm = np.zeros(self.gradient.sums_size), 0.0, 0.0
        for rows, other in zip(order, others, strict=True):
            part_sums, loss, step_norm = self._step(rows, rehearsed, other)
            sums, label_loss_sum, norm = sums + part_sums, label_loss_sum + loss, norm + step_norm
        row = {"epoch": float(epoch), "losses/label_loss": label_loss_sum / len(self.lessons)}
        if rehearsed is not None:
            count = len(rehearsed.action)
            row |= {"losses/anchor_kl": float(sums[-1]) / count, "losses/value_loss": float(sums[VALUE]) / count}
        self.log.append({**row, "losses/gradient_norm": norm / self.pieces})

    def _step(
        self, rows: torch.Tensor, rehearsed: AnchoredBatch | None, other: torch.Tensor | None
    ) -> tuple[npt.NDArray[np.float64], float, float]:
        options, ppo, batch = self.options, self.options.ppo, self.lessons.take(rows)
        done = self.steps / (options.epochs * self.pieces)
        for group in self.optimiser.param_groups:
            group["lr"] = options.learning_rate * share_at("linear", done, options.final_learning_rate_share)
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)
        sums = np.zeros(self.gradient.sums_size)
        total, losses = label_loss(self.network, batch, self.execute)
        if rehearsed is not None and other is not None and len(other):
            sums = self.gradient(rehearsed, other, 0.0)  # sets the gradients that the labels add to
            if bool((batch.route == PLANNING).any()):
                total = total + critic_loss(self.network, batch, rehearsed, other, ppo.value_weight)
        total.backward()  # type: ignore[no-untyped-call]
        self.steps += 1
        names, finite = self.gradient.names, float(total.detach()) + float(sums.sum())
        norms = clip_gradients(self.parameters, ppo.max_gradient_norm, names=names, step=self.steps, loss=finite)
        self.optimiser.step()
        return sums, float(losses.sum()), float(norms.norm())
