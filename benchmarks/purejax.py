"""PPO as one compiled JAX program, in the style of PureJaxRL (Lu et al., 2022). JAX goes into a folder of its own.

Environments, rollout, advantages, epochs and minibatches are ``lax.scan`` over ``vmap``, and Python takes no part
between the first step and the last. As PureJaxRL does, an episode that reaches the step limit counts as ended: its last
state is not bootstrapped. The loss of the value is clipped, and halved once more than that of Stable-Baselines3.
Equations and constants of the environment are those of :mod:`benchmarks.cartpole`, in float32.
"""

from __future__ import annotations

import math
import os
import time
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks import cartpole
from benchmarks.fetched import fetch, folder
from benchmarks.measure import Contestant

if TYPE_CHECKING:
    from benchmarks.training import Schedule

VERSION = "0.10.2"
PACKAGES = (f"jax=={VERSION}", f"jaxlib=={VERSION}", "ml_dtypes==0.5.4", "opt_einsum==3.4.0")
NAME = "PPO in JAX, PureJaxRL style, its own CartPole"
VALUE_WEIGHT, GRADIENT_NORM, EPSILON, DECAY = 0.5, 0.5, 1e-5, (0.9, 0.999)

Array = Any  # of JAX, which the type checker does not know
Carts = tuple[Array, Array, Array]
"""state, steps and running return of each environment"""
Learner = tuple[Any, Any, Any, Array]
"""weights; the mean of their gradient, and of its square, for Adam; how many steps it took"""


