"""What the built-in line's perception believes: of machines that are there, by the company that they keep."""

import numpy as np
import pytest
import torch

from agentpipe.environments.geometry import downstream_matrices
from agentpipe.environments.layout import CHANNELS, FALSE_ALARM, MACHINES, OBSERVATION_SIZE, TOPOLOGIES, block_start
from agentpipe.learning.joint.line_perception import INPUTS, LinePerception
from agentpipe.learning.options import NetworkOptions
from agentpipe.learning.policy.compiled import CompiledPolicy
from agentpipe.learning.policy.network import PolicyNetwork
from agentpipe.learning.policy.normalisation import ObservationStatistics

MEAN, PRESENT, TOPOLOGY = block_start("mean"), block_start("present"), block_start("topology")


def perception(width=16):
    made = LinePerception(width, "relu")
    made.initialise(torch.Generator().manual_seed(3))
    torch.nn.init.normal_(made.answers.weight, 0.0, 1.0, generator=torch.Generator().manual_seed(4))
    return made


def observations(rows, machines=MACHINES, topology=0, seed=0):
    drawn = np.random.default_rng(seed).normal(size=(rows, OBSERVATION_SIZE)).astype(np.float32)
    drawn[:, PRESENT : PRESENT + MACHINES] = np.arange(MACHINES) < machines
    drawn[:, TOPOLOGY : TOPOLOGY + len(TOPOLOGIES)] = np.eye(len(TOPOLOGIES))[topology]
    return torch.from_numpy(drawn)


def test_parameters_are_as_many_as_documented():
    width = 16
    count = sum(parameter.numel() for parameter in LinePerception(width, "tanh").parameters())
    assert count == (INPUTS + 1) * width + (3 * width + 1) * width + (width + 1) * 13
    assert INPUTS == 59


def test_each_question_has_a_distribution():
    belief = perception().belief(observations(5))
    assert belief.shape == (5, 21)
    for part in torch.split(belief, [8, 10, 3], dim=1):
        assert part.sum(dim=1).tolist() == pytest.approx([1.0] * 5, abs=1e-6)


def test_a_machine_that_is_not_there_is_not_believed():
    belief = perception().belief(observations(6, machines=7))
    assert float(belief[:, 7].detach().max()) < 1e-6
    assert float(belief[:, :7].detach().min()) > 0


def test_an_absent_machines_readings_change_nothing():
    here, other = observations(4, machines=7), observations(4, machines=7)
    other[:, MEAN + 7 * CHANNELS : MEAN + 8 * CHANNELS] = 1e3
    made = perception()
    assert torch.equal(made.belief(here), made.belief(other))


@pytest.mark.parametrize("topology", range(len(TOPOLOGIES)))
def test_logits_equal_a_machine_by_machine_reckoning(topology):
    """The formula of the module, one row and one machine after the other, in float64."""
    made, seen = perception().double(), observations(3, machines=7, topology=topology).double()
    coupling = torch.from_numpy(downstream_matrices()[topology]).double()
    for row in seen:
        means = row[MEAN : MEAN + 40].view(8, 5).clone()
        means[7] = 0.0
        line = [means[:7].mean(dim=0), means.abs().max(dim=0).values, row[block_start("link") : block_start("segment")]]
        refuted = row[block_start("tried") + 8 : block_start("tried") + 18]
        first = []
        for m in range(8):
            single = [row[block_start(name) + m] for name in ("age", "count", "present", "declared_machine", "tried")]
            around = [
                sum(coupling[m, n] * means[n] for n in range(8)),
                sum(coupling[n, m] * means[n] for n in range(8)),
            ]
            own = [row[5 * m : 5 * m + 5], means[m], torch.stack(single), *around]
            place = torch.eye(8, dtype=torch.float64)[m]
            hidden = made.alone(torch.cat([*own, *line, refuted, place])).relu()
            first.append(hidden if m < 7 else torch.zeros_like(hidden))
        joint, severity = [], []
        for m in range(7):
            fed = sum(coupling[m, n] * first[n] for n in range(8))
            feeding = sum(coupling[n, m] * first[n] for n in range(8))
            answer = made.answers(made.together(torch.cat([first[m], fed, feeding])).relu())
            joint.append(answer[:10])
            severity.append(answer[10:])
        p = torch.stack(joint).exp()
        machine = p[:, :FALSE_ALARM].sum(dim=1)
        mode = torch.cat([p[:, :FALSE_ALARM].sum(dim=0), p[:, FALSE_ALARM].sum().view(1)])
        share = machine / machine.sum()
        level = sum(share[m] * severity[m] for m in range(7)).softmax(dim=0)
        expected = torch.cat([share, torch.zeros(1, dtype=torch.float64), mode / mode.sum(), level])
        assert torch.allclose(made.belief(row.unsqueeze(0))[0], expected, atol=1e-9)


def test_presence_and_topology_are_read_through_any_normalisation():
    raw = observations(4, machines=7, topology=3).numpy()
    statistics = ObservationStatistics.empty([f"f{index}" for index in range(OBSERVATION_SIZE)])
    statistics.update(np.concatenate([raw, observations(60, topology=5, seed=9).numpy()]))
    network = PolicyNetwork(OBSERVATION_SIZE, 46, NetworkOptions(hidden=(8,), perception=16))
    network.initialise(torch.Generator().manual_seed(0))
    network.set_statistics(statistics)
    made = network.perception
    base = network.encode(torch.from_numpy(raw), torch.zeros(4, dtype=torch.int64), torch.zeros(4))[0]
    public = base[:, PRESENT : TOPOLOGY + len(TOPOLOGIES)] * made.unit + made.shift
    assert np.allclose(public.detach().numpy(), raw[:, PRESENT : TOPOLOGY + len(TOPOLOGIES)], atol=1e-5)


@pytest.mark.parametrize("rows", [1, 31, 32, 70])
@pytest.mark.parametrize(("activation", "encoder"), [("relu", "fusion"), ("tanh", "fusion"), ("relu", "mlp")])
def test_compiled_beliefs_are_those_of_the_module(rows, activation, encoder):
    options = NetworkOptions(hidden=(8,), perception=24, activation=activation, encoder=encoder)
    network = PolicyNetwork(OBSERVATION_SIZE, 46, options)
    network.initialise(torch.Generator().manual_seed(0))
    torch.nn.init.normal_(network.perception.answers.weight, 0.0, 1.0, generator=torch.Generator().manual_seed(1))
    torch.nn.init.normal_(network.perception.answers.bias, 0.0, 1.0, generator=torch.Generator().manual_seed(2))
    statistics = ObservationStatistics.empty([f"f{index}" for index in range(OBSERVATION_SIZE)])
    kinds = [observations(rows, machines=7 + kind % 2, topology=kind, seed=kind).numpy() for kind in range(6)]
    statistics.update(np.concatenate(kinds))
    network.set_statistics(statistics)
    for seen in kinds:
        inputs = (torch.from_numpy(seen), torch.zeros(rows, dtype=torch.int64), torch.rand(rows))
        with torch.inference_mode():
            expected = network.encode(*inputs)[0]
            found = torch.full((rows, network.encoded_size), torch.nan)
            CompiledPolicy(network).encode(0, *inputs, network.fresh_memory(rows), found)
        assert torch.allclose(found, expected, atol=3e-6)
