"""Figures, warnings and rollouts as the training tells them to an aid."""

import numpy as np
import torch

from agentpipe.learning.gates import GateFigure
from agentpipe.learning.samples.rollout import Rollout

CALM = {
    "losses/advantage_mean": 0.0,
    "losses/gradient_norm": 1.0,
    "losses/value_loss": 1.0,
    "losses/approx_kl": 0.001,
}


def warning(name, value=0.01, target=0.1, gate="4"):
    return GateFigure(gate, name, value, target, 0.0, "warn", "")


def rollout_of(steps, size, width=6, actions=4, seed=0):
    """A rollout of random numbers, with the episodes of :func:`Rollout`'s own arrays."""
    generator = np.random.default_rng(seed)
    rollout = Rollout(steps, size, width, actions)
    rollout.encoded.copy_(torch.from_numpy(generator.normal(size=(steps, size, width)).astype(np.float32)))
    rollout.action.copy_(torch.from_numpy(generator.integers(0, actions, (steps, size))))
    rollout.segment[:] = generator.integers(0, 3, (steps, size))
    rollout.terminated[:] = generator.random((steps, size)) < 0.3
    rollout.value.copy_(torch.from_numpy(generator.normal(size=(steps, size)).astype(np.float32)))
    rollout.batch.returns[:] = torch.from_numpy(generator.normal(size=steps * size).astype(np.float32))
    return rollout


def copied(aid, fresh):
    """``fresh`` with the state of ``aid``, by way of what a checkpoint keeps."""
    import json

    content, arrays = aid.state()
    fresh.restore(json.loads(json.dumps(content)), {name: array.copy() for name, array in arrays.items()})
    return fresh
