"""Small policies and one built bundle, shared by the serving tests."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch

from agentpipe.environments.layout import ACTION_COUNT, OBSERVATION_NAMES, OBSERVATION_SIZE
from agentpipe.learning.options import NetworkOptions
from agentpipe.learning.policy.network import PolicyNetwork
from agentpipe.learning.policy.normalisation import ObservationStatistics
from agentpipe.learning.policy.package import PolicyPackage
from agentpipe.serving.bundle import build_bundle


class TinyPolicy(torch.nn.Module):
    """Five features, four actions; normalisation inside; everything exported is in here to be read at a glance."""

    observation_size, action_count = 5, 4

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.register_buffer("mean", torch.tensor([0.0, 10.0, -3.0, 0.5, 100.0]))
        self.register_buffer("scale", torch.tensor([1.0, 0.1, 2.0, 1.0, 0.01]))
        self.embedding = torch.nn.Embedding(5, 3)
        self.layer = torch.nn.Linear(5 + 3 + 1, 16)
        self.actor = torch.nn.Linear(16, 4)
        self.critic = torch.nn.Linear(16, 1)
        for parameter in self.parameters():
            torch.nn.init.normal_(parameter, 0.0, 0.5, generator=generator)

    def forward(self, observation, last_action, time, mask):
        x = ((observation - self.mean) * self.scale).clamp(-8, 8)
        x = torch.cat([x, self.embedding(last_action), torch.sin(time).unsqueeze(-1)], dim=-1)
        h = torch.tanh(self.layer(x))
        p = self.actor(h).masked_fill(~mask, -1e9).softmax(-1) * mask
        return torch.where(mask.any(-1), p.argmax(-1), -1), p, self.critic(h).squeeze(-1)


def make_package(path, seed=0):
    """An untrained policy of the built-in line's size, with lively weights and statistics."""
    network = PolicyNetwork(OBSERVATION_SIZE, ACTION_COUNT, NetworkOptions(hidden=(32, 32)))
    network.initialise(torch.Generator().manual_seed(seed))
    torch.nn.init.normal_(network.actor_head.weight, 0.0, 0.5, generator=torch.Generator().manual_seed(seed + 1))
    generator = np.random.default_rng(seed)
    mean, m2 = generator.normal(size=OBSERVATION_SIZE), generator.uniform(0.01, 900, size=OBSERVATION_SIZE)
    package = PolicyPackage(
        network, ObservationStatistics(OBSERVATION_NAMES, 100.0, mean, m2), provenance={"seed": seed}
    )
    package.save(path)
    return package


@pytest.fixture(scope="session")
def package_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("package") / "package"
    make_package(path)
    return path


@pytest.fixture(scope="session")
def built(package_dir, tmp_path_factory):
    """A bundle of the small package; read it, never change it."""
    return build_bundle(
        package_dir,
        tmp_path_factory.mktemp("bundles"),
        provenance={"table_version": "t1"},
        evaluation={"success": 0.5},
        promotable=True,
    )


@pytest.fixture
def bundle_copy(built, tmp_path):
    """The same bundle, to be damaged."""
    return shutil.copytree(built.path, tmp_path / "bundle")
