"""The training run, from top to bottom: warm-up, policy gradient, validation, checkpoints, circuit breakers."""

from __future__ import annotations

import contextlib
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from agentpipe.environments.layout import ACTION_NAMES, SIMULATOR_VERSION
from agentpipe.errors import CheckpointError, LearningError
from agentpipe.learning import checkpoint as checkpoints
from agentpipe.learning.fused import SegmentedGradient
from agentpipe.learning.gates import Breaker, GateFigure, WarmUpFigures, training_gate, warm_up_gate
from agentpipe.learning.imitation import warm_up
from agentpipe.learning.interruption import deferred_signals
from agentpipe.learning.metrics import Events, Utilisation
from agentpipe.learning.network import PolicyNetwork
from agentpipe.learning.options import TrainingOptions, as_json, share_at
from agentpipe.learning.package import PolicyPackage
from agentpipe.learning.ppo import prepare, update
from agentpipe.learning.rollout import Rollout, collect
from agentpipe.learning.state import TrainingState
from agentpipe.learning.workers import Workers
from agentpipe.progress import silent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from agentpipe.environments.demonstrator import Expert
    from agentpipe.environments.pool import LinePool
    from agentpipe.learning.normalisation import ObservationStatistics
    from agentpipe.progress import Progress

Reason = Literal["target", "budget", "patience", "gate", "interrupted", "time"]


@dataclass(frozen=True)
class TrainingResult:
    """What a run ended with."""

    package: PolicyPackage
    """the best validated policy (the last good one where nothing was validated)"""
    package_path: Path
    """where it was published"""
    checkpoint: Path
    """the last checkpoint; a run with the same options goes on from it"""
    reason: Reason
    """why the run ended"""
    explanation: str
    """the same in a sentence"""
    best_validation: float | None
    """score of the package on the validation split"""
    validations: tuple[tuple[int, float], ...]
    """update, score"""
    updates: int
    """done in total, earlier parts of a resumed run included"""
    environment_steps: int
    """of the policy gradient, likewise"""
    steps_per_second: float
    """environment steps over wall time of all updates of this process: collecting, learning, logging"""
    seconds: float
    """wall time of this process's part, everything included"""
    warm_up: WarmUpFigures | None
    """figures of gate 2"""
    gates: tuple[GateFigure, ...]
    """gates 2 and 4"""
    update_log: tuple[dict[str, Any], ...]
    """one row an update"""
    tensorboard: Path
    """folder of the event files"""


def train(  # noqa: PLR0913 - one flat call; all but three arguments have a default
    pool: LinePool,
    statistics: ObservationStatistics,
    options: TrainingOptions,
    *,
    directory: Path,
    expert: Expert | None = None,
    validate: Callable[[PolicyPackage], float] | None = None,
    initial: PolicyPackage | None = None,
    resume: Path | None = None,
    parent: str | None = None,
    provenance: dict[str, Any] | None = None,
    configuration_digest: str = "",
    simulator_version: str = SIMULATOR_VERSION,
    action_names: Sequence[str] = ACTION_NAMES,
    stop: Callable[[], bool] | None = None,
    progress: Progress = silent,
) -> TrainingResult:
    """Trains a policy in ``pool``.

    Args:
        pool: all training environments; it is reset, or restored when resuming.
        statistics: of observations; frozen into the policy.
        options: everything that can be chosen.
        directory: gets ``checkpoints/``, ``package/`` and ``tensorboard/``.
        expert: is cloned before the policy gradient, if the options ask for a warm-up.
        validate: scores a policy on the validation split (higher is better, 1 is perfect); never sees the hold-out.
        initial: weights to start from; there is no warm-up then.
        resume: checkpoint to go on from; everything else must be as it was.
        parent: digest of the policy that this one descends from.
        provenance: recorded in the package as it is.
        configuration_digest: of all settings; recorded, and checked when resuming.
        simulator_version: recorded in the package.
        action_names: A names.
        stop: asked after every update; true ends the run with a checkpoint.
        progress: told after every update.

    Returns:
        The best policy, published, with all figures. SIGTERM and SIGINT wait for the checkpoint after the update.

    Raises:
        NonFiniteError: at the first NaN or infinity; the last checkpoint stays.
        CheckpointError: ``resume`` is damaged or was made under other options.
    """
    context = {"parent": parent, "configuration_digest": configuration_digest, "provenance": provenance or {}}
    with contextlib.ExitStack() as stack:
        told_to_end = stack.enter_context(deferred_signals(signal.SIGTERM, signal.SIGINT))
        # From the first weight on: even an orthogonal matrix has other last bits when two threads make it.
        stack.enter_context(_single_threaded_torch())
        workers = stack.enter_context(Workers(options.threads))
        state = TrainingState(statistics, len(action_names), pool.size, options)
        run = _Run(pool, state, workers, directory, context, tuple(action_names), simulator_version, validate, progress)
        if resume is not None:
            run.resume(resume)
        run.events = stack.enter_context(Events(directory / "tensorboard", _resume_at(state, resume)))
        if resume is None:
            run.start(initial, expert)
        reason, explanation = run.loop(lambda: told_to_end() or (stop is not None and stop()))
        return run.finish(reason, explanation)


