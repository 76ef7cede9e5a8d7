"""The state of a training run: everything that the next update depends on, to and from a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
from pydantic import Field

from agentpipe.errors import CheckpointError, LearningError
from agentpipe.learning.checked import check_fields
from agentpipe.learning.checkpoint import Checkpoint
from agentpipe.learning.gradient.rewards import RewardScaler
from agentpipe.learning.options import as_json
from agentpipe.learning.policy.network import PolicyNetwork
from agentpipe.learning.policy.package import first_difference, load_weights
from agentpipe.learning.tensors import Arrays, adam_slots, required, unpack
from agentpipe.storage import digest_bytes

if TYPE_CHECKING:
    from agentpipe.environments.pool import LinePool
    from agentpipe.learning.gates import WarmUpFigures
    from agentpipe.learning.options import TrainingOptions
    from agentpipe.learning.policy.normalisation import ObservationStatistics
    from agentpipe.learning.policy.package import PolicyPackage

Number = Annotated[int, Field(ge=0, lt=2**62)]
_NAMED = {"rollouts": 1, "order": 2, "weights": 3, "replay": 4}


@dataclass
class Counters:
    """How far a run has come."""

    update: Number = 0
    """updates done"""
    environment_steps: Number = 0
    """steps of all environments together"""
    looks: Number = 0
    """looks at the validation split since the best one"""
    best_score: float | None = None
    """best validation score"""
    best_update: Number = 0
    """update whose weights gave it"""
    best_steps: Number = 0
    """steps that they were trained on"""
    good_update: Number = 0
    """last update after which no circuit breaker complained"""
    good_steps: Number = 0
    """steps until then"""
    validations: list[Annotated[list[float], Field(min_length=2, max_length=2)]] = field(default_factory=list)
    """update, score"""
    streaks: dict[str, int] = field(default_factory=dict)
    """of the circuit breaker"""
    stopped: str = ""
    """why a gate stopped the run"""


class TrainingState:
    """Networks, optimiser, random streams, reward scale, counters and logs of one run.

    Args:
        statistics: normalisation, frozen.
        action_count: A.
        size: environments N.
        options: of the run.
    """

    def __init__(
        self, statistics: ObservationStatistics, action_count: int, size: int, options: TrainingOptions
    ) -> None:
        self.options = options
        self.statistics = statistics
        self.network = PolicyNetwork(len(statistics.names), action_count, options.network)
        self.network.initialise(torch.Generator().manual_seed(seed_of(options.seed, "weights")))
        self.network.set_statistics(statistics)
        self.layers = layers(self.network)
        groups = [{"params": [parameter for _, parameter in layer]} for layer in self.layers]
        self.optimiser = torch.optim.Adam(groups, lr=options.ppo.learning_rate, eps=1e-5, fused=True)
        self.generator = torch.Generator().manual_seed(seed_of(options.seed, "order"))
        self.uniforms = np.random.Generator(np.random.PCG64(seed_of(options.seed, "rollouts")))
        self.scaler = RewardScaler(size, options.ppo.discount, options.ppo.reward_clamp)
        self.counters = Counters()
        self.warm_up: WarmUpFigures | None = None
        self.best: dict[str, torch.Tensor] = {}
        self.good = self.weights()
        self.updates: list[dict[str, Any]] = []
        self.utilisation: list[dict[str, Any]] = []

    def set_rates(self, top: float, bottom_share: float) -> None:
        """Rate of each layer: ``top`` at the heads, ``top * bottom_share`` at the bottom, geometric between."""
        highest = max(1, len(self.layers) - 1)
        for depth, group in enumerate(self.optimiser.param_groups):
            group["lr"] = top * bottom_share ** ((highest - depth) / highest)

    def weights(self) -> dict[str, torch.Tensor]:
        """A copy of the network's weights."""
        return {name: tensor.detach().clone() for name, tensor in self.network.state_dict().items()}

    def keep_good(self) -> None:
        """Remembers the weights of now as the last good ones."""
        self.good, counters = self.weights(), self.counters
        counters.good_update, counters.good_steps = counters.update, counters.environment_steps

    def keep_best(self, score: float) -> None:
        """Remembers the weights of now as the ones that validation prefers."""
        self.best, counters = self.weights(), self.counters
        counters.best_score, counters.looks = score, 0
        counters.best_update, counters.best_steps = counters.update, counters.environment_steps

    def chosen(self) -> tuple[dict[str, torch.Tensor], int, int]:
        """The weights that the run has to show, best validated or last good, with their update and steps."""
        counters = self.counters
        if self.best:
            return self.best, counters.best_update, counters.best_steps
        return self.good, counters.good_update, counters.good_steps

    def version(self) -> str:
        """Digest of the weights that play now."""
        return digest_bytes(b"".join(tensor.numpy().tobytes() for tensor in self.network.state_dict().values()))

    def require_same_network(self, initial: PolicyPackage, action_names: tuple[str, ...]) -> None:
        """Refuses weights to start from that are of another network than this one.

        Raises:
            LearningError: another encoder, head or size (names the option), actions of other names, or observations
                that are normalised otherwise.
        """
        theirs, mine = initial.network.state_dict(), self.network.state_dict()
        other = first_difference(as_json(self.options.network), as_json(initial.network.options))
        shapes = ({name: tensor.shape for name, tensor in state.items()} for state in (theirs, mine))
        if other or next(shapes) != next(shapes):
            name = f"network.{other}" if other else "network"
            remedy = "train with the network options of the parent"
            raise LearningError(f"the initial policy has another network: {name}", field=name, remedy=remedy)
        if tuple(initial.action_names) != action_names:
            remedy = "give the actions their names in the order of the package"
            raise LearningError("the initial policy names other actions", field="action_names", remedy=remedy)
        if initial.statistics.to_bytes() != self.statistics.to_bytes():
            remedy = "train with the statistics of the package: its weights mean nothing under others"
            text = "the initial policy has other observation statistics"
            raise LearningError(text, field="statistics", remedy=remedy)

    def to_checkpoint(self, pool: LinePool, context: dict[str, Any], further: dict[str, Arrays]) -> Checkpoint:
        """Everything, with the snapshot of ``pool``; ``context`` is added to the content, ``further`` to the arrays."""
        content = {
            **vars(self.counters),
            "warm_up": None if self.warm_up is None else vars(self.warm_up),
            "uniforms": self.uniforms.bit_generator.state,
            "options": self.options.decisive(),
            "options_digest": self.options.digest(),
            "learning_rate": float(self.optimiser.param_groups[-1]["lr"]),
            "observation_names": list(self.statistics.names),
            **context,
        }
        arrays: dict[str, Arrays] = {
            "network": _to_numpy(self.weights()),
            "best": _to_numpy(self.best),
            "good": _to_numpy(self.good),
            "optimiser": self._optimiser_arrays(),
            "random": {"order": self.generator.get_state().numpy()},
            "rewards": self.scaler.state(),
            "pool": {name: np.asarray(array) for name, array in pool.snapshot().items()},
            "statistics": unpack(self.statistics.to_bytes(), Path("statistics")),
            **further,
        }
        return Checkpoint(content, arrays, list(self.updates), list(self.utilisation))

    def _optimiser_arrays(self) -> Arrays:
        return {
            f"{name}/{key}": value.detach().numpy().copy()
            for name, parameter in self.network.named_parameters()
            for key, value in self.optimiser.state.get(parameter, {}).items()
        }

    def require_same_options(self, checkpoint: Checkpoint, path: Path) -> None:
        """Refuses to continue from ``checkpoint``; changes nothing.

        Raises:
            CheckpointError: it was made under other options or statistics; names the option.
        """
        content, arrays = checkpoint.content, checkpoint.arrays
        remedy = "start anew, or resume with the options that it was made with"
        if required(content, "options_digest", path) != self.options.digest():
            name = first_difference(self.options.decisive(), required(content, "options", path)) or "options"
            raise CheckpointError(f"made under other training options: {name}", file=path, field=name, remedy=remedy)
        mine = unpack(self.statistics.to_bytes(), path)
        if any(not np.array_equal(mine[name], arrays["statistics"].get(name, np.empty(0))) for name in mine):
            raise CheckpointError(
                "made with other observation statistics", file=path, field="statistics", remedy=remedy
            )

    def restore(self, checkpoint: Checkpoint, pool: LinePool, path: Path) -> None:
        """Continues from ``checkpoint``, once :meth:`require_same_options` let it pass; the pool gets its snapshot.

        Raises:
            CheckpointError: it does not fit network or pool.
        """
        content, arrays = checkpoint.content, checkpoint.arrays
        load_weights(self.network.state_dict(), arrays["network"], path / "network.safetensors")
        for name in ("best", "good"):
            setattr(self, name, self._restored(arrays[name], path / f"{name}.safetensors"))
        self._restore_optimiser(arrays["optimiser"], path / "optimiser.safetensors")
        self.generator.set_state(torch.from_numpy(required(arrays["random"], "order", path)))
        self.uniforms.bit_generator.state = required(content, "uniforms", path)
        self.scaler.restore(arrays["rewards"], path / "rewards.safetensors")
        self.counters = Counters(**{name: required(content, name, path) for name in Counters.__dataclass_fields__})
        check_fields(self.counters)
        self.updates, self.utilisation = checkpoint.updates, checkpoint.utilisation
        self.warm_up = _warm_up(required(content, "warm_up", path))
        pool.restore(arrays["pool"])

    def _restored(self, weights: Arrays, file: Path) -> dict[str, torch.Tensor]:
        """Weights of the network, or none."""
        if not weights:
            return {}
        kept = {name: torch.empty_like(tensor) for name, tensor in self.network.state_dict().items()}
        load_weights(kept, weights, file)
        return kept

    def _restore_optimiser(self, arrays: Arrays, file: Path) -> None:
        shapes = {name: tuple(parameter.shape) for layer in self.layers for name, parameter in layer}
        slots = adam_slots(shapes, arrays, file)
        state = {index: {slot: torch.from_numpy(array) for slot, array in own.items()} for index, own in slots.items()}
        self.optimiser.load_state_dict({**self.optimiser.state_dict(), "state": state})


