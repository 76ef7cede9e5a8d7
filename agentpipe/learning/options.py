"""Everything that can be chosen about learning, in flat frozen records; none of them needs torch."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from agentpipe.environments.layout import SEGMENTS
from agentpipe.errors import SettingsError
from agentpipe.learning.aids.options import AidOptions, DemonstrationOptions, OrchestratorOptions
from agentpipe.learning.checked import (
    Count,
    Positive,
    Share,
    ShareBelowOne,
    Size,
    Weight,
    Width,
    WidthOrNone,
    check_fields,
)
from agentpipe.storage import canonical_json, digest_bytes

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from agentpipe.settings import Settings

Schedule = Literal["linear", "cosine", "constant"]
Encoder = Literal["fusion", "mlp"]
ActorHead = Literal["unit", "linear"]
Activation = Literal["tanh", "relu"]
Normalise = Literal["segment", "batch"]
Credit = Literal["episode", "segment"]


@dataclass(frozen=True)
class NetworkOptions:
    """Shape of the actor-critic network."""

    hidden: Annotated[tuple[Width, ...], Field(min_length=1, max_length=16)] = (128, 128)
    """widths of the hidden layers, the same for actor and critic"""
    action_embedding: Width = 16
    """size of the embedding of the last action"""
    time_frequencies: Annotated[int, Field(ge=1, le=64)] = 6
    """octaves of the sin/cos encoding of time"""
    shared_trunk: bool = False
    """one trunk for actor and critic (faster), or one for each"""
    activation: Activation = "relu"
    """between the hidden layers"""
    encoder: Encoder = "fusion"
    """what the first layer reads: observation, embedding of the last action and time, or the observation alone"""
    actor_head: ActorHead = "linear"
    """unit: non-negative weights in rows of norm 1, with a learned temperature and bias"""
    perception: WidthOrNone = 0
    """width of the network that believes which fault it is; 0 = none"""
    memory: WidthOrNone = 0
    """units of the recurrent memory; 0 = none"""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class PpoOptions:
    """Segment-wise clipped policy gradient (S9)."""

    rollout_steps: Annotated[int, Field(ge=1, le=1_000_000)] = 16
    """steps of each environment between two updates"""
    epochs: Count = 3
    """passes over each rollout"""
    minibatch: Count = 16_384
    """samples of one gradient step"""
    learning_rate: Positive = 1e-3
    """at the start of the schedule"""
    schedule: Schedule = "linear"
    """of the learning rate over the budget of environment steps"""
    final_learning_rate_share: Weight = 0.05
    """last learning rate over the first"""
    discount: Share = 0.995
    """gamma"""
    gae_lambda: Share = 0.95
    """lambda of generalised advantage estimation"""
    clip: Annotated[tuple[Positive, ...], Field(min_length=len(SEGMENTS), max_length=len(SEGMENTS))] = (
        0.15,
        0.08,
        0.25,
        0.12,
    )
    """clip range of the probability ratio: identify, assess, dispatch, execute"""
    entropy_weight: Weight = 0.01
    """weight of the entropy bonus"""
    final_entropy_share: Weight = 1.0
    """last entropy weight over the first; it moves linearly with the budget"""
    value_weight: Weight = 0.5
    """weight of the value loss"""
    max_gradient_norm: Positive = 1.0
    """gradients are scaled down to this norm"""
    target_kl: Positive | None = None
    """no further epoch of an update once the mean KL of one exceeds this"""
    reward_clamp: Positive = 5.0
    """scaled rewards are clamped to plus and minus this"""
    normalise: Normalise = "segment"
    """advantages have mean 0 and deviation 1 within each segment, or within the whole batch"""
    credit: Credit = "episode"
    """advantages reach back over the whole episode, or within a segment only"""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class WarmUpOptions:
    """Cloning of an expert before the policy gradient."""

    episodes: Size = 400_000
    """freshly played expert episodes that are enough"""
    minibatch: Count = 3_500
    """samples of one gradient step"""
    learning_rate: Positive = 2e-3
    """at the start; it falls along a cosine"""
    answer_weight: Weight = 1.0
    """weight of the expert's answers beside its decisions"""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class GateOptions:
    """Thresholds of gates 2 and 4 (S18), which also act as circuit breakers while training runs."""

    actor_loss: float = 0.85
    """gate 2 passes up to this masked cross-entropy"""
    actor_loss_warn: float = 1.2
    """and fails beyond this"""
    critic_mae: float = 0.32
    """gate 2 passes up to this mean absolute error, in scaled returns"""
    critic_mae_warn: float = 0.5
    """a larger one fails"""
    gradient_norm_warn: float = 5.0
    """median gradient norm of the warm-up beyond which gate 2 warns"""
    entropy_min: float = 0.1
    """gate 4 warns below this mean entropy of the decisions that had a choice"""
    entropy_stop: float = 0.005
    """below this, for `breaker_patience` updates, training stops: the policy has collapsed"""
    advantage_mean_warn: float = 0.5
    """gate 4 warns when the mean advantage, in standard deviations of the advantage, is farther from zero"""
    plateau_gain: float = 0.005
    """gate 4 warns when the last third of the validations gained less"""
    value_loss_stop: float = 100.0
    """a value loss beyond this, for `breaker_patience` updates, stops training"""
    breaker_patience: Count = 5
    """consecutive updates after which a breaker opens"""
    warm_up_breaks: bool = False
    """a failing gate 2 stops training before the policy gradient begins"""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class ReplayOptions:
    """The recorded part of each batch (V-trace); used where recorded trajectories are given."""

    share: ShareBelowOne = 0.25
    """of each batch; 0 = live samples only"""
    sampler: Literal["uniform", "causal", "prioritised"] = "causal"
    """who draws the recorded steps"""
    fresh: Count | None = None
    """draw only from the newest so many behaviour policies; none = from all"""
    floor: Share = 0.1
    """causal: share of draws that is spread evenly, so that no step starves"""
    causal_alpha: Weight = 0.6
    """causal: exponent of the influence"""
    causal_beta: Weight = 1.0
    """causal: exponent of the importance weights, 1 = full correction"""
    alpha: Weight = 0.6
    """prioritised: exponent of the priorities"""
    prioritised_beta: Weight = 0.4
    """prioritised: exponent of the importance weights"""
    rho_bar: Positive = 1.0
    """clips the probability ratio in V-trace's errors and in the policy gradient"""
    c_bar: Positive = 1.0
    """clips the probability ratio in V-trace's traces"""
    advantage_clamp: Positive = 5.0
    """replayed advantages are clamped to plus and minus this many standard deviations of the live ones"""
    evaluate: Positive = 6.0
    """at most so many steps go through the network before an update for each step drawn"""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class StreamOptions:
    """How live rollouts are kept as shards. Nothing here changes what is learned."""

    shard_steps: Count = 262_144
    """counted steps after which a shard is sealed and another begun"""
    full_bytes: Size = 256 * 2**20
    """full records that a run keeps; its older shards are shrunk to seeds and actions"""
    durability: Literal["process", "power"] = "process"
    """counted steps survive kill -9 (process) or also power loss, up to a group (power)"""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class TrainingOptions:
    """One training run."""

    network: NetworkOptions = field(default_factory=NetworkOptions)
    """the network"""
    ppo: PpoOptions = field(default_factory=PpoOptions)
    """the policy gradient"""
    warm_up: WarmUpOptions | None = field(default_factory=WarmUpOptions)
    """none = start from random weights (or from an initial package)"""
    gates: GateOptions = field(default_factory=GateOptions)
    """circuit breakers"""
    replay: ReplayOptions = field(default_factory=ReplayOptions)
    """the recorded part of each batch"""
    aids: AidOptions = field(default_factory=AidOptions)
    """curiosity, dynamic lambda, rates of each layer"""
    orchestrator: OrchestratorOptions | None = None
    """steers training environments; none = each keeps the disturbance that its table gives it"""
    stream: StreamOptions | None = None
    """how live rollouts are recorded; none = they are not"""
    budget_steps: Size = 16_000_000
    """environment steps of the policy gradient"""
    max_seconds: Weight | None = None
    """wall time after which training stops at the next update; not reproducible, so none by default"""
    target: float | None = None
    """validation score at which training stops"""
    validate_every: Count = 10
    """updates between two looks at the validation split"""
    patience: Count | None = 12
    """looks without improvement before training stops; none = never"""
    checkpoint_every: Count = 20
    """updates between two checkpoints"""
    keep_checkpoints: Count = 2
    """the newest so many are kept"""
    threads: Annotated[int, Field(ge=1, le=256)] = 1
    """worker threads; the result does not depend on them"""
    seed: Size = 0
    """root of every random stream of the training itself"""
    kl_weight: Weight = 0.0
    """weight of KL(initial || policy), which holds a retraining near the package that it starts from; 0 = none"""
    tolerance: Weight = 0.0
    """validation success that a look may lack of the best one so far and still be kept; the latest such one is"""
    demonstrations: DemonstrationOptions = field(default_factory=DemonstrationOptions)
    """cloning of recorded episodes, where there are any"""

    def __post_init__(self) -> None:
        check_fields(self)

    def digest(self) -> str:
        """Digest of every option that changes a result."""
        return digest_bytes(canonical_json(self.decisive()))

    def decisive(self) -> dict[str, Any]:
        """Every option that changes a result, as plain JSON values.

        How live rollouts are recorded and how many checkpoints are kept changes none, nor how many threads there are,
        nor when the clock ends a run, which may go on.
        """
        content = {**as_json(self), "stream": None}
        for name in ("threads", "keep_checkpoints", "max_seconds"):
            del content[name]
        for name in ("kl_weight", "tolerance"):  # a training without them is called what it always was
            if content[name] == 0:
                del content[name]
        if self.demonstrations == DemonstrationOptions():
            del content["demonstrations"]
        return content


