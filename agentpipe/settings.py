"""All settings in one typed model: read from the environment (``AGENTPIPE_...``) and from command-line options."""

from __future__ import annotations

import os
import re
import zoneinfo
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict
from pydantic_settings import SettingsError as MalformedError

from agentpipe.errors import SettingsError
from agentpipe.storage import canonical_json, digest_bytes

ProfileName = Literal["demo", "standard"]
SamplerName = Literal["uniform", "causal", "prioritised"]
EncoderName = Literal["fusion", "mlp"]
ActorHeadName = Literal["unit", "linear"]
AidMode = Literal["off", "remedy", "always"]
Durability = Literal["process", "power"]
Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and 0 < int(text) < 65_536


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class TrainingSettings(_Section):
    """Sizes and rates of one training run. Times are simulated unless they say otherwise."""

    environments: int | None = Field(None, gt=0, description="training environments used; none = the whole split")
    total_steps: int = Field(6_000_000, gt=0, description="environment steps after the warm-up")
    rollout_steps: int = Field(16, gt=0, le=10_000, description="steps of each environment between two updates")
    minibatch: int = Field(8_192, gt=0, description="samples a gradient step")
    epochs: int = Field(1, gt=0, description="passes over each rollout")
    hidden: int = Field(256, gt=0, le=16_384, description="width of the two hidden layers")
    shared_trunk: bool = Field(True, description="one trunk for actor and critic; false = one for each")
    encoder: EncoderName = Field(
        "fusion", description="the policy reads observation, last action and time; mlp = the observation alone"
    )
    actor_head: ActorHeadName = Field(
        "unit", description="unit = non-negative weights in rows of norm 1, with a learned temperature"
    )
    perception: int = Field(
        48, ge=0, le=4_096, description="width of the network that believes which fault it is; 0 = none"
    )
    memory: int = Field(0, ge=0, le=4_096, description="units of the recurrent memory; 0 = none")
    learning_rate: float = Field(3e-4, gt=0, lt=1, description="first learning rate of the policy gradient")
    final_learning_rate_share: float = Field(0.05, ge=0, le=1, description="last learning rate over the first")
    gamma: float = Field(0.995, gt=0, le=1, description="discount of rewards, a step")
    gae_lambda: float = Field(0.95, ge=0, le=1, description="lambda of the advantages")
    entropy_weight: float = Field(0.005, ge=0, description="first weight of the entropy bonus; falls to a fifth")
    value_weight: float = Field(0.5, ge=0, description="weight of the critic's loss")
    max_gradient_norm: float = Field(1.0, gt=0, description="joint norm that gradients are clipped to")
    clip_identify: float = Field(0.15, gt=0, description="clip range of the probability ratio, identify segment")
    clip_assess: float = Field(0.08, gt=0, description="clip range of the probability ratio, assess segment")
    clip_dispatch: float = Field(0.25, gt=0, description="clip range of the probability ratio, dispatch segment")
    clip_execute: float = Field(0.12, gt=0, description="clip range of the probability ratio, execute segment")
    warmup_episodes: int = Field(
        600_000, ge=0, description="expert episodes cloned before the policy gradient; 0 = none"
    )
    warmup_minibatch: int = Field(1_750, gt=0, description="samples a gradient step of the warm-up")
    warmup_learning_rate: float = Field(2e-3, gt=0, lt=1, description="first learning rate of the warm-up")
    demonstrations: Path | None = Field(
        None, description="recorded episodes (Parquet file or sealed shard) to clone instead of the built-in expert"
    )
    validate_every: int = Field(10, gt=0, description="updates between two looks at the validation split")
    patience: int = Field(12, gt=0, description="looks without improvement before training stops")
    target_success: float | None = Field(None, description="validation success at which training may stop early")
    checkpoint_every: int = Field(20, gt=0, description="updates between two resumable checkpoints")
    replay_share: float = Field(0.25, ge=0, lt=1, description="share of each batch drawn from recorded trajectories")
    replay_sampler: SamplerName = Field("causal", description="who draws them")
    replay_fresh: int | None = Field(
        None, gt=0, description="draw only from the newest so many behaviour policies; none = from all"
    )