@contextlib.contextmanager
def _single_threaded_torch() -> Iterator[None]:
    """One thread an operation: the workers share the work in larger pieces."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _resume_at(state: TrainingState, resume: Path | None) -> int | None:
    return None if resume is None else state.counters.environment_steps + 1


class _Run:
    """One run; holds what its steps share."""

    events: Events

    def __init__(  # noqa: PLR0913, PLR0917 - private, see train
        self,
        pool: LinePool,
        state: TrainingState,
        workers: Workers,
        directory: Path,
        context: dict[str, Any],
        action_names: tuple[str, ...],
        simulator_version: str,
        validate: Callable[[PolicyPackage], float] | None,
        progress: Progress,
    ) -> None:
        self.pool, self.state, self.options = pool, state, state.options
        self.directory, self.context = directory, context
        self.action_names, self.simulator_version = action_names, simulator_version
        self.validate, self.progress = validate, progress
        self.workers = workers
        ppo = self.options.ppo
        self.gradient = SegmentedGradient(state.network, ppo.clip, ppo.value_weight, workers)
        self.breaker = Breaker(self.options.gates)
        self.utilisation = Utilisation()
        self.started = time.monotonic()
        self.spent, self.steps = 0.0, 0
        self.checkpoint: Path | None = None

    # -- beginning ---------------------------------------------------------------------------------------------

    def resume(self, path: Path) -> None:
        found = checkpoints.load(path)
        if found.content.get("configuration_digest") != self.context["configuration_digest"]:
            remedy = "start anew, or resume with the configuration that it was made with"
            raise CheckpointError("made under another configuration", file=path, field="configuration", remedy=remedy)
        self.state.restore(found, self.pool, path)
        self.breaker.streaks = self.state.counters.streaks
        self.checkpoint = path

    def start(self, initial: PolicyPackage | None, expert: Expert | None) -> None:
        state, options = self.state, self.options
        if initial is not None:
            self._take_weights(initial)
        elif options.warm_up is not None and expert is not None and options.warm_up.episodes > 0:
            state.warm_up = warm_up(self.pool, expert, state, options.warm_up, options.ppo, self.workers, self.progress)
            self.events.write({f"warm_up/{name}": v for name, v in vars(state.warm_up).items() if name != "expert"}, 0)
            failed = [figure for figure in warm_up_gate(state.warm_up, options.gates) if figure.status == "fail"]
            if failed and options.gates.warm_up_breaks:
                state.counters.stopped = f"gate 2: {failed[0].name} {failed[0].value:.3g} beyond {failed[0].alarm:g}"
        if state.warm_up is None:
            self.pool.reset()
        # After a warm-up the pool goes on from where the expert left it: its environments are out of step by then, so
        # that every rollout holds all segments.
        state.good = state.weights()
        self._look()
        if state.warm_up is not None:
            self._save()  # an interrupted run does not warm up again

    def _take_weights(self, initial: PolicyPackage) -> None:
        theirs, mine = initial.network.state_dict(), self.state.network.state_dict()
        if {name: tensor.shape for name, tensor in theirs.items()} != {
            name: tensor.shape for name, tensor in mine.items()
        }:
            raise LearningError(
                "the initial policy has another network",
                field="network",
                remedy="train with the network options of the parent",
            )
        self.state.network.load_state_dict(theirs)

    # -- the loop ----------------------------------------------------------------------------------------------

    def loop(self, stop: Callable[[], bool]) -> tuple[Reason, str]:
        state, ppo = self.state, self.options.ppo
        rollout: Rollout | None = None
        while True:
            ended = self._ended()
            if ended is None and stop():
                ended = ("interrupted", f"told to end after update {state.counters.update}")
            if ended is not None:
                self._save()
                return ended
            if rollout is None:
                rollout = Rollout(ppo.rollout_steps, self.pool.size, state.network.encoded_size, len(self.action_names))
            self._update(rollout)
            counters = state.counters
            if (
                counters.update % self.options.validate_every == 0
                or counters.environment_steps >= self.options.budget_steps
            ):
                self._look()
            if counters.update % self.options.checkpoint_every == 0:
                self._save()

    def _ended(self) -> tuple[Reason, str] | None:
        counters, options = self.state.counters, self.options
        best = counters.best_score
        if counters.stopped:
            return "gate", counters.stopped
        if options.target is not None and best is not None and best >= options.target:
            return "target", f"validation {best:.4f} reached the target {options.target:g}"
        if options.patience is not None and counters.looks >= options.patience:
            return "patience", f"no gain in {counters.looks} looks at the validation split"
        if counters.environment_steps >= options.budget_steps:
            return "budget", f"{counters.environment_steps} environment steps done"
        if options.max_seconds is not None and time.monotonic() - self.started > options.max_seconds:
            return "time", f"{options.max_seconds:g} seconds are over"
        return None

    def _update(self, rollout: Rollout) -> None:
        state, ppo, counters = self.state, self.options.ppo, self.state.counters
        began = time.monotonic()
        done = counters.environment_steps / self.options.budget_steps
        rate = ppo.learning_rate * share_at(ppo.schedule, done, ppo.final_learning_rate_share)
        entropy_weight = ppo.entropy_weight * share_at("linear", done, ppo.final_entropy_share)
        for group in state.optimiser.param_groups:
            group["lr"] = rate
        first_step = counters.update * ppo.rollout_steps
        episodes = collect(self.pool, state.network, rollout, state.uniforms, self.workers, step=first_step)
        collected = time.monotonic()
        batch, figures, _, _ = prepare(rollout, state.scaler, ppo)
        result = update(
            state.network,
            state.optimiser,
            self.gradient,
            batch,
            ppo,
            state.generator,
            entropy_weight=entropy_weight,
            number=counters.update + 1,
        )
        first = counters.environment_steps
        counters.update += 1
        counters.environment_steps += rollout.steps * rollout.size
        losses = {**figures, **result.losses, "charts/learning_rate": rate, "charts/entropy_weight": entropy_weight}
        complaint = self.breaker.observe(losses)
        counters.streaks, counters.stopped = dict(self.breaker.streaks), complaint or ""
        if self.breaker.healthy:
            state.good = state.weights()
        seconds = time.monotonic() - began
        self.spent += seconds
        self.steps += rollout.steps * rollout.size
        row = {"update": counters.update, "first_sample": first, "last_sample": counters.environment_steps - 1}
        norms = {f"gradient_norms/{name}": norm for name, norm in result.gradient_norms.items()}
        state.updates.append({**row, **losses, **episodes.figures(), **norms})
        use = {"seconds": seconds, "collect_seconds": collected - began, **self.utilisation.sample()}
        state.utilisation.append({"update": counters.update, **use})
        speed = {"charts/SPS": self.steps / self.spent, **{f"utilisation/{name}": value for name, value in use.items()}}
        self.events.write({**losses, **episodes.figures(), **norms, **speed}, counters.environment_steps)
        self._tell(losses, episodes.figures())

    def _tell(self, losses: dict[str, float], episodes: dict[str, float]) -> None:
        counters = self.state.counters
        parts = [f"update {counters.update}", f"{self.steps / self.spent / 1e3:.0f} k steps/s"]
        if episodes:
            parts.append(f"success {episodes['charts/success_rate']:.1%}")
        if counters.best_score is not None:
            parts.append(f"best validation {counters.best_score:.1%}")
        parts.append(f"entropy {losses['losses/entropy']:.2f}")
        done = min(counters.environment_steps, self.options.budget_steps)
        self.progress("training", done, self.options.budget_steps, ", ".join(parts))

    def _look(self) -> None:
        """Looks at the validation split; keeps the weights when they are the best so far."""
        if self.validate is None:
            return
        state, counters = self.state, self.state.counters
        score = float(self.validate(self._package(state.weights())))
        counters.validations.append([counters.update, score])
        self.events.write({"charts/validation": score}, counters.environment_steps)
        if counters.best_score is None or score > counters.best_score:
            counters.best_score, counters.best_update, counters.looks = score, counters.update, 0
            state.best = state.weights()
        else:
            counters.looks += 1

    # -- keeping -----------------------------------------------------------------------------------------------

    def _package(self, weights: dict[str, torch.Tensor]) -> PolicyPackage:
        state, counters = self.state, self.state.counters
        network = PolicyNetwork(len(state.statistics.names), len(self.action_names), self.options.network)
        network.load_state_dict(weights)
        provenance = {
            **self.context["provenance"],
            "parent": self.context["parent"],
            "configuration_digest": self.context["configuration_digest"],
            "training_options": as_json(self.options),
            "update": counters.best_update if state.best else counters.update,
            "environment_steps": counters.environment_steps,
            "best_validation": counters.best_score,
        }
        names = state.statistics.names
        return PolicyPackage(network, state.statistics, names, self.action_names, self.simulator_version, provenance)

    def _save(self) -> None:
        """Writes a checkpoint, unless the last one is of this very update."""
        number = f"update-{self.state.counters.update:06d}-"
        if self.checkpoint is not None and self.checkpoint.name.startswith(number):
            return
        made = self.state.to_checkpoint(self.pool, self.context)
        self.checkpoint = checkpoints.save(made, self.directory / "checkpoints", keep=self.options.keep_checkpoints)
        self.events.flush()

    def finish(self, reason: Reason, explanation: str) -> TrainingResult:
        state, counters = self.state, self.state.counters
        package = self._package(state.chosen())
        path = package.save(self.directory / "package")
        validations = tuple((int(number), score) for number, score in counters.validations)
        gates = () if state.warm_up is None else warm_up_gate(state.warm_up, self.options.gates)
        if state.updates:
            gates = (*gates, *training_gate(state.updates[-1], validations, self.options.gates))
        assert self.checkpoint is not None
        return TrainingResult(
            package=package,
            package_path=path,
            checkpoint=self.checkpoint,
            reason=reason,
            explanation=explanation,
            best_validation=counters.best_score,
            validations=validations,
            updates=counters.update,
            environment_steps=counters.environment_steps,
            steps_per_second=self.steps / self.spent if self.spent else 0.0,
            seconds=time.monotonic() - self.started,
            warm_up=state.warm_up,
            gates=gates,
            update_log=tuple(state.updates),
            tensorboard=self.directory / "tensorboard",
        )