@dataclass(frozen=True)
class FineTuningOptions:
    """Incremental training from labelled decisions."""

    learning_rate: Positive = 3e-5
    """at the start; it falls linearly to ``final_learning_rate_share``"""
    final_learning_rate_share: Weight = 0.1
    """last learning rate over the first"""
    epochs: Count = 12
    """passes over the labelled decisions"""
    minibatch: Count = 32
    """labelled decisions of one gradient step"""
    rehearsal: Weight = 4.0
    """recorded steps of one gradient step for each labelled decision"""
    kl_weight: Weight = 1.0
    """weight of KL(champion || policy) over the rehearsed steps"""
    surrogate_weight: Weight = 1.0
    """weight of the policy gradient of the rehearsed steps (V-trace advantages)"""
    weak_negative: Weight = 0.25
    """weight of ``needs improvement`` beside ``wrong``"""
    most_labels: Count = 20_000
    """labelled decisions used at most; the others stay new"""
    minimum_labels: Count = 1
    """new labelled decisions below which nothing is trained"""
    validate_every: Count = 2
    """epochs between two looks at the validation split"""
    tolerance: Weight = 0.005
    """validation success that a look may lack of the best look and still be kept"""
    patience: Size = 2
    """looks in a row beyond the tolerance after which training stops"""
    ppo: PpoOptions = field(default_factory=PpoOptions)
    """discount, clip ranges, value weight and gradient norm; nothing else of it is used"""
    replay: ReplayOptions = field(default_factory=lambda: ReplayOptions(sampler="uniform"))
    """sampler and V-trace's clips of the rehearsed steps; its share is not used"""

    def __post_init__(self) -> None:
        check_fields(self)


