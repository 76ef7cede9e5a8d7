"""Milestone gates (S18) as pure functions: figures and thresholds in, judgements with a remedy out.

A judgement that is not passed either warns or is an error; only errors block what is downstream. A figure that does not
apply (a process count of a pool without processes) gives no judgement and is listed as not applicable; it is never a
pass. A figure that is not finite is always an error.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from agentpipe.errors import EvaluationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from agentpipe.learning.gates import GateFigure
    from agentpipe.settings import GateSettings

Severity = Literal["warn", "error"]

CHECK_NAMES: dict[int, tuple[str, ...]] = {
    1: ("reset_p99", "start_success", "slow_resets"),
    2: ("actor_loss", "critic_error", "gradient_norm"),
    3: ("write_throughput", "influence_coverage", "buffer_size", "idle_steps"),
    4: ("entropy", "advantage_mean", "plateau", "rewards"),
    5: ("beats_random", "success", "success_target", "decision_time", "failures_attributed"),
    6: ("checkpoint_size", "latency", "operators", "parity"),
}
"""Names of each gate's judgements under the ``standard`` profile."""


@dataclass(frozen=True)
class GateResult:
    """One judgement."""

    gate: int
    name: str
    passed: bool
    severity: Severity
    """How bad it is that it did not pass (or would be)."""
    value: float | None
    threshold: float | None
    remedy: str
    metadata: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The judgement as a JSON object; figures that are not finite become text."""
        result = {name: _jsonable(value) for name, value in asdict(self).items()}
        return {**result, "metadata": {name: _jsonable(value) for name, value in self.metadata.items()}}


def _jsonable(value: object) -> object:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def blocking(results: Iterable[GateResult]) -> bool:
    """True where at least one judgement is an error that did not pass."""
    return any(not result.passed and result.severity == "error" for result in results)


def _figure(figures: Mapping[str, Any], name: str) -> float | None:
    value = figures.get(name)
    return None if value is None else float(value)


def _required(figures: Mapping[str, Any], name: str) -> float:
    value = _figure(figures, name)
    if value is None:
        raise EvaluationError(f"the gate needs the figure {name!r}", remedy="run the step that measures it again")
    return value


def _judge(
    gate: int,
    name: str,
    value: float,
    threshold: float,
    remedy: str,
    *,
    severity: Severity,
    above: bool = False,
    **notes: object,
) -> GateResult:
    """Passed where ``value`` is at most (``above``: at least) ``threshold``."""
    if not math.isfinite(value):
        return GateResult(gate, name, False, "error", value, threshold, remedy, {**notes, "not_finite": True})
    passed = value >= threshold if above else value <= threshold
    return GateResult(gate, name, passed, severity, value, threshold, remedy, notes)


def _level(value: float, target: float, warn: float, *, above: bool = False) -> str:
    """``good`` at the target or better, ``alarming`` beyond the warning limit, else ``short`` of the target."""
    better = value >= target if above else value <= target
    worse = value < warn if above else value > warn
    return "good" if better else "alarming" if worse else "short"


# Gate 1 ------------------------------------------------------------------------------------------------------------

_POOL = (  # check, figure, threshold's field, at least?, severity, remedy
    ("reset_p99", "reset_p99_ms", "reset_p99_ms", False, "error", "lower the pool size or the load of this machine"),
    ("start_success", "start_success", "start_success", True, "error", "read the reasons of the failed starts"),
    ("slow_resets", "slow_reset_share", "slow_reset_share", False, "warn", "look at the cells with slow resets"),
    ("redis_round_trip", "redis_round_trip_ms", "redis_round_trip_ms", False, "warn", "move Redis nearer"),
    ("redis_connections", "redis_connection_share", "redis_connection_share", False, "warn", "close idle clients"),
    ("cpu_share", "cpu_share_deviation", "cpu_share_deviation", False, "warn", "even out quotas and pinning"),
    ("crash_rate", "crash_rate", "crash_rate", False, "error", "read exit signals and peak memory of the crashed"),
)


def pool_gate(figures: Mapping[str, Any], gates: GateSettings) -> tuple[GateResult, ...]:
    """Gate 1, pool health. A figure that is absent or ``None`` does not apply to the pool and is not judged.

    Raises:
        EvaluationError: not a single figure applies.
    """
    missing = [figure for _, figure, *_ in _POOL if _figure(figures, figure) is None]
    results = tuple(
        _judge(1, check, value, getattr(gates, limit), remedy, severity=severity, above=above, not_applicable=missing)  # type: ignore[arg-type]
        for check, figure, limit, above, severity, remedy in _POOL
        if (value := _figure(figures, figure)) is not None
    )
    if not results:
        raise EvaluationError("no pool figure to judge", remedy="measure the pool's health first")
    return results


# Gate 2 ------------------------------------------------------------------------------------------------------------


def warmup_gate(figures: Mapping[str, Any], gates: GateSettings) -> tuple[GateResult, ...]:
    """Gate 2, behaviour cloning: ``actor_loss``, ``critic_mae``, ``gradient_norm_median``; all of them warn.

    Where ``critic_mae`` is ``None`` no reward was recorded: the critic had nothing to learn, which is said.
    """
    loss, norm = _required(figures, "actor_loss"), _required(figures, "gradient_norm_median")
    loss_level = _level(loss, gates.warmup_actor_loss, gates.warmup_actor_loss_warn)
    more = "clone more expert episodes or for more epochs"
    return (
        _judge(2, "actor_loss", loss, gates.warmup_actor_loss, more, severity="warn", level=loss_level),
        _critic(figures, gates),
        _judge(
            2,
            "gradient_norm",
            norm,
            gates.gradient_norm_warn,
            "lower the learning rate, or clip harder",
            severity="warn",
            usual=gates.gradient_norm_usual,
        ),
    )


def _critic(figures: Mapping[str, Any], gates: GateSettings) -> GateResult:
    if "critic_mae" in figures and figures["critic_mae"] is None:
        reason = "the demonstrations hold no rewards: the critic learns once the policy gradient begins"
        return GateResult(2, "critic_error", False, "warn", None, None, reason, {"judged": False})
    error, limit = _required(figures, "critic_mae"), gates.warmup_critic_mae
    level = _level(error, limit, gates.warmup_critic_mae_warn)
    remedy = "check the scale of the returns, then clone longer"
    return _judge(2, "critic_error", error, limit, remedy, severity="warn", level=level)


# Gate 3 ------------------------------------------------------------------------------------------------------------

_FIRST = "nothing to compare with: no baseline yet"


def buffer_gate(
    figures: Mapping[str, Any], previous: Mapping[str, Any] | None, gates: GateSettings
) -> tuple[GateResult, ...]:
    """Gate 3, trajectory buffer; all of it warns.

    Args:
        figures: ``write_bytes_per_second`` (``None`` where nothing was left to write), ``coverage`` (of the ten most
            influential steps; ``None`` where no step has influence), ``bytes_per_episode``, ``behaviour`` (version of
            the recording policy), ``idle_share``.
        previous: The same of the cell's last shard; ``None`` for the first, which is the baseline.
        gates: Thresholds.
    """
    speed, size = _figure(figures, "write_bytes_per_second"), _required(figures, "bytes_per_episode")
    before = None if previous is None else _figure(previous, "write_bytes_per_second")
    coverage = _figure(figures, "coverage")
    slower = "compact the buffer (agentpipe buffer compact, retain), or look for what else writes to this disk"
    larger = "look for longer episodes in the reward histogram and the outcomes; a changed table row explains a step"
    fewer = "sample by causal priority, or draw more steps an epoch"
    results = []
    if before is None or speed is None:
        results.append(GateResult(3, "write_throughput", True, "warn", None, None, slower, {"note": _FIRST}))
    else:
        drop = 1 - speed / before
        results.append(_judge(3, "write_throughput", drop, gates.throughput_drop_max, slower, severity="warn"))
    if coverage is None:
        note = {"note": "no step has influence"}
        results.append(GateResult(3, "influence_coverage", False, "warn", None, gates.coverage_warn, fewer, note))
    else:
        level = _level(coverage, gates.coverage_target, gates.coverage_warn, above=True)
        results.append(
            _judge(
                3,
                "influence_coverage",
                coverage,
                gates.coverage_warn,
                fewer,
                severity="warn",
                above=True,
                level=level,
                target=gates.coverage_target,
            )
        )
    if previous is None or previous.get("behaviour") != figures.get("behaviour"):
        note = {"note": _FIRST if previous is None else "another behaviour policy plays episodes of other lengths"}
        results.append(GateResult(3, "buffer_size", True, "warn", None, None, larger, note))
    else:
        change = abs(size / _required(previous, "bytes_per_episode") - 1)
        results.append(_judge(3, "buffer_size", change, gates.buffer_growth_max, larger, severity="warn"))
    useless = "the behaviour measures what nothing rests on: lower its share of random actions, or sample by influence"
    idle = _required(figures, "idle_share")
    results.append(_judge(3, "idle_steps", idle, gates.idle_share_max, useless, severity="warn"))
    return tuple(results)


# Gate 4 ------------------------------------------------------------------------------------------------------------


def plateau_gain(curve: list[float]) -> float | None:
    """Best of the last third minus best before it; ``None`` for fewer than six values."""
    if len(curve) < 6:
        return None
    cut = len(curve) - len(curve) // 3
    return max(curve[cut:]) - max(curve[:cut])


def training_gate(figures: Mapping[str, Any], gates: GateSettings) -> tuple[GateResult, ...]:
    """Gate 4, training.

    Args:
        figures: ``entropy`` (nats, last update), ``advantage_mean`` (mean of raw advantages over their standard
            deviation, last updates), ``validation_curve`` (success at each look, oldest first).
        gates: Thresholds.
    """
    entropy, mean = _required(figures, "entropy"), _required(figures, "advantage_mean")
    curve = [float(value) for value in figures.get("validation_curve", ())]
    results = [
        _judge(
            4,
            "entropy",
            entropy,
            gates.entropy_min,
            "raise the entropy bonus; the policy has stopped exploring",
            severity="warn",
            above=True,
        ),
        _judge(
            4,
            "advantage_mean",
            abs(mean),
            gates.advantage_mean_max,
            "the critic is biased: lower lambda while advantages stay negative, or train the critic longer",
            severity="warn",
            signed=mean,
        ),
    ]
    if not all(math.isfinite(value) for value in curve):
        return (
            *results,
            GateResult(4, "plateau", False, "error", math.nan, None, "find the first value that is not finite"),
        )
    gain = plateau_gain(curve)
    reached = bool(curve) and max(curve) >= gates.success_target
    passed = reached or gain is None or gain >= gates.plateau_improvement
    notes = {"looks": len(curve), "target_reached": reached, "enough_looks": gain is not None}
    remedy = "raise lambda or the curiosity bonus, fine-tune on the hardest environments, or stop here"
    results.append(GateResult(4, "plateau", passed, "warn", gain, gates.plateau_improvement, remedy, notes))
    return tuple(results)


def rewards_gate(judged: Sequence[GateFigure], notes: Sequence[str] = ()) -> GateResult:
    """Gate 4, the discipline of rewards (S11); warns.

    Args:
        judged: Range, clamped share, signs of the advantages, reward gradients; see
            :mod:`agentpipe.learning.aids.reward_checks`.
        notes: What is not judged.

    Returns:
        How many of the figures do not pass, and which; the remedy is that of the first. Not passed where nothing was
        judged.
    """
    shown: dict[str, Any] = {figure.name: figure.value for figure in judged}
    shown |= {name: said for name, _, said in (note.partition(": ") for note in notes)}
    if not judged:
        return GateResult(4, "rewards", False, "warn", None, 0.0, "no update was made that could be judged", shown)
    short = [figure for figure in judged if figure.status != "pass"]
    finite = all(math.isfinite(figure.value) for figure in judged)
    shown["short"] = ", ".join(figure.name for figure in short) or "none"
    remedy = f"{short[0].name}: {short[0].remedy}" if short else "nothing to do"
    severity: Severity = "warn" if finite else "error"
    return GateResult(4, "rewards", not short, severity, float(len(short)), 0.0, remedy, shown)


# Gate 5 ------------------------------------------------------------------------------------------------------------


def _beats_random(summary: Mapping[str, Any], player: str, margin: float) -> GateResult:
    """The lower end of the paired difference to random must be above ``margin``: one constant answer may beat luck."""
    paired = summary["paired"].get(f"{player}-random")
    if paired is None:
        raise EvaluationError(f"no comparison of {player!r} with random", remedy="evaluate both in one call")
    low = paired["ci95"][0]
    value = -math.inf if low is None else float(low)
    notes = {"difference": paired["difference"], "ci95": paired["ci95"], "environments": paired["environments"]}
    remedy = "train longer; check that rewards and masks reach the policy"
    return GateResult(5, "beats_random", value > margin, "error", value, margin, remedy, notes)


def _success(figures: Mapping[str, Any], gates: GateSettings) -> tuple[GateResult, ...]:
    success = float(figures["success"])
    stalled = abs(success - gates.success_stall) <= gates.success_stall_width
    notes = {"ci95": figures["ci95"], "episodes": figures["episodes"], "stalled": stalled}
    return (
        _judge(
            5,
            "success",
            success,
            gates.success_min,
            "train longer, or look at the cells and segments where it fails",
            severity="error",
            above=True,
            **notes,
        ),
        _judge(
            5,
            "success_target",
            success,
            gates.success_target,
            "change the entropy weight or the clip ranges: training is stuck where it often is"
            if stalled
            else "train longer or wider; look at the cells and modes where it fails",
            severity="warn",
            above=True,
            **notes,
        ),
    )


def _attributed(attribution: Mapping[str, Any], gates: GateSettings) -> GateResult:
    share = attribution["attributed"]
    remedy = "the rest is skill or information: look at the reasons in the attribution table"
    if share is None:
        notes = {"status": attribution.get("status")}
        passed = notes["status"] == "NO_FAILURES"
        return GateResult(5, "failures_attributed", passed, "warn", None, gates.attributed_min, remedy, notes)
    level = _level(share, gates.attributed_target, gates.attributed_warn, above=True)
    notes = {"level": level, "ci95": attribution["ci95"], "sampled": attribution["sampled"]}
    return _judge(5, "failures_attributed", share, gates.attributed_min, remedy, severity="warn", above=True, **notes)


def evaluation_gate(
    summary: Mapping[str, Any], attribution: Mapping[str, Any] | None, gates: GateSettings, *, player: str = "policy"
) -> tuple[GateResult, ...]:
    """Gate 5, hold-out evaluation.

    Args:
        summary: ``EvaluationReport.summary`` with ``player`` and ``random``.
        attribution: ``AttributionReport.summary``; not judged where it is ``None``.
        gates: Thresholds; with ``beats_random_only`` nothing else is judged.
        player: Whose figures are judged.

    Raises:
        EvaluationError: the evaluation lacks ``player`` or ``random``.
    """
    beats = _beats_random(summary, player, gates.random_margin)
    if gates.beats_random_only:
        return (beats,)
    figures = summary["players"][player]
    seconds = float(figures["decision_seconds"])
    time = _judge(
        5,
        "decision_time",
        seconds,
        gates.decision_seconds_max,
        "fewer fresh measurements on slow protocols; look at the decision time by cell",
        severity="warn",
        level=_level(seconds, gates.decision_seconds_max, gates.decision_seconds_warn),
        ci95=figures["decision_seconds_ci95"],
    )
    judged = (beats, *_success(figures, gates), time)
    return judged if attribution is None else (*judged, _attributed(attribution, gates))


# Gate 6 ------------------------------------------------------------------------------------------------------------


def _size(figures: Mapping[str, Any], gates: GateSettings) -> GateResult:
    size = _required(figures, "checkpoint_bytes")
    champion = _figure(figures, "champion_checkpoint_bytes")
    limit = gates.checkpoint_mb_max * 1e6
    if champion is not None:
        limit = min(limit, gates.checkpoint_growth_max * champion)
    remedy = "a smaller network, or approve the growth by a setting"
    return _judge(6, "checkpoint_size", size, limit, remedy, severity="error", champion_bytes=champion)


def _latency(figures: Mapping[str, Any], gates: GateSettings) -> GateResult:
    p99 = _required(figures, "latency_p99_ms")
    hard = not p99 <= gates.latency_p99_ms_max
    severity: Severity = "error" if hard else "warn"
    limit = gates.latency_p99_ms_max if hard else gates.latency_p99_ms_local
    remedy = "one thread for inference; check what else runs on this machine; a smaller network"
    return _judge(6, "latency", p99, limit, remedy, severity=severity)


def bundle_gate(figures: Mapping[str, Any], gates: GateSettings) -> tuple[GateResult, ...]:
    """Gate 6, bundle.

    Args:
        figures: ``checkpoint_bytes``, ``champion_checkpoint_bytes`` (``None`` without a champion), ``latency_p99_ms``,
            ``unsupported_operators`` (names), ``parity_max_abs_diff`` (probabilities), ``parity_value_max_rel_diff``.
        gates: Thresholds.
    """
    operators = [str(name) for name in figures.get("unsupported_operators", ())]
    absolute, relative = _required(figures, "parity_max_abs_diff"), _required(figures, "parity_value_max_rel_diff")
    worst = max(absolute / gates.parity_abs_max, relative / gates.parity_value_rel_max)
    parity = _judge(
        6,
        "parity",
        worst if math.isfinite(absolute + relative) else math.nan,
        1.0,
        "compare layer by layer; export in float32 with the same operator set",
        severity="error",
        probabilities_abs=absolute,
        values_rel=relative,
    )
    supported = _judge(
        6,
        "operators",
        float(len(operators)),
        0.0,
        "replace these operators in the network",
        severity="error",
        unsupported=operators,
    )
    return (_size(figures, gates), _latency(figures, gates), supported, parity)
