"""The tiny pool with a truth to be learned, and networks with perception and memory for it."""

from types import SimpleNamespace

import numpy as np
import torch

from agentpipe.learning.joint.training import JointTraining
from agentpipe.learning.options import NetworkOptions
from agentpipe.learning.policy.network import PolicyNetwork
from agentpipe.learning.samples.rollout import Rollout, collect
from agentpipe.learning.workers import Workers
from agentpipe_tests.learning.tiny import ACTIONS, SEGMENTS, WIDTH, TinyPool, tiny_statistics


class KnowingPool(TinyPool):
    """The target is the machine and the mode of a fault whose severity grows with the segments.

    The first episodes begin in different segments, so that not all end in the same step.
    """

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.segment[:] = np.arange(self.size) % SEGMENTS
        self._look()

    def hidden(self):
        severity, growth = np.full(self.size, 0.2, np.float32), np.full(self.size, 0.25, np.float32)
        repaired = (self.segment == 3).astype(np.int8)
        return SimpleNamespace(
            machine=self.target.astype(np.int8),
            mode=self.target.astype(np.int8),
            severity=severity,
            growth=growth,
            repaired=repaired,
        )

    def plant(self):
        return SimpleNamespace(elapsed=self.segment.astype(np.float64))


def knowing_network(seed=0, **changes):
    """A small network with perception and memory, and normalisation that changes something."""
    options = {"hidden": (8, 6), "action_embedding": 3, "time_frequencies": 2, "activation": "tanh"}
    network = PolicyNetwork(WIDTH, ACTIONS, NetworkOptions(**{**options, "perception": 7, "memory": 5, **changes}))
    network.initialise(torch.Generator().manual_seed(seed))
    network.set_statistics(tiny_statistics())
    return network


class Knowing:
    """Everything that joint training needs, on the tiny pool."""

    def __init__(self, size=24, steps=6, threads=1, *, truncating=False, pool_seed=3, minibatch=8_192, **changes):
        self.pool = KnowingPool(size, pool_seed, truncating=truncating)
        self.network = knowing_network(**changes)
        self.workers = Workers(threads)
        self.joint = JointTraining(self.network, self.pool, self.workers, minibatch=minibatch)
        joint = self.joint.record(steps)
        self.rollout = Rollout(steps, size, self.network.encoded_size, ACTIONS, joint=joint)
        self.uniforms = np.random.default_rng(0)

    def collect(self):
        collect(self.pool, self.network, self.rollout, self.uniforms, self.workers)
        return self.rollout