def as_json(options: DataclassInstance) -> dict[str, Any]:
    """The options as plain JSON values."""
    plain: dict[str, Any] = _plain(dataclasses.asdict(options))
    return plain


def _plain(value: Any) -> Any:  # noqa: ANN401 - a tree of options
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, tuple) else value


def network_options(content: dict[str, Any]) -> NetworkOptions:
    """The inverse of :func:`as_json` for a network.

    Raises:
        SettingsError: an option is unknown or malformed.
    """
    try:
        return NetworkOptions(**{**content, "hidden": tuple(content["hidden"])})
    except (TypeError, KeyError) as error:
        raise SettingsError(f"network options do not fit: {error}", field="network") from error


def share_at(schedule: Schedule, done: float, final: float) -> float:
    """Share of the first learning rate after ``done`` (0 to 1) of the budget; ``final`` at the end.

    linear: 1 - (1 - final) d; cosine: final + (1 - final) (1 + cos(pi d)) / 2; constant: 1.
    """
    done = min(max(done, 0.0), 1.0)
    if schedule == "constant":
        return 1.0
    if schedule == "cosine":
        return final + (1.0 - final) * (1.0 + math.cos(math.pi * done)) / 2.0
    return 1.0 - (1.0 - final) * done


def training_options(settings: Settings) -> TrainingOptions:
    """The options that the project's settings ask for."""
    chosen, gates, kept = settings.training, settings.gates, settings.experience
    ppo = PpoOptions(
        rollout_steps=chosen.rollout_steps,
        epochs=chosen.epochs,
        minibatch=chosen.minibatch,
        learning_rate=chosen.learning_rate,
        final_learning_rate_share=chosen.final_learning_rate_share,
        discount=chosen.gamma,
        gae_lambda=chosen.gae_lambda,
        clip=(chosen.clip_identify, chosen.clip_assess, chosen.clip_dispatch, chosen.clip_execute),
        entropy_weight=chosen.entropy_weight,
        final_entropy_share=0.2,
        value_weight=chosen.value_weight,
        max_gradient_norm=chosen.max_gradient_norm,
    )
    warm_up = WarmUpOptions(
        episodes=chosen.warmup_episodes, minibatch=chosen.warmup_minibatch, learning_rate=chosen.warmup_learning_rate
    )
    network = NetworkOptions(
        hidden=(chosen.hidden, chosen.hidden),
        shared_trunk=chosen.shared_trunk,
        encoder=chosen.encoder,
        actor_head=chosen.actor_head,
        perception=chosen.perception,
        memory=chosen.memory,
    )
    steered = settings.orchestrator
    return TrainingOptions(
        network=network,
        aids=AidOptions(**settings.aids.model_dump()),
        orchestrator=OrchestratorOptions(**steered.model_dump()) if steered.share > 0 else None,
        ppo=ppo,
        warm_up=warm_up if chosen.warmup_episodes > 0 else None,
        gates=GateOptions(
            actor_loss=gates.warmup_actor_loss,
            actor_loss_warn=gates.warmup_actor_loss_warn,
            critic_mae=gates.warmup_critic_mae,
            critic_mae_warn=gates.warmup_critic_mae_warn,
            gradient_norm_warn=gates.gradient_norm_warn,
            entropy_min=gates.entropy_min,
            advantage_mean_warn=gates.advantage_mean_max,
            plateau_gain=gates.plateau_improvement,
        ),
        replay=ReplayOptions(share=chosen.replay_share, sampler=chosen.replay_sampler, fresh=chosen.replay_fresh),
        stream=StreamOptions(kept.shard_steps, kept.full_mb * 2**20, kept.durability) if kept.record_training else None,
        budget_steps=chosen.total_steps,
        target=chosen.target_success,
        validate_every=chosen.validate_every,
        patience=chosen.patience,
        checkpoint_every=chosen.checkpoint_every,
        threads=settings.threads,
        seed=settings.seed,
    )