class AidSettings(_Section):
    """Training aids: off, as the remedy of a gate that warns, or always."""

    curiosity: AidMode = Field("remedy", description="a bonus for states that have rarely been met")
    curiosity_weight: float = Field(0.02, ge=0, description="of the bonus, beside scaled rewards")
    dynamic_lambda: AidMode = Field("remedy", description="lambda of the advantages moves from 0.92 to 0.97")
    layer_rates: AidMode = Field("remedy", description="learning rates rise from the lowest layer to the heads")
    distillation: AidMode = Field(
        "off", description="fine-tuning on the hardest training environments; remedy = where validation stalled"
    )
    hardest: int = Field(500, gt=0, description="environments that are fine-tuned on")
    distillation_steps: int = Field(1_000_000, gt=0, description="environment steps of that fine-tuning")
    distillation_tolerance: Share = Field(0.005, description="validation success that it may cost")


class OrchestratorSettings(_Section):
    """The bandit that steers training environments towards disturbances the policy is unsure of."""

    share: Share = Field(0.0, description="of the training environments that it may steer; 0 = none")
    floor: Share = Field(0.2, description="of its moves that is spread evenly over all combinations")
    every: int = Field(5, gt=0, description="updates between two decisions")


class EvaluationSettings(_Section):
    """How much is judged."""

    environments: int | None = Field(None, gt=0, description="hold-out environments used; none = the whole split")
    episodes_per_env: int = Field(4, gt=0, description="episodes of each hold-out environment")
    attribution_episodes: int = Field(3_000, gt=0, description="failed episodes replayed at most")
    trajectory_episodes_per_env: int = Field(1, gt=0, description="recorded episodes of each training environment")
    statistics_steps: int = Field(
        1_000, gt=0, description="first steps of each training environment behind the observation statistics"
    )


class ExperienceSettings(_Section):
    """How experience is kept. Nothing here changes a result."""

    durability: Durability = Field(
        "process", description="counted samples survive kill -9 (process), or also power loss up to a group (power)"
    )
    record_training: bool = Field(True, description="keep the live rollouts of training as shards")
    shard_steps: int = Field(262_144, gt=0, le=2**31, description="steps after which training begins another shard")
    full_mb: int = Field(
        256, ge=0, description="full records that a training keeps; its older shards shrink to seeds and actions"
    )
    budget_mb: int | None = Field(None, gt=0, description="disk budget of all shards in the home; none = no limit")


class FeedbackSettings(_Section):
    """What is taken from production, and when it is enough to learn from."""

    late_days: int = Field(7, ge=0, description="days after which a row is too late for its day and is quarantined")
    minimum_labels: int = Field(50, gt=0, description="new labelled decisions of a day below which nothing is trained")
    stream: str = Field("agentpipe:feedback", min_length=1, description="Redis stream that is read besides the inbox")
    group: str = Field("agentpipe", min_length=1, description="its consumer group")


class FineTuningSettings(_Section):
    """Daily incremental training from labelled decisions, and what holds a retraining near the champion."""

    learning_rate_share: float = Field(0.1, gt=0, le=1, description="of training.learning_rate")
    epochs: int = Field(12, gt=0, description="passes over the day's labelled decisions")
    minibatch: int = Field(32, gt=0, description="labelled decisions of one gradient step")
    rehearsal: float = Field(4.0, ge=0, description="recorded steps of the buffer for each labelled decision of a step")
    kl_weight: float = Field(1.0, ge=0, description="weight of KL(champion || policy) over the rehearsed steps")
    weak_negative: Share = Field(0.25, description="weight of needs_improvement beside wrong")
    most_labels: int = Field(20_000, gt=0, description="labelled decisions of a day that are used at most")
    retraining_steps: int = Field(1_500_000, gt=0, description="environment steps of a nightly retraining")
    retraining_rate_share: float = Field(0.1, gt=0, le=1, description="of training.learning_rate, nightly")
    retraining_kl_weight: float = Field(0.5, ge=0, description="weight of KL(champion || policy), nightly")


class PromotionSettings(_Section):
    """When a candidate replaces the champion."""

    margin: Share = Field(0.01, description="success that a candidate may lack at most, overall")
    cell_margin: Share = Field(0.05, description="success that it may lack at most in one cell")
    alpha: float = Field(0.05, gt=0, lt=1, description="error rate of the comparison, Holm over cells")
    episodes_per_env: int = Field(8, gt=0, description="episodes of each hold-out environment in one look")


