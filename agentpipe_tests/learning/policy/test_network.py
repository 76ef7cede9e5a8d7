"""The network's shapes: what each option adds, what it starts as, and that old packages stay what they were."""

import json
import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from agentpipe.environments.layout import ACTION_COUNT, OBSERVATION_NAMES, OBSERVATION_SIZE
from agentpipe.errors import CheckpointError
from agentpipe.learning.options import NetworkOptions
from agentpipe.learning.policy.network import PolicyNetwork, UnitHead
from agentpipe.learning.policy.normalisation import ObservationStatistics
from agentpipe.learning.policy.package import PolicyPackage
from agentpipe.learning.tensors import content_digest
from agentpipe_tests.learning.policy.test_package import inputs, make

SIZES = [
    {},
    {"hidden": (256, 256)},
    {"hidden": (12, 7, 5), "shared_trunk": True},
    {"encoder": "mlp"},
    {"encoder": "mlp", "hidden": (9,), "shared_trunk": True, "actor_head": "unit"},
    {"actor_head": "unit", "action_embedding": 3, "time_frequencies": 2},
]


def by_formula(observation, actions, options):
    """The formula of the docstring, term by term."""
    trunks, fused = (1 if options.shared_trunk else 2), options.encoder == "fusion"
    width = observation + (2 * options.time_frequencies if fused else 0)
    embedded = (actions + 1 + trunks * options.hidden[0]) * options.action_embedding if fused else 0
    first = (width + 1) * trunks * options.hidden[0]
    hidden = trunks * sum((below + 1) * above for below, above in pairwise(options.hidden))
    head = (options.hidden[-1] + 1) * actions + (options.actor_head == "unit")
    return embedded + first + hidden + head + options.hidden[-1] + 1


@pytest.mark.parametrize("changes", SIZES)
def test_the_parameter_count_is_what_the_formula_says(changes):
    options = NetworkOptions(**changes)
    network = PolicyNetwork(11, 5, options)
    assert sum(parameter.numel() for parameter in network.parameters()) == by_formula(11, 5, options)


def test_the_documented_numbers_are_those_of_the_line():
    assert (OBSERVATION_SIZE, ACTION_COUNT) == (192, 46)
    sizes = {("fusion", 256): 257_567, ("fusion", 128): 96_415, ("mlp", 256): 242_479, ("mlp", 128): 88_495}
    for (encoder, width), expected in sizes.items():
        network = PolicyNetwork(192, 46, NetworkOptions(hidden=(width, width), encoder=encoder))
        assert sum(parameter.numel() for parameter in network.parameters()) == expected


def test_the_documented_numbers_of_perception_and_memory_are_those_of_the_line():
    network = PolicyNetwork(192, 46, NetworkOptions(hidden=(256, 256), perception=64, memory=64))
    parts = {"perception": 17_037, "memory": 72_176}
    for name, expected in parts.items():
        assert sum(parameter.numel() for parameter in getattr(network, name).parameters()) == expected
    assert sum(parameter.numel() for parameter in network.parameters()) == 390_300


def test_rows_of_the_unit_head_are_positive_and_of_length_one():
    head = UnitHead(7, 4)
    with torch.no_grad():
        head.weight_raw.normal_(0.0, 3.0, generator=torch.Generator().manual_seed(1))
        head.log_temperature.fill_(math.log(2.5))
        head.bias.copy_(torch.arange(4.0))
        hidden = torch.randn(6, 7, generator=torch.Generator().manual_seed(2))
        weight = head.effective_weight() / 2.5
        naive = np.log1p(np.exp(head.weight_raw.numpy()))
        naive /= np.sqrt((naive**2).sum(axis=1, keepdims=True))
        np.testing.assert_allclose(weight.numpy(), naive, rtol=1e-5)
        centred = naive - naive.mean(axis=0)
        np.testing.assert_allclose(
            head(hidden).numpy(), 2.5 * hidden.numpy() @ centred.T + np.arange(4.0), rtol=1e-4, atol=1e-5
        )
        assert bool((weight > 0).all())
        torch.testing.assert_close(head.folded()(hidden), head(hidden))
        torch.testing.assert_close(head.folded().weight, head.effective_weight() - head.effective_weight().mean(dim=0))