def retraining_options(settings: Settings) -> TrainingOptions:
    """The options of a retraining that starts from the champion: :func:`training_options`, near it.

    There is no warm-up; the learning rate is ``retraining_rate_share`` of the training's, the budget
    ``retraining_steps``, and KL(champion || policy) weighs ``retraining_kl_weight``. The latest look at the validation
    split counts that lacks no more of the best one than a candidate may lack of the champion (``promotion.margin``).
    The champion was itself chosen as the best of many looks: "better than it" would ask for luck, and a night without
    luck would change nothing.
    """
    chosen, near = training_options(settings), settings.finetuning
    return dataclasses.replace(
        chosen,
        ppo=dataclasses.replace(chosen.ppo, learning_rate=chosen.ppo.learning_rate * near.retraining_rate_share),
        warm_up=None,
        budget_steps=near.retraining_steps,
        kl_weight=near.retraining_kl_weight,
        tolerance=settings.promotion.margin,
    )


def fine_tuning_options(settings: Settings) -> FineTuningOptions:
    """The options of a day's fine-tuning that the project's settings ask for."""
    chosen, training = settings.finetuning, training_options(settings)
    return FineTuningOptions(
        learning_rate=training.ppo.learning_rate * chosen.learning_rate_share,
        epochs=chosen.epochs,
        minibatch=chosen.minibatch,
        rehearsal=chosen.rehearsal,
        kl_weight=chosen.kl_weight,
        weak_negative=chosen.weak_negative,
        most_labels=chosen.most_labels,
        minimum_labels=settings.feedback.minimum_labels,
        ppo=training.ppo,
        replay=dataclasses.replace(training.replay, sampler="uniform"),
    )
