"""What a label teaches: from a verdict to a loss, and from an error type to the parameters that it may move.

For a labelled decision with observation s, action a, corrected action b and confidence w, pi being the policy over the
actions that the mask allows,

    correct             L = w * -log pi(a|s)                                   imitate
    wrong, with b       L = w * -log pi(b|s)                                   towards the correction
    wrong, without b    L = w * -log(1 - pi(a|s))                              away from the action
    needs improvement   L = weak_negative * what ``wrong`` would give          a weak negative

averaged over the minibatch, not over the sum of its weights. Moving away is bounded: for the logits z,

    dL/dz_a = pi(a|s)        dL/dz_j = -pi(a|s) pi(j|s) / (1 - pi(a|s))        for the other legal actions j,

so the gradient of a row never exceeds its weight in any logit, and fades as the action does; what the action loses goes
to the other legal actions in proportion to what they have (the unlikelihood loss of Welleck et al., 2020, over the
mask). Where nothing but a is legal there is nothing to move to: the row weighs nothing.

The error type of a decision that was not correct says where its gradient may go:

    perception    the encoder alone: all that actor and critic have in common (embedding, its projection, first layer,
                  and the hidden layers of a shared trunk)
    planning      the actor and the critic behind the encoder: hidden layers of their own, and heads
    execution     the weights and biases of the logits of the execute segment's actions, nothing else
    none          everything

by detaching: activations where a gradient must not reach further back, and for perception the gradient at the encoder's
output, taken through the rest of the network and handed to the encoder alone. An execution error outside the execute
segment has no legal execute action and moves nothing.

*Planning and the critic.* A label says that a decision was bad, not what the situation is worth: there is no reward in
it, and V is the value of a policy that is about to be corrected, so that neither raising nor lowering it could be
justified. What can be is emphasis: a planning error says in which segment the critic is to be trusted least. The
critic's own error on rehearsed steps, whose targets v_s come from V-trace, therefore counts more in that segment,

    L_critic = value_weight * mean over rehearsed steps j of u(segment j) w_j (V(s_j) - v_j)^2 / 2
    u(k)     = (weights of the planning errors of the minibatch in segment k) / (its labelled decisions)

through the same detached encoder, beside the ordinary value loss of the rehearsal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agentpipe.errors import LearningError, NonFiniteError
from agentpipe.feedback.labelled import (
    CORRECT,
    EXECUTION,
    NEEDS_IMPROVEMENT,
    PERCEPTION,
    PLANNING,
    WRONG,
    LabelledDecisions,
)
from agentpipe.learning.succession.reach import beyond

if TYPE_CHECKING:
    from agentpipe.learning.policy.network import PolicyNetwork
    from agentpipe.learning.samples.batch import Batch

NO_ERROR: Final = -1
"""where a label names no error type"""
_ILLEGAL: Final = -1.0e9


@dataclass
class Lessons:
    """n labelled decisions as tensors; one row each."""

    ids: tuple[str, ...]
    """of the labels"""
    encoded: Tensor
    """f32[n, E]"""
    last_action: Tensor
    """i64[n]"""
    mask: Tensor
    """bool[n, A]"""
    target: Tensor
    """i64[n]: the action to move towards or away from"""
    away: Tensor
    """bool[n]: away from it"""
    weight: Tensor
    """f32[n]; zero where nothing can be learned"""
    route: Tensor
    """i64[n]: error type"""
    segment: Tensor
    """i64[n], of the action that was taken"""

    def __len__(self) -> int:
        return len(self.ids)

    def useful(self) -> Tensor:
        """Rows that move something, ascending."""
        return (self.weight > 0).nonzero().squeeze(1)

    def take(self, rows: Tensor) -> Lessons:
        """The rows ``rows``, copied."""
        tensors = {name: getattr(self, name)[rows] for name in self.__dataclass_fields__ if name != "ids"}
        return Lessons(tuple(self.ids[row] for row in rows.tolist()), **tensors)


def lessons(
    labelled: LabelledDecisions,
    rows: npt.NDArray[np.int64],
    network: PolicyNetwork,
    *,
    weak_negative: float,
    action_segment: npt.NDArray[np.int8],
) -> Lessons:
    """The rows ``rows`` of ``labelled`` as tensors for ``network``.

    Args:
        labelled: decisions with their labels.
        rows: i64[n], which of them.
        network: encodes the observations; shapes must fit.
        weak_negative: weight of ``needs improvement``.
        action_segment: i8[A], segment of each action.

    Raises:
        LearningError: a shape, a code or an action does not fit; names the label. The network has a memory.
        NonFiniteError: an observation, time or confidence is not finite; names the label.
    """
    if network.memory is not None:
        remedy = "let the nightly retraining take what was learned, or deploy a policy without a memory"
        text = "labelled decisions do not hold what the policy remembered when it took them"
        raise LearningError(text, field="network.memory", remedy=remedy)
    part = {name: np.asarray(getattr(labelled, name))[rows] for name in _FIELDS}
    ids = tuple(labelled.label_id[int(row)] for row in rows)
    _check(ids, part, network, len(action_segment))
    action, corrected, mask = part["action"], part["corrected_action"], part["mask"]
    correct = part["verdict"] == CORRECT
    away = ~correct & (corrected < 0)
    target = np.where(correct | away, action, corrected)
    weight = part["confidence"] * np.where(part["verdict"] == NEEDS_IMPROVEMENT, np.float32(weak_negative), 1)
    route = np.where(correct, NO_ERROR, part["error_type"]).astype(np.int64)
    segment = action_segment[action].astype(np.int64)
    nothing = beyond(
        mask=mask,
        action=action,
        verdict=part["verdict"],
        error_type=part["error_type"],
        confidence=part["confidence"],
        weak_negative=weak_negative,
        action_segment=action_segment,
    ).any
    with torch.no_grad():
        seen = (torch.from_numpy(part[name]) for name in ("observation", "last_action", "time"))
        encoded, _ = network.encode(*seen)
    return Lessons(
        ids,
        encoded,
        torch.from_numpy(part["last_action"]),
        torch.from_numpy(mask),
        torch.from_numpy(target.astype(np.int64)),
        torch.from_numpy(away),
        torch.from_numpy(np.where(nothing, 0, weight).astype(np.float32)),
        torch.from_numpy(route),
        torch.from_numpy(segment),
    )


_FIELDS = {
    "observation": np.float32,
    "last_action": np.int64,
    "time": np.float32,
    "mask": np.bool_,
    "action": np.int64,
    "verdict": np.int8,
    "error_type": np.int8,
    "confidence": np.float32,
    "corrected_action": np.int64,
}


def _check(ids: tuple[str, ...], part: dict[str, npt.NDArray[Any]], network: PolicyNetwork, segments: int) -> None:
    count, actions = len(ids), network.action_count
    wide = {"observation": (network.observation_size,), "mask": (actions,)}
    for name, kind in _FIELDS.items():
        expected = (count, *wide.get(name, ()))
        if part[name].dtype != kind or part[name].shape != expected:
            text = f"{name} is {part[name].dtype}{part[name].shape}, expected {np.dtype(kind)}{expected}"
            raise LearningError(text, field=name, remedy="give decisions of the policy's own line")
    if segments != actions:
        raise LearningError(f"segments of {segments} actions, the network has {actions}", field="action_segment")
    for name in ("observation", "time", "confidence"):
        bad = ~np.isfinite(part[name].reshape(count, -1)).all(axis=1)
        if bad.any():
            raise NonFiniteError("a labelled decision is not finite", label=ids[int(np.argmax(bad))], field=name)
    legal = np.pad(part["mask"], ((0, 0), (0, 1)))
    row = np.arange(count)
    action, corrected, last = part["action"], part["corrected_action"], part["last_action"]
    inside = (action >= 0) & (action < actions) & (corrected >= -1) & (corrected < actions)
    inside &= (last >= 0) & (last <= actions)
    allowed = legal[row, np.clip(action, 0, actions)] & ((corrected < 0) | legal[row, np.clip(corrected, 0, actions)])
    problems = {
        "last_action, action or corrected_action": ~inside,
        "mask": inside & ~allowed,
        "verdict": ~np.isin(part["verdict"], (CORRECT, WRONG, NEEDS_IMPROVEMENT)),
        "error_type": ~np.isin(part["error_type"], (NO_ERROR, PERCEPTION, PLANNING, EXECUTION)),
        "confidence": (part["confidence"] < 0) | (part["confidence"] > 1),
    }
    for name, bad in problems.items():
        if bad.any():
            remedy = "the intake quarantines such a row; give what it let through"
            text = "an action that the mask forbids" if name == "mask" else f"{name} out of range"
            raise LearningError(text, label=ids[int(np.argmax(bad))], field=name, remedy=remedy)


def row_losses(logits: Tensor, target: Tensor, away: Tensor) -> Tensor:
    """f32[n]: -log pi(target), or -log(1 - pi(target)) where ``away``; zero where away from the only legal action.

    Args:
        logits: f32[n, A], illegal actions at -1e9.
        target: i64[n].
        away: bool[n].
    """
    chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, target.unsqueeze(1), value=True)
    total = logits.logsumexp(dim=1)
    wanted = logits.gather(1, target.unsqueeze(1)).squeeze(1)
    others = logits.masked_fill(chosen, _ILLEGAL).logsumexp(dim=1)
    loss = total - torch.where(away, others, wanted)
    alone = away & (others.detach() < _ILLEGAL / 2)
    return torch.where(alone, torch.zeros_like(loss), loss)


def label_loss(network: PolicyNetwork, batch: Lessons, execute: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of a minibatch whose backward pass reaches what each row's error type allows, and no more.

    Args:
        network: with gradients.
        batch: n rows.
        execute: bool[A], actions of the execute segment.

    Returns:
        Loss (its value is that of the module's formula plus a zero), and the losses f32[n] of the rows without their
        weights, detached.

    Raises:
        NonFiniteError: the loss of a row is not finite; names its label.
    """
    total, seen = torch.zeros(()), torch.zeros(len(batch))
    for route in (NO_ERROR, PERCEPTION, PLANNING, EXECUTION):
        rows = (batch.route == route).nonzero().squeeze(1)
        if len(rows) == 0:
            continue
        part = batch.take(rows) if len(rows) < len(batch) else batch
        hidden = network.fuse(part.encoded, part.last_action)
        if route == PERCEPTION:
            leaf = hidden.detach().requires_grad_()
            losses = row_losses(_logits(network, leaf, part.mask), part.target, part.away)
            value = (part.weight * losses).sum() / len(batch)
            (pull,) = torch.autograd.grad(value, leaf)
            # Equal in value to the loss; its gradient is that of the loss at the encoder's output, handed to it alone.
            value = value.detach() + ((hidden - hidden.detach()) * pull.detach()).sum()
        else:
            before = hidden.detach() if route in (PLANNING, EXECUTION) else hidden
            logits = _execute_logits(network, before, part.mask, execute) if route == EXECUTION else None
            losses = row_losses(
                _logits(network, before, part.mask) if logits is None else logits, part.target, part.away
            )
            value = (part.weight * losses).sum() / len(batch)
        total = total + value
        seen[rows] = losses.detach()
    if not bool(torch.isfinite(seen).all()):
        row = int((~torch.isfinite(seen)).nonzero()[0])
        remedy = "the package stays as it was; leave this label out, or lower the learning rate"
        raise NonFiniteError("the loss of a labelled decision is not finite", label=batch.ids[row], remedy=remedy)
    return total, seen