def test_what_non_negative_rows_have_in_common_costs_no_digits():
    """Products in float32 against those of the same weights in float64: what order and library of a sum change."""
    head, generator = UnitHead(256, 46), torch.Generator().manual_seed(5)

    def rounding(weight, hidden):
        exact = (hidden.double() @ weight.double().t()).softmax(dim=1)
        return float(((hidden @ weight.t()).softmax(dim=1) - exact).abs().max())

    with torch.no_grad():
        head.weight_raw.normal_(0.0, 0.05, generator=generator)
        head.log_temperature.fill_(math.log(25.0))
        hidden = 10.0 * torch.rand(64, 256, generator=generator)
        assert rounding(head.centred_weight(), hidden) < 1e-5
        assert rounding(head.effective_weight(), hidden) > 1e-5


def test_two_logits_of_the_unit_head_differ_by_no_more_than_the_temperature_allows():
    head, generator = UnitHead(16, 9), torch.Generator().manual_seed(0)
    with torch.no_grad():
        head.weight_raw.normal_(0.0, 40.0, generator=generator)
        hidden = torch.randn(500, 16, generator=generator)
        logits = head(hidden)
        limit = math.sqrt(2.0) * float(head.log_temperature.exp()) * hidden.norm(dim=1)
        assert bool((logits.amax(dim=1) - logits.amin(dim=1) <= limit * (1 + 1e-5)).all())


def test_the_gradient_of_the_unit_head_is_the_documented_one():
    head, generator = UnitHead(6, 3), torch.Generator().manual_seed(4)
    with torch.no_grad():
        head.weight_raw.normal_(0.0, 1.0, generator=generator)
        head.log_temperature.fill_(0.7)
    hidden, pull = torch.randn(5, 6, generator=generator), torch.randn(5, 3, generator=generator)
    pull -= pull.mean(dim=1, keepdim=True)  # as that of every softmax is
    (head(hidden) * pull).sum().backward()
    with torch.no_grad():
        effective, at_weight = head.effective_weight(), pull.t() @ hidden
        temperature, positive = head.log_temperature.exp(), torch.nn.functional.softplus(head.weight_raw)
        length, unit = positive.norm(dim=1, keepdim=True), effective / temperature
        along = (unit * at_weight).sum(dim=1, keepdim=True)
        raw = temperature / length * (at_weight - unit * along) * head.weight_raw.sigmoid()
    torch.testing.assert_close(head.weight_raw.grad, raw)
    torch.testing.assert_close(head.log_temperature.grad, (effective * at_weight).sum())
    torch.testing.assert_close(head.bias.grad, pull.sum(dim=0))


@pytest.mark.parametrize("changes", [{"actor_head": "unit"}, {"actor_head": "unit", "encoder": "mlp"}, {}])
def test_the_first_policy_is_nearly_uniform_over_the_legal_actions(changes):
    network = PolicyNetwork(OBSERVATION_SIZE, ACTION_COUNT, NetworkOptions(hidden=(64, 64), **changes))
    network.initialise(torch.Generator().manual_seed(3))
    observation, last_action, time, mask = (torch.from_numpy(part) for part in inputs(200))
    with torch.no_grad():
        _, probabilities, _ = network((observation - 5.0) / 30.0, last_action, time, mask)
    uniform = mask / mask.sum(dim=1, keepdim=True)
    assert float((probabilities / uniform - 1)[mask].abs().max()) < 0.5
    entropy = -(probabilities * probabilities.clamp_min(1e-12).log()).sum(dim=1)
    torch.testing.assert_close(entropy, mask.sum(dim=1).float().log(), rtol=0, atol=0.02)


def test_the_mlp_reads_the_observation_alone():
    network = PolicyNetwork(OBSERVATION_SIZE, ACTION_COUNT, NetworkOptions(hidden=(8,), encoder="mlp"))
    network.initialise(torch.Generator().manual_seed(0))
    observation, last_action, time, mask = (torch.from_numpy(part) for part in inputs(9))
    assert network.encoded_size == OBSERVATION_SIZE
    assert not any(name.startswith(("embedding", "projection")) for name, _ in network.named_parameters())
    with torch.no_grad():
        seen = network(observation, last_action, time, mask)
        other = network(observation, (last_action + 1) % ACTION_COUNT, time + 3.0, mask)
    for mine, theirs in zip(seen, other, strict=True):
        assert torch.equal(mine, theirs)


