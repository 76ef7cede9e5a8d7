"""The training run, from top to bottom: warm-up, policy gradient, validation, checkpoints, circuit breakers."""

from __future__ import annotations

import contextlib
import signal
import time
from typing import TYPE_CHECKING, Any

from agentpipe.environments.layout import ACTION_NAMES, SIMULATOR_VERSION
from agentpipe.errors import CheckpointError, LearningError
from agentpipe.learning import checkpoint as checkpoints
from agentpipe.learning.aids.base import Knobs
from agentpipe.learning.aids.chosen import chosen_aids
from agentpipe.learning.cloning.demonstrated import clone_demonstrations
from agentpipe.learning.cloning.imitation import warm_up
from agentpipe.learning.fits import identity, require_fit, require_room, require_same_run, require_score
from agentpipe.learning.gates import Breaker, training_gate, warm_up_gate
from agentpipe.learning.gradient.anchor import Anchor, AnchoredGradient
from agentpipe.learning.gradient.fused import SegmentedGradient
from agentpipe.learning.gradient.ppo import prepare, update
from agentpipe.learning.interruption import deferred_signals
from agentpipe.learning.joint.training import JointTraining
from agentpipe.learning.metrics import Events, Utilisation
from agentpipe.learning.options import TrainingOptions, share_at
from agentpipe.learning.policy.lineage import labels_digest
from agentpipe.learning.policy.network import PolicyNetwork
from agentpipe.learning.policy.package import PolicyPackage
from agentpipe.learning.result import Reason, TrainingResult
from agentpipe.learning.samples.replay import open_replay, replayed_rows
from agentpipe.learning.samples.rollout import Rollout, collect
from agentpipe.learning.samples.stream import Stream, unknown_source
from agentpipe.learning.state import TrainingState, seed_of
from agentpipe.learning.workers import Workers, single_threaded_torch
from agentpipe.progress import silent
from agentpipe.storage import writer_lock

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import torch

    from agentpipe.environments.demonstrator import Expert
    from agentpipe.environments.pool import LinePool
    from agentpipe.experience.store.shard import Shard
    from agentpipe.learning.cloning.demonstrations import Demonstrations
    from agentpipe.learning.options import PpoOptions
    from agentpipe.learning.policy.normalisation import ObservationStatistics
    from agentpipe.learning.samples.replay import Replay
    from agentpipe.learning.samples.stream import LiveSource
    from agentpipe.learning.tensors import Arrays
    from agentpipe.progress import Progress

_TO_BE_RESUMED = ("interrupted", "time")
"""reasons after which the run is not over"""


