"""Stable-Baselines3's PPO and sb3-contrib's MaskablePPO: no dependencies, but fetched into folders of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from benchmarks import stable_baselines
from benchmarks.fetched import fetch, folder
from benchmarks.peers_settings import CLIP, DISCOUNT, GAE_LAMBDA, GRADIENT_NORM, HIDDEN, VALUE_WEIGHT

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from benchmarks.peers_line import Floats, PreparedLine
    from benchmarks.peers_recorder import Recorder
    from benchmarks.peers_settings import Setting

CONTRIB = "2.9.2"


def make_importable() -> str:
    """Puts both behind everything installed, fetching them at first use; says why where they cannot be had."""
    if why_not := stable_baselines.make_importable():
        return why_not
    if why_not := fetch(folder(f"sb3-contrib-{CONTRIB}"), (f"sb3-contrib=={CONTRIB}",)):
        return why_not
    try:
        import sb3_contrib  # type: ignore[import-not-found]  # noqa: F401
    except ImportError as error:
        return f"sb3-contrib {CONTRIB} does not import here: {error}"
    return ""


def versions() -> dict[str, str]:
    """Of both."""
    return {"stable-baselines3": stable_baselines.VERSION, "sb3-contrib": CONTRIB}


def train(envs: PreparedLine, setting: Setting, seed: int, recorder: Recorder, *, masked: bool) -> Any:  # noqa: ANN401
    """Trains until the recorder says that it is enough; the model of the last update."""
    if masked:
        from sb3_contrib import MaskablePPO as Kind
    else:
        from stable_baselines3 import PPO as Kind  # noqa: N811 - an initialism, no constant
    torch.set_num_threads(setting.threads)
    around = vectorised(envs, seed)
    recorder.begin()
    model = Kind(
        "MlpPolicy",
        around,
        n_steps=setting.rollout_steps,
        batch_size=setting.minibatch,
        n_epochs=setting.epochs,
        learning_rate=_falling(setting, recorder) if setting.anneal else setting.learning_rate,
        gamma=DISCOUNT,
        gae_lambda=GAE_LAMBDA,
        clip_range=CLIP,
        ent_coef=setting.entropy_weight,
        vf_coef=VALUE_WEIGHT,
        max_grad_norm=GRADIENT_NORM,
        policy_kwargs=_network(setting),
        device="cpu",
        seed=seed,
    )
    model.learn(10**12, callback=_looking(recorder))
    return model


def weights_of(model: Any) -> dict[str, torch.Tensor]:  # noqa: ANN401 - a model of theirs
    """A copy."""
    return {name: tensor.detach().clone() for name, tensor in model.policy.state_dict().items()}


def logits_of(model: Any, x: Floats) -> Floats:  # noqa: ANN401
    """f32[N, A] before the mask."""
    with torch.no_grad():
        logits: Floats = model.policy.get_distribution(torch.from_numpy(x)).distribution.logits.numpy()
    return logits


def _falling(setting: Setting, recorder: Recorder) -> Any:  # noqa: ANN401 - a schedule
    return lambda _: setting.learning_rate * (1.0 - recorder.progress)


def _network(setting: Setting) -> dict[str, Any]:
    """Two hidden layers for each of actor and critic, or a features extractor of two layers that both share."""
    from stable_baselines3.common.torch_layers import BaseFeaturesExtractor

    activation = nn.Tanh if setting.activation == "tanh" else nn.ReLU
    if not setting.shared:
        return {"net_arch": {"pi": list(HIDDEN), "vf": list(HIDDEN)}, "activation_fn": activation}

    class Trunk(BaseFeaturesExtractor):  # type: ignore[misc]
        """What both read."""

        def __init__(self, observation_space: Any) -> None:  # noqa: ANN401
            super().__init__(observation_space, HIDDEN[1])
            inputs = observation_space.shape[0]
            self.layers = nn.Sequential(
                nn.Linear(inputs, HIDDEN[0]), activation(), nn.Linear(HIDDEN[0], HIDDEN[1]), activation()
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """f32[N, width]."""
            hidden: torch.Tensor = self.layers(x)
            return hidden

    return {"net_arch": [], "features_extractor_class": Trunk, "activation_fn": activation}


def _looking(recorder: Recorder) -> Any:  # noqa: ANN401 - a callback
    """Tells the recorder of every update, and ends the run when it says so."""
    from stable_baselines3.common.callbacks import BaseCallback

    class Looking(BaseCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.over = False

        def _on_rollout_start(self) -> None:
            self.over = recorder.look(self.num_timesteps, lambda: weights_of(self.model))

        def _on_step(self) -> bool:
            return not self.over

    return Looking()


def vectorised(envs: PreparedLine, seed: int) -> Any:  # noqa: ANN401, C901 - a class; its base is known at run time only
    """The line as Stable-Baselines3's ``VecEnv``, with ``action_masks`` for MaskablePPO."""
    from stable_baselines3.common.vec_env import VecEnv

    class Adapted(VecEnv):  # type: ignore[misc]
        def __init__(self) -> None:
            self.nothing: dict[str, Any] = {}
            self.found: tuple[Any, ...] = ()
            super().__init__(envs.num_envs, envs.single_observation_space, envs.single_action_space)

        def reset(self) -> Floats:
            return envs.reset(seed=seed)[0]

        def step_async(self, actions: npt.NDArray[np.int64]) -> None:
            self.found = envs.step(actions)

        def step_wait(self) -> tuple[Any, ...]:
            observation, reward, terminated, truncated, info = self.found
            infos: list[dict[str, Any]] = [self.nothing] * self.num_envs
            for row in np.flatnonzero(truncated & ~terminated):
                last = info["final_prepared"][row].copy()
                infos[row] = {"terminal_observation": last, "TimeLimit.truncated": True}
            return observation, reward.copy(), terminated | truncated, infos

        def close(self) -> None:
            envs.close()

        def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:  # noqa: ANN401 - its interface
            del indices
            return [getattr(self, attr_name, None)] * self.num_envs

        def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:  # noqa: ANN401
            raise NotImplementedError(attr_name)

        def env_method(self, method_name: str, *arguments: Any, indices: Any = None, **more: Any) -> list[Any]:  # noqa: ANN401
            del arguments, indices, more
            if method_name == "action_masks":
                return list(envs.mask)
            raise NotImplementedError(method_name)

        def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> Sequence[bool]:  # noqa: ANN401
            del wrapper_class, indices
            return [False] * self.num_envs

    return Adapted()