class ScheduleSettings(_Section):
    """When the nightly retraining starts and what it needs."""

    timezone: str = Field("UTC", description="IANA zone of the nightly schedule; partition keys stay UTC")
    hour: int = Field(2, ge=0, le=23, description="local time at which a night begins: the hour")
    minute: int = Field(0, ge=0, le=59, description="the minute of it")
    cells_needed: int = Field(13, gt=0, le=15, description="cells that must be fresh; a night with fewer is skipped")
    feedback_minutes: int = Field(30, ge=0, description="how long a night waits for the day's feedback run to begin")
    every_seconds: int = Field(30, gt=0, description="least seconds between two looks of a sensor")
    behaviour_age: int = Field(3, ge=0, description="champions after which a cell's trajectories are stale")

    @field_validator("timezone")
    @classmethod
    def _known(cls, value: str) -> str:
        try:
            zoneinfo.ZoneInfo(value)
        except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError) as error:
            raise ValueError(f"{value!r} is no time zone; one is Europe/Berlin") from error
        return value


class AlertSettings(_Section):
    """Whom failures are told."""

    webhook: SecretStr | None = Field(None, description="URL that takes Slack-compatible JSON; none = no alerts")
    timeout_seconds: Positive = Field(5.0, description="of one attempt to deliver an alert")
    ui: str | None = Field(None, description="address of the Dagster UI, such as http://127.0.0.1:3000, for links")


class ServingSettings(_Section):
    """Where policies are served, and what a bundle must have gone through before it is."""

    skipped_check_allowed: bool = Field(
        False, description="promote a bundle whose server check was skipped, as no Triton could be had"
    )
    keep_versions: int = Field(5, gt=0, description="published versions of a model that are kept beside the served one")
    repository: Path | None = Field(
        None, description="folder of what production serves; none = serving in the home; Triton polls its models/"
    )
    triton_grpc: str | None = Field(
        None, description="gRPC address of the Triton at AGENTPIPE_TRITON_URL; none = one port above its HTTP port"
    )