def _logits(network: PolicyNetwork, hidden: Tensor, mask: Tensor) -> Tensor:
    logits: Tensor = network.actor_head(network.branches(hidden)[0])
    return logits.masked_fill(~mask, _ILLEGAL)


def _execute_logits(network: PolicyNetwork, hidden: Tensor, mask: Tensor, execute: Tensor) -> Tensor:
    logits = network.actor_head(network.branches(hidden)[0].detach()).masked_fill(~mask, _ILLEGAL)
    return torch.where(execute, logits, logits.detach())


def critic_loss(network: PolicyNetwork, batch: Lessons, rehearsed: Batch, rows: Tensor, value_weight: float) -> Tensor:
    """What planning errors add to the critic's loss on the rehearsed steps ``rows``; see the module.

    Its backward pass reaches the critic behind the encoder alone (with a shared trunk that is the critic's head).
    """
    planning = (batch.route == PLANNING).float() * batch.weight
    emphasis = torch.zeros(int(max(batch.segment.max(), rehearsed.segment[rows].max())) + 1)
    emphasis.index_add_(0, batch.segment, planning)
    scale = rehearsed.weight[rows] * emphasis[rehearsed.segment[rows]] / len(batch)
    hidden = network.fuse(rehearsed.encoded[rows], rehearsed.last_action[rows]).detach()
    value: Tensor = network.critic_head(network.branches(hidden)[1]).squeeze(-1)
    return value_weight * (scale * (value - rehearsed.returns[rows]).square()).mean() / 2.0