def test_weights_of_the_plain_network_are_those_that_the_seed_always_gave():
    """Values printed before encoder and head could be chosen."""
    network = PolicyNetwork(11, 5, NetworkOptions(hidden=(8, 6), action_embedding=3, time_frequencies=2))
    network.initialise(torch.Generator().manual_seed(7))
    names = [name for name, _ in network.named_parameters()]
    assert names[:4] == ["embedding.weight", "projection.weight", "first.weight", "first.bias"]
    sums = {name: float(parameter.detach().abs().sum()) for name, parameter in network.named_parameters()}
    expected = {"embedding.weight": 1.498545, "first.weight": 68.656226, "actor_head.weight": 0.10012}
    for name, value in expected.items():
        assert sums[name] == pytest.approx(value, rel=1e-5)


def test_the_digest_of_a_plain_package_is_the_one_it_had():
    """Digest of a package of constant weights, printed before encoder and head could be chosen."""
    assert constant_package().digest == "bc680c4b2889bbb1db3a5f9ef1ea301cabb36547886916bd0fa028f33d062ed1"


def constant_package():
    network = PolicyNetwork(2, 3, NetworkOptions(hidden=(4,), action_embedding=2, time_frequencies=1))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.fill_(0.5)
    return PolicyPackage(network, ObservationStatistics.empty(("a", "b")), ("a", "b"), ("x", "y", "z"), "simulator")


def test_a_package_of_before_is_read_as_fusion_with_a_linear_head(tmp_path):
    package = make()
    package.save(tmp_path / "p")
    said = json.loads((tmp_path / "p" / "package.json").read_text())["network"]
    assert set(said) == {"hidden", "action_embedding", "time_frequencies", "shared_trunk", "activation"}
    options = PolicyPackage.load(tmp_path / "p").network.options
    assert (options.encoder, options.actor_head, options.perception, options.memory) == ("fusion", "linear", 0, 0)


@pytest.mark.parametrize("changes", [{"actor_head": "unit"}, {"encoder": "mlp"}, {"encoder": "mlp", "hidden": (5,)}])
def test_a_package_of_another_encoder_or_head_comes_back_as_it_was(tmp_path, changes):
    options = NetworkOptions(**{"hidden": (16, 16), **changes})
    network = PolicyNetwork(OBSERVATION_SIZE, ACTION_COUNT, options)
    network.initialise(torch.Generator().manual_seed(1))
    package = PolicyPackage(network, make().statistics)
    loaded = PolicyPackage.load(package.save(tmp_path / "p"))
    assert loaded.network.options == options
    assert loaded.digest == package.digest
    for mine, theirs in zip(package.act(*inputs()), loaded.act(*inputs()), strict=True):
        assert mine.tobytes() == theirs.tobytes()
    said = json.loads((tmp_path / "p" / "package.json").read_text())["network"]
    assert {name: said[name] for name in changes if name != "hidden"} == {
        name: value for name, value in changes.items() if name != "hidden"
    }


@pytest.mark.parametrize(("field", "value"), [("encoder", "transformer"), ("actor_head", "cosine"), ("memory", -1)])
def test_an_unknown_encoder_is_named(tmp_path, field, value):
    file = make().save(tmp_path / "p") / "package.json"
    content = json.loads(file.read_text())
    content["network"][field] = value
    content["digest"] = content_digest(content)
    file.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=field):
        PolicyPackage.load(tmp_path / "p")


def test_features_that_never_move_and_one_row_are_no_trouble():
    """A column without variance keeps its scale of 1, so that what it ever shows is a finite input."""
    package = make()
    statistics = package.statistics
    statistics.m2[:3] = 0.0
    again = PolicyPackage(package.network, statistics)
    observation, last_action, time, mask = inputs(1)
    assert np.isfinite(again.act(observation, last_action, time, mask).value).all()
    assert again.network.scale[:3].tolist() == [1.0, 1.0, 1.0]
    assert len(OBSERVATION_NAMES) == again.network.encoded_size - 4