def layers(network: PolicyNetwork) -> list[list[tuple[str, torch.nn.Parameter]]]:
    """The parameters that the policy gradient trains, with their names, from the encoder's first layer to the heads."""
    found: dict[int, list[tuple[str, torch.nn.Parameter]]] = {}
    for name, parameter in network.named_parameters():
        part, _, rest = name.partition(".")
        if part in {"perception", "memory"}:
            continue
        hidden = int(rest.split(".")[0]) + 1 if part in {"actor_hidden", "critic_hidden"} else 0
        depth = len(network.options.hidden) if part in {"actor_head", "critic_head"} else hidden
        found.setdefault(depth, []).append((name, parameter))
    return [found[depth] for depth in sorted(found)]


def seed_of(root: int, stream: str) -> int:
    """An own seed for each named stream."""
    return int(
        np.random.SeedSequence(root, spawn_key=(_NAMED[stream],)).generate_state(1, np.uint64)[0] >> np.uint64(1)
    )


def _to_numpy(weights: dict[str, torch.Tensor]) -> Arrays:
    return {name: tensor.detach().numpy() for name, tensor in weights.items()}


def _warm_up(content: dict[str, Any] | None) -> WarmUpFigures | None:
    from agentpipe.learning.gates import WarmUpFigures

    return None if content is None else WarmUpFigures(**content)