class AgentSettings(_Section):
    """The agent at a line. Times in seconds of the wall clock."""

    decision_seconds: Positive = Field(0.5, description="until when a line has its answer, where it sets no deadline")
    reserve_seconds: Positive = Field(0.02, description="of a deadline, kept for the fallback")
    patience_seconds: Positive = Field(
        0.1, description="that a server is waited for at least; longer where it took longer of late"
    )
    probe_every: Positive = Field(10.0, description="between two probes of a part")
    probe_timeout: Positive = Field(2.0, description="after which a probe counts as failed")
    failures_to_degrade: int = Field(3, gt=0, description="failed probes in a row after which a part counts as lost")
    successes_to_recover: int = Field(3, gt=0, description="good probes in a row after which it counts as back")
    triton: tuple[str, ...] = Field((), description="gRPC addresses of Triton servers, the first one asked first")
    metrics_host: str = Field(
        "127.0.0.1", min_length=1, description="address or name that the Prometheus endpoint listens on"
    )
    metrics_port: int = Field(9464, ge=0, le=65_535, description="of the Prometheus endpoint; 0 = a free one")
    follow_every: Positive = Field(5.0, description="between two looks whether the champion is another one")
    sensor_silence: Positive = Field(30.0, description="after which a sensor that reports nothing new counts as lost")
    estimate_growth: Positive = Field(
        1.0, description="variance, in a sensor's healthy ones, that the estimate of a lost one gains in an hour"
    )
    estimate_limit: Positive = Field(
        2.0, description="healthy standard deviations of that estimate beyond which a person is asked"
    )

    @field_validator("triton")
    @classmethod
    def _addresses(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for address in value:
            host, _, port = address.rpartition(":")
            if not re.fullmatch(r"[^\s/:@]+|\[[0-9a-fA-F:.]+\]", host) or not _is_port(port):
                raise ValueError(f"{address!r} is no address; one is triton:8001")
        return value


class GateSettings(_Section):
    """Thresholds of the milestone gates (S18): ``_min`` and ``_max`` pass or fail, ``_warn`` marks the alarming."""

    beats_random_only: bool = Field(False, description="judge nothing but that the policy beats random; not promotable")
    random_margin: float = Field(
        0.05, ge=-1, le=2, description="least lead over random, at the lower end of its 95 % interval"
    )
    reset_p99_ms: Positive = Field(
        800.0, description="99th percentile of reset latency above which gate 1 fails; a longer reset is slow"
    )
    start_success: Share = Field(
        0.992, description="share of a cell's environments that start, below which gate 1 fails"
    )
    slow_reset_share: Share = Field(0.05, description="share of resets that may be slow")
    redis_round_trip_ms: Positive = Field(15.0, description="longest round trip to the Redis")
    redis_connection_share: Share = Field(0.85, description="share of the Redis's connections that may be in use")
    cpu_share_deviation: Share = Field(
        0.032, description="of isolated processes; the vectorised pool has none, so that nothing is judged"
    )
    crash_rate: Share = Field(
        0.0002, description="of isolated processes; the vectorised pool has none, so that nothing is judged"
    )
    warmup_actor_loss: Positive = Field(
        0.85, description="masked cross-entropy of the warm-up, nats; gate 2 warns above it"
    )
    warmup_actor_loss_warn: Positive = Field(1.2, description="above this it is called alarming")
    warmup_critic_mae: Positive = Field(
        0.32, description="critic's mean absolute error after the warm-up, scaled returns; gate 2 warns above it"
    )
    warmup_critic_mae_warn: Positive = Field(0.5, description="above this it is called alarming")
    gradient_norm_usual: Positive = Field(
        0.42, description="median gradient norm of a usual warm-up, shown beside the measured one"
    )
    gradient_norm_warn: Positive = Field(
        5.0, description="median gradient norm of the warm-up above which gate 2 warns"
    )
    throughput_drop_max: Share = Field(0.40, description="loss of writing speed against the last shard of the cell")
    coverage_target: Share = Field(0.92, description="of the ten most influential steps, in one epoch of sampling")
    coverage_warn: Share = Field(0.85, description="coverage below which gate 3 warns")
    buffer_growth_max: Share = Field(0.03, description="change of bytes an episode against the last shard, either way")
    idle_share_max: Share = Field(
        0.15, description="share of steps that no later step depends on and that earn nothing"
    )
    entropy_min: Positive = Field(0.1, description="entropy of the last update below which gate 4 warns, nats")
    advantage_mean_max: Positive = Field(0.5, description="mean advantage, in its own standard deviations, either sign")
    plateau_improvement: Share = Field(0.005, description="least gain of the last third of the validations")
    success_min: Share = Field(0.75, description="hold-out success below which no bundle is made")
    success_target: Share = Field(0.897, description="hold-out success below which gate 5 warns")
    success_stall: Share = Field(0.72, description="success around which training has been seen to get stuck")
    success_stall_width: Share = Field(
        0.03, description="how near to it counts as stuck; changes the remedy, not the verdict"
    )
    decision_seconds_max: Positive = Field(5.0, description="simulated seconds a decision above which gate 5 warns")
    decision_seconds_warn: Positive = Field(6.2, description="above this it is called alarming")
    attributed_min: Share = Field(
        0.80, description="share of failures attributed to a disturbance below which gate 5 warns"
    )
    attributed_target: Share = Field(0.92, description="from this on it is called good")
    attributed_warn: Share = Field(0.25, description="below this it is called alarming")
    checkpoint_mb_max: Positive = Field(850.0, description="size of the policy package, MB; a larger one is an error")
    checkpoint_growth_max: Positive = Field(2.0, description="size over the champion's; a larger one is an error")
    latency_p99_ms_max: Positive = Field(
        3_800.0, description="99th percentile of one local decision; a slower one is an error"
    )
    latency_p99_ms_local: Positive = Field(10.0, description="the same; a slower one warns")
    parity_abs_max: Positive = Field(1e-5, description="largest difference of a probability between bundle and policy")
    parity_value_rel_max: Positive = Field(
        1e-5, description="largest relative difference of a value between bundle and policy"
    )
    drift_kl_review: Positive = Field(0.15, description="KL(candidate || champion) above which a person is asked, nats")


class Settings(BaseSettings):
    """Everything that can be set, with its default."""

    model_config = SettingsConfigDict(
        env_prefix="AGENTPIPE_", env_nested_delimiter="__", env_ignore_empty=True, extra="forbid", frozen=True
    )

    home: Path = Field(Path(".agentpipe"), description="folder that holds every store")
    profile: ProfileName = Field("standard", description="sizes and gates; demo is for a first look, not promotable")
    machine_history: Path | None = Field(None, description="machine-history table that becomes the line profile")
    table_source: Path | None = Field(None, description="disturbance table to follow instead of the home's copy")
    seed: int = Field(0, ge=0, lt=2**63, description="root of all randomness")
    threads: int = Field(2, gt=0, le=256, description="threads of simulation and training")
    training: TrainingSettings = TrainingSettings()
    aids: AidSettings = AidSettings()
    orchestrator: OrchestratorSettings = OrchestratorSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    experience: ExperienceSettings = ExperienceSettings()
    feedback: FeedbackSettings = FeedbackSettings()
    finetuning: FineTuningSettings = FineTuningSettings()
    promotion: PromotionSettings = PromotionSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    alerts: AlertSettings = AlertSettings()
    redis_url: SecretStr | None = Field(
        None,
        validation_alias=AliasChoices("redis_url", "AGENTPIPE_REDIS_URL", "REDIS_URL"),
        description="Redis that distributes the table and carries feedback; REDIS_URL is read too; none = files only",
    )
    triton_url: str | None = Field(
        None, description="HTTP address of a Triton in explicit control mode for server checks; none = one is started"
    )
    serving: ServingSettings = ServingSettings()
    agent: AgentSettings = AgentSettings()
    gates: GateSettings = GateSettings()

    def digest(self) -> str:
        """Digest of what changes results: not places, nor how things are kept, taken in, scheduled and told.

        Raises:
            SettingsError: a file that is named cannot be read.
        """
        content = self.model_dump(mode="json", exclude=_NO_RESULT)
        if self.machine_history is not None:
            remedy = "give the path of an existing CSV file"
            content["machine_history"] = _content_digest(self.machine_history, "machine_history", remedy)
        if self.training.demonstrations is not None:
            path = self.training.demonstrations
            told = path / "manifest.json" if path.is_dir() else path  # what a sealed shard says of its content
            remedy = "give a Parquet file of decision records, or the folder of a sealed shard"
            content["demonstrations"] = _content_digest(told, "training.demonstrations", remedy)
        return digest_bytes(canonical_json(content))


def _content_digest(path: Path, field: str, remedy: str) -> str:
    try:
        return digest_bytes(path.read_bytes())
    except OSError as error:
        text = f"{path} cannot be read: {error.strerror}"
        raise SettingsError(text, field=field, remedy=remedy) from error


_NO_RESULT: dict[str, Any] = {
    **dict.fromkeys(
        ("home", "machine_history", "table_source", "experience", "feedback", "schedule", "alerts", "redis_url",
         "triton_url", "serving", "agent"), True
    ),
    "training": {"demonstrations"},
}  # fmt: skip
# Variables of ours that are not settings of a run.
_READ_ELSEWHERE = ("cache", "data", "shared_data", "test_home", "test_redis_url", "triton_home")

DEMO: dict[str, dict[str, Any]] = {
    "training": {
        "environments": 360,
        "total_steps": 400_000,
        "epochs": 2,
        "minibatch": 2_048,
        "warmup_minibatch": 720,
        "warmup_episodes": 40_000,
        "validate_every": 5,
        "checkpoint_every": 10,
    },
    "gates": {"beats_random_only": True},
    "evaluation": {"environments": 150, "episodes_per_env": 2, "attribution_episodes": 200, "statistics_steps": 300},
}


def load_settings(**overrides: Any) -> Settings:
    """Settings from the environment and from ``overrides`` (those that are not ``None``), over the profile's sizes.

    Raises:
        SettingsError: a value is malformed, unknown or out of range; the message names the field.
    """
    given = {key: value for key, value in overrides.items() if value is not None}
    _check_sections()
    try:
        settings = Settings(**given)
        if settings.profile == "demo":
            sections = {
                name: {**sizes, **getattr(settings, name).model_dump(exclude_unset=True)}
                for name, sizes in DEMO.items()
            }
            settings = Settings(**{**given, **sections})
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        remedy = "correct or unset the variable; agentpipe settings then lists them all"
        # pydantic's own text shows every value, also a secret one under a misspelt name: not chained
        raise SettingsError(f"setting {field}: {first['msg']}", field=field, remedy=remedy) from None
    except MalformedError as error:
        raise SettingsError(f"malformed setting: {error}", remedy="set AGENTPIPE_<SECTION>__<NAME>=VALUE") from None
    return settings


def _check_sections() -> None:
    """Refuses variables such as ``AGENTPIPE_TRANING__EPOCHS`` or ``AGENTPIPE_SEDE``: nothing would read them."""
    prefix = "AGENTPIPE_"
    sections = [name for name, field in Settings.model_fields.items() if isinstance(field.default, _Section)]
    for name in os.environ:
        section, nested, _ = name.removeprefix(prefix).partition("__")
        known = sections if nested else (*Settings.model_fields, *_READ_ELSEWHERE)
        if name.startswith(prefix) and section.lower() not in known:
            remedy = f"known: {', '.join(known)}; correct or unset the variable"
            raise SettingsError(f"unknown setting {name}", field=name, remedy=remedy)