def train(  # noqa: PLR0913 - one flat call; all but three arguments have a default
    pool: LinePool,
    statistics: ObservationStatistics,
    options: TrainingOptions,
    *,
    directory: Path,
    expert: Expert | None = None,
    demonstrations: Demonstrations | None = None,
    validate: Callable[[PolicyPackage], float] | None = None,
    initial: PolicyPackage | None = None,
    resume: Path | None = None,
    recorded: Sequence[Shard] = (),
    source: LiveSource | None = None,
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
        directory: gets ``checkpoints/``, ``package/``, ``tensorboard/`` and ``experience/``.
        expert: is cloned before the policy gradient, if the options ask for a warm-up.
        demonstrations: recorded episodes that are cloned instead of ``expert``; there is a warm-up then in any case.
        validate: scores a policy on the validation split (higher is better, 1 is perfect); never sees the hold-out.
        initial: weights to start from; there is no warm-up then. With ``options.kl_weight`` also the policy to stay
            near, to be given when resuming, too. The package made lists the labels that it was trained on.
        resume: checkpoint to go on from; everything else must be as it was.
        recorded: opened shards that a part of each batch is drawn from; none = live samples only.
        source: where the live episodes come from, for the shards that they are recorded in; none = an environment is
            known by its place in the pool, and its episodes cannot be played again.
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
        LearningError: a part does not fit the pool, ``initial``, ``recorded`` or ``source`` not those of ``resume``; a
            weight of the anchor without ``initial``; other observation statistics than those of ``initial``.
        LockHeldError: another training runs in ``directory``.
        DiskFullError, HomeError: a checkpoint or a shard cannot be written; what counted stays.
    """
    require_fit(pool, statistics, demonstrations, action_names)
    require_room(options, pool.size, len(statistics.names), len(action_names))
    context = {"parent": parent, "configuration_digest": configuration_digest, "provenance": provenance or {}}
    context |= identity(pool, action_names)
    with contextlib.ExitStack() as stack:
        stack.enter_context(writer_lock(directory, f"a training of {options.budget_steps} steps"))
        told_to_end = stack.enter_context(deferred_signals(signal.SIGTERM, signal.SIGINT))
        # From the first weight on: even an orthogonal matrix has other last bits when two threads make it.
        stack.enter_context(single_threaded_torch())
        workers = stack.enter_context(Workers(options.threads))
        state = TrainingState(statistics, len(action_names), pool.size, options)
        run = _Run(pool, state, workers, directory, context, tuple(action_names), simulator_version, validate, progress)
        run.descend(initial)
        run.replay = open_replay(recorded, options.replay, state.network, workers, seed_of(options.seed, "replay"))
        if options.stream is not None:
            known = source or unknown_source(pool.size)
            made = Stream(pool, known, directory, options.stream, len(action_names), simulator_version)
            run.stream = stack.enter_context(made)
        if resume is not None:
            with checkpoints.understood(resume):
                run.resume(resume)
        run.events = stack.enter_context(Events(directory / "tensorboard", _resume_at(state, resume)))
        if resume is None:
            run.start(initial, expert, demonstrations)
        reason, explanation = run.loop(lambda: told_to_end() or (stop is not None and stop()))
        return run.finish(reason, explanation)


def _resume_at(state: TrainingState, resume: Path | None) -> int | None:
    return None if resume is None else state.counters.environment_steps + 1


class _Run:
    """One run; holds what its steps share."""

    events: Events
    replay: Replay | None = None
    stream: Stream | None = None
    anchor: Anchor | None = None
    labels: frozenset[str] = frozenset()

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
        self.joint = JointTraining(state.network, pool, workers, frozen=self.options.kl_weight > 0)
        self.breaker = Breaker(self.options.gates)
        self.aids = chosen_aids(self.options, state.statistics.names)
        self.utilisation = Utilisation()
        self.started = time.monotonic()
        self.spent, self.steps = 0.0, 0
        self.looked: list[tuple[float, float]] = []
        self.checkpoint: Path | None = None

    # -- beginning ---------------------------------------------------------------------------------------------

    def descend(self, initial: PolicyPackage | None) -> None:
        """Takes over what an ancestor hands on: the labels it was trained on, and itself as an anchor."""
        ppo, weight = self.options.ppo, self.options.kl_weight
        if initial is not None:
            self.state.require_same_network(initial, self.action_names)
            self.context["initial"] = initial.digest
            if initial.labels:
                self.labels = initial.labels
                self.context["labels"] = labels_digest(initial.labels)
        if weight == 0:
            return
        if initial is None:
            remedy = "give the package to stay near, or no weight of the anchor"
            raise LearningError("an anchor without a package", field="kl_weight", remedy=remedy)
        network, rows = self.state.network, self._batch_rows()
        self.anchor = Anchor(initial, network, self.workers, rows)
        self.context["anchor"] = initial.digest
        self.gradient = AnchoredGradient(network, ppo.clip, ppo.value_weight, self.workers, weight)

    def _batch_rows(self) -> int:
        live = self.options.ppo.rollout_steps * self.pool.size
        return live + replayed_rows(live, self.options.replay.share)

    def resume(self, path: Path) -> None:
        found = checkpoints.load(path)
        require_same_run(found.content, self.context, path)
        self.state.require_same_options(found, path)
        began = found.content.get("initial")
        if began is not None:
            self.context["initial"] = began
        drawn: Any = found.content.get("replay")
        if (drawn is None) != (self.replay is None):
            remedy = "resume with the recorded trajectories that it was made with, or start anew"
            text = f"made {'without' if drawn is None else 'with'} recorded trajectories"
            raise CheckpointError(text, file=path, field="replay", remedy=remedy)
        if self.replay is not None:
            self.replay.restore(drawn, found.arrays["replay"])
        if self.stream is not None:
            content, index = found.content.get("stream") or {}, found.content.get("trajectory_index") or []
            self.stream.restore(index, content, {**found.arrays["running"], **found.arrays["times"]})
        self.state.restore(found, self.pool, path)
        self.joint.restore(found.arrays["joint"], path / "joint.safetensors")
        self.aids.restore(found.content["aids"], found.arrays["aids"], path)
        if self.stream is not None:
            self.stream.go_on()
        self.breaker.streaks = self.state.counters.streaks
        self.checkpoint = path

    def start(
        self, initial: PolicyPackage | None, expert: Expert | None, demonstrations: Demonstrations | None
    ) -> None:
        state, options = self.state, self.options
        if initial is not None:
            state.network.load_state_dict(initial.network.state_dict())
        elif demonstrations is not None:
            state.warm_up = clone_demonstrations(
                demonstrations, state, options.demonstrations, options.ppo, self.workers, self.progress
            )
        elif options.warm_up is not None and expert is not None and options.warm_up.episodes > 0:
            state.warm_up = warm_up(
                self.pool, expert, state, options.warm_up, options.ppo, self.workers, self.progress, self.joint
            )
        if state.warm_up is not None:
            told = {name: v for name, v in vars(state.warm_up).items() if isinstance(v, int | float)}
            self.events.write({f"warm_up/{name}": value for name, value in told.items()}, 0)
            warned = [figure for figure in warm_up_gate(state.warm_up, options.gates) if figure.status != "pass"]
            self.aids.warmed_up(warned)
            failed = [figure for figure in warned if figure.status == "fail"]
            if failed and options.gates.warm_up_breaks:
                state.counters.stopped = f"gate 2: {failed[0].name} {failed[0].value:.3g} beyond {failed[0].alarm:g}"
        if state.warm_up is None or demonstrations is not None:
            self.pool.reset()
        # After a warm-up the pool goes on from where the expert left it: its environments are out of step by then, so
        # that every rollout holds all segments.
        if self.stream is not None:
            self.stream.start()
        state.keep_good()
        self._look()
        if state.warm_up is not None:
            self._save()  # an interrupted run does not warm up again

    # -- the loop ----------------------------------------------------------------------------------------------

    def loop(self, stop: Callable[[], bool]) -> tuple[Reason, str]:
        state = self.state
        rollout: Rollout | None = None
        while True:
            ended = self._ended()
            if ended is None and stop():
                ended = ("interrupted", f"told to end after update {state.counters.update}")
            if ended is not None:
                self._save(due=ended[0] not in _TO_BE_RESUMED)
                return ended
            if rollout is None:
                rollout = self._allocate()
            self._update(rollout)
            counters = state.counters
            if (
                counters.update % self.options.validate_every == 0
                or counters.environment_steps >= self.options.budget_steps
            ):
                self._look()
            if counters.update % self.options.checkpoint_every == 0:
                self._save()

    def _allocate(self) -> Rollout:
        steps, size = self.options.ppo.rollout_steps, self.pool.size
        spare = 0 if self.replay is None else replayed_rows(steps * size, self.options.replay.share)
        joint = self.joint.record(steps)
        return Rollout(steps, size, self.state.network.encoded_size, len(self.action_names), spare, joint)

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
        knobs = self.aids.before(_scheduled(ppo, done), self.pool)
        state.set_rates(knobs.learning_rate, knobs.bottom_rate)
        number, first = counters.update + 1, counters.environment_steps
        samples: dict[str, Any] = {
            "samples/live_first": first,
            "samples/live_last": first + rollout.live - 1,
            "share/live": 1.0,
        }
        if self.stream is not None:
            self.stream.begin(number, state.version())
        step = counters.update * ppo.rollout_steps
        episodes = collect(
            self.pool, state.network, rollout, state.uniforms, self.workers, step=step, stream=self.stream
        )
        if self.stream is not None:
            self.stream.collected()
        collected = time.monotonic()
        bonus = self.aids.collected(rollout, self.pool)
        prepared = prepare(rollout, state.scaler, ppo, gae_lambda=knobs.gae_lambda, bonus=bonus)
        batch = prepared.batch
        if self.replay is not None:
            batch, drawn = self.replay.fill(prepared, rollout.live, state.scaler, ppo.discount, number=number)
            samples |= drawn
        if self.anchor is not None:
            batch = self.anchor.fill(batch)
        replayed = time.monotonic()
        result = update(
            state.network,
            state.optimiser,
            self.gradient,
            batch,
            ppo,
            state.generator,
            entropy_weight=knobs.entropy_weight,
            number=number,
        )
        learned = self.joint.update(rollout, number)
        counters.update, counters.environment_steps = number, first + rollout.live
        if self.stream is not None:
            samples |= {"samples/live_shard": self.stream.end(), "samples/live_policy": number}
        figures = {**prepared.figures, **result.losses, **learned}
        losses = {**figures, **{f"charts/{name}": float(value) for name, value in vars(knobs).items()}}
        judged = training_gate(losses, _pairs(counters.validations), self.options.gates)
        warnings = [figure for figure in judged if figure.status != "pass"]
        losses |= self.aids.updated(number, {**losses, **episodes.figures()}, warnings)
        complaint = self.breaker.observe(losses)
        counters.streaks, counters.stopped = dict(self.breaker.streaks), complaint or ""
        if self.breaker.healthy:
            state.keep_good()
        seconds = time.monotonic() - began
        self.spent += seconds
        self.steps += rollout.live
        norms = {f"gradient_norms/{name}": norm for name, norm in result.gradient_norms.items()}
        figures = {**losses, **episodes.figures(), **norms}
        state.updates.append({"update": number, **samples, **figures})
        spans = {"seconds": seconds, "collect_seconds": collected - began, "replay_seconds": replayed - collected}
        use = {**spans, **self.utilisation.sample()}
        state.utilisation.append({"update": number, **use})
        speed = {"charts/SPS": self.steps / self.spent, **{f"utilisation/{name}": value for name, value in use.items()}}
        told = {name: value for name, value in samples.items() if not isinstance(value, str)}
        self.events.write({**figures, **told, **speed}, counters.environment_steps)
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
        """Looks at the validation split; keeps the weights when they are the best so far, within the tolerance."""
        if self.validate is None:
            return
        state, counters = self.state, self.state.counters
        now = self._package(state.weights(), counters.update, counters.environment_steps)
        score = require_score(self.validate(now), counters.update)
        top, tolerance = max((seen for _, seen in counters.validations), default=None), self.options.tolerance
        counters.validations.append([counters.update, score])
        self.looked.append((time.monotonic() - self.started, score))
        self.events.write({"charts/validation": score}, counters.environment_steps)
        if top is None or score > top or (tolerance > 0 and score >= top - tolerance):
            state.keep_best(score)
        else:
            counters.looks += 1

    # -- keeping -----------------------------------------------------------------------------------------------

    def _package(self, weights: dict[str, torch.Tensor], update: int, steps: int) -> PolicyPackage:
        """The policy of ``weights``, those after ``update`` and so many environment steps."""
        state, counters = self.state, self.state.counters
        network = PolicyNetwork(len(state.statistics.names), len(self.action_names), self.options.network)
        network.load_state_dict(weights)
        provenance = {
            **self.context["provenance"],
            "parent": self.context["parent"],
            "configuration_digest": self.context["configuration_digest"],
            "training_options": self.options.decisive(),
            "update": update,
            "environment_steps": steps,
            "best_validation": counters.best_score,
        }
        names = state.statistics.names
        version = self.simulator_version
        return PolicyPackage(network, state.statistics, names, self.action_names, version, provenance, self.labels)

    def _save(self, *, due: bool = True) -> None:
        """Writes a checkpoint, unless the last one is of this very update.

        Args:
            due: a run that is never interrupted makes one here too.
        """
        number = f"update-{self.state.counters.update:06d}-"
        if self.checkpoint is not None and self.checkpoint.name.startswith(number):
            return
        context: dict[str, Any] = {**self.context, "trajectory_index": None}
        arrays: dict[str, Arrays] = {"replay": {}, "running": {}, "times": {}}
        if self.stream is not None:
            index, content, running = self.stream.checkpoint(due=due)
            context |= {"trajectory_index": index, "stream": content}
            arrays["times"] = {"time_ns": running.pop("time_ns")}
            arrays["running"] = running
        context["aids"], arrays["aids"] = self.aids.state()
        arrays["joint"] = self.joint.state()
        if self.replay is not None:
            context["replay"], arrays["replay"] = self.replay.state()
        made = self.state.to_checkpoint(self.pool, context, arrays)
        self.checkpoint = checkpoints.save(made, self.directory / "checkpoints", keep=self.options.keep_checkpoints)
        self.events.flush()

    def finish(self, reason: Reason, explanation: str) -> TrainingResult:
        state, counters = self.state, self.state.counters
        package = self._package(*state.chosen())
        path = package.save(self.directory / "package")
        validations = _pairs(counters.validations)
        gates = () if state.warm_up is None else warm_up_gate(state.warm_up, self.options.gates)
        if state.updates:
            gates = (*gates, *training_gate(state.updates[-1], validations, self.options.gates))
        shards = () if self.stream is None else self.stream.finish(ended=reason not in _TO_BE_RESUMED)
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
            looked=tuple(self.looked),
            warm_up=state.warm_up,
            gates=gates,
            update_log=tuple(state.updates),
            aid_log=tuple(self.aids.log),
            left=self.aids.leave(self.directory),
            tensorboard=self.directory / "tensorboard",
            shards=shards,
            unshrunk="" if self.stream is None else self.stream.complaint,
        )


def _scheduled(ppo: PpoOptions, done: float) -> Knobs:
    """What the schedule says after ``done`` (0 to 1) of the budget."""
    rate = ppo.learning_rate * share_at(ppo.schedule, done, ppo.final_learning_rate_share)
    entropy_weight = ppo.entropy_weight * share_at("linear", done, ppo.final_entropy_share)
    return Knobs(rate, entropy_weight, ppo.gae_lambda)


def _pairs(validations: Sequence[Sequence[float]]) -> tuple[tuple[int, float], ...]:
    return tuple((int(number), score) for number, score in validations)