def make_importable(*, smoke: bool) -> str:
    """Puts JAX behind everything installed, fetching it at first use; says why where it cannot be had.

    It is 400 MB: a smoke run, which tests make anew on every machine, takes it only where it is already.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    target = folder(f"jax-{VERSION}")
    if smoke and not target.is_dir():
        return "a smoke run does not fetch it"
    if why_not := fetch(target, PACKAGES):
        return why_not
    try:
        import jax  # type: ignore[import-not-found]  # noqa: F401
    except ImportError as error:
        return f"jax {VERSION} does not import here: {error}"
    return ""


def contestant(schedule: Schedule, cores: int) -> Contestant:
    """A turn is one whole training of new weights; it is compiled here, in ``compile_seconds`` that no turn counts."""
    import jax

    del cores  # XLA makes as many threads as the process may use cores; benchmarks.worker pinned it
    key = jax.random.key(0)
    began = time.perf_counter()
    compiled = jax.jit(Program(schedule).train).lower(key).compile()
    seconds = round(time.perf_counter() - began, 1)
    notes: dict[str, Any] = {"updates": schedule.updates, "compile_seconds": seconds}

    def turn() -> float:
        began = time.perf_counter()
        _, returns = jax.block_until_ready(compiled(key))
        seconds = time.perf_counter() - began
        last = float(returns[-1])
        notes["mean_return_at_the_end"] = round(last, 1) if math.isfinite(last) else None
        return seconds

    return Contestant(NAME, schedule.steps, turn, schedule.size, lambda: notes)


class Samples(NamedTuple):
    """What a rollout leaves, [steps, N]; a minibatch is one row of it."""

    observation: Array
    action: Array
    log_probability: Array
    value: Array
    reward: Array
    ended: Array


def advance(np: Any, state: Array, action: Array) -> tuple[Array, Array]:  # noqa: ANN401 - a module
    """One Euler step of [..., 4] in NumPy or in ``jax.numpy``; true where the pole has fallen or the cart has left."""
    velocity, angle, angular = (state[..., index] for index in (1, 2, 3))
    force = np.where(action == 1, cartpole.FORCE, -cartpole.FORCE)
    cosine, sine = np.cos(angle), np.sin(angle)
    push = (force + cartpole.POLE_MOMENT * angular**2 * sine) / cartpole.TOTAL_MASS
    inertia = cartpole.HALF_LENGTH * (4.0 / 3.0 - cartpole.MASS_POLE * cosine**2 / cartpole.TOTAL_MASS)
    turn = (cartpole.GRAVITY * sine - cosine * push) / inertia
    acceleration = push - cartpole.POLE_MOMENT * turn * cosine / cartpole.TOTAL_MASS
    after = state + cartpole.SECONDS * np.stack([velocity, acceleration, angular, turn], axis=-1)
    fallen = (np.abs(after[..., 0]) > cartpole.POSITION_LIMIT) | (np.abs(after[..., 2]) > cartpole.ANGLE_LIMIT)
    return after, fallen


class Program:
    """What is compiled: :meth:`train`, with all sizes fixed."""

    def __init__(self, schedule: Schedule) -> None:
        import jax

        self.jax, self.np, self.schedule = jax, jax.numpy, schedule

    def train(self, key: Array) -> tuple[Any, Array]:
        """Weights, and for each update the mean return of the episodes that ended in it (NaN where none did)."""
        key, *keys = self.jax.random.split(key, 4)
        sizes = (len(cartpole.NAMES), *self.schedule.hidden)
        weights = self.network(keys[0], (*sizes, cartpole.ACTIONS), 0.01), self.network(keys[1], (*sizes, 1), 1.0)
        nothing, zeros = self.jax.tree.map(self.np.zeros_like, weights), self.np.zeros(self.schedule.size)
        state = self.jax.random.uniform(keys[2], (self.schedule.size, sizes[0]), minval=-0.05, maxval=0.05)
        start = (weights, nothing, nothing, self.np.zeros(())), (state, zeros, zeros), key
        (learner, _, _), returns = self.jax.lax.scan(self.update, start, None, self.schedule.updates)
        return learner[0], returns

    def network(self, key: Array, sizes: tuple[int, ...], last: float) -> list[tuple[Array, Array]]:
        """Orthogonal layers times √2, the last one times ``last``; biases are zero."""
        gains, orthogonal = [math.sqrt(2.0)] * (len(sizes) - 2) + [last], self.jax.nn.initializers.orthogonal
        layers = zip(self.jax.random.split(key, len(gains)), pairwise(sizes), gains, strict=True)
        return [(orthogonal(gain)(one, shape), self.np.zeros(shape[1])) for one, shape, gain in layers]

    def forward(self, weights: Any, observation: Array) -> tuple[Array, Array]:  # noqa: ANN401 - a tree
        """Log probabilities of the actions, and the value."""
        found = []
        for network in weights:
            hidden = observation
            for matrix, bias in network[:-1]:
                hidden = self.np.tanh(hidden @ matrix + bias)
            found.append(hidden @ network[-1][0] + network[-1][1])
        return self.jax.nn.log_softmax(found[0]), found[1][..., 0]

    def step(self, key: Array, carts: Carts, action: Array) -> tuple[Carts, Array, Array, Array]:
        """One environment, reward, end and return of the ended episode; the next begins in the same step."""
        state, fallen = advance(self.np, carts[0], action)
        reward = self.np.ones(())
        more = state, carts[1] + 1, carts[2] + reward
        ended = fallen | (more[1] >= cartpole.STEP_LIMIT)
        new = self.jax.random.uniform(key, state.shape, minval=-0.05, maxval=0.05), 0.0, 0.0
        return self.jax.tree.map(partial(self.np.where, ended), new, more), reward, ended, ended * more[2]

    def update(self, start: tuple[Learner, Carts, Array], _: None) -> tuple[tuple[Learner, Carts, Array], Array]:
        """One rollout and the epochs over it; the mean return of the episodes that ended in it."""
        learner, carts, key = start
        np, lax, random = self.np, self.jax.lax, self.jax.random

        def collect(start: tuple[Carts, Array], _: None) -> tuple[tuple[Carts, Array], tuple[Samples, Array]]:
            carts, key = start
            key, draw, steps = random.split(key, 3)
            log_probabilities, value = self.forward(learner[0], carts[0])
            action = random.categorical(draw, log_probabilities)
            chosen = np.take_along_axis(log_probabilities, action[:, None], 1)[:, 0]
            after, reward, ended, total = self.jax.vmap(self.step)(random.split(steps, len(action)), carts, action)
            return (after, key), (Samples(carts[0], action, chosen, value, reward, ended), total)

        (carts, key), (samples, totals) = lax.scan(collect, (carts, key), None, self.schedule.rollout_steps)
        advantage = self.advantages(samples, self.forward(learner[0], carts[0])[1])
        flat = self.jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (samples, advantage))

        def epoch(learner: Learner, key: Array) -> tuple[Learner, None]:
            order = random.permutation(key, len(flat[1])).reshape(-1, self.schedule.minibatch)
            parts = self.jax.tree.map(lambda x: x[order], flat)
            return lax.scan(self.learn, learner, parts)[0], None

        keys = random.split(key, self.schedule.epochs + 1)
        return (lax.scan(epoch, learner, keys[1:])[0], carts, keys[0]), totals.sum() / samples.ended.sum()

    def advantages(self, samples: Samples, last: Array) -> Array:
        """Generalised advantage estimates, from the last step to the first."""
        discount, decay = self.schedule.discount, self.schedule.gae_lambda

        def back(after: tuple[Array, Array], one: Samples) -> tuple[tuple[Array, Array], Array]:
            advantage, value = after
            goes_on = discount * (1.0 - one.ended)
            advantage = one.reward + goes_on * value - one.value + goes_on * decay * advantage
            return (advantage, one.value), advantage

        return self.jax.lax.scan(back, (self.np.zeros_like(last), last), samples, reverse=True)[1]

    def loss(self, weights: Any, samples: Samples, advantage: Array) -> Array:  # noqa: ANN401 - a tree
        """Of the clipped ratio and the clipped value; entropy has no weight."""
        np, clip = self.np, self.schedule.clip
        log_probabilities, value = self.forward(weights, samples.observation)
        chosen = np.take_along_axis(log_probabilities, samples.action[:, None], 1)[:, 0]
        ratio = np.exp(chosen - samples.log_probability)
        scaled = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        policy = -np.minimum(ratio * scaled, np.clip(ratio, 1.0 - clip, 1.0 + clip) * scaled).mean()
        aim, near = advantage + samples.value, samples.value + np.clip(value - samples.value, -clip, clip)
        return policy + VALUE_WEIGHT * 0.5 * np.maximum((value - aim) ** 2, (near - aim) ** 2).mean()

    def learn(self, learner: Learner, part: tuple[Samples, Array]) -> tuple[Learner, None]:
        """One step of Adam on one minibatch, its gradient clipped by its norm over all weights."""
        np, each, (weights, mean, square, count) = self.np, self.jax.tree.map, learner
        gradient = self.jax.grad(self.loss)(weights, *part)
        norm = np.sqrt(sum((one**2).sum() for one in self.jax.tree.leaves(gradient)))
        gradient = each(lambda g: g * np.minimum(1.0, GRADIENT_NORM / norm), gradient)
        mean = each(lambda m, g: DECAY[0] * m + (1.0 - DECAY[0]) * g, mean, gradient)
        square = each(lambda s, g: DECAY[1] * s + (1.0 - DECAY[1]) * g * g, square, gradient)
        rate, large = self.schedule.learning_rate / (1.0 - DECAY[0] ** (count + 1)), 1.0 - DECAY[1] ** (count + 1)
        weights = each(lambda w, m, s: w - rate * m / (np.sqrt(s / large) + EPSILON), weights, mean, square)
        return (weights, mean, square, count + 1), None
