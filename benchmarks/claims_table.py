"""The one table of what is claimed, and of the arms that it is measured with.

An arm says what it changes as a function of the training options, in absolute terms: where the default is already like
that, its run is the default's, since runs are kept by what they depend on.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from agentpipe.learning.aids.options import OrchestratorOptions
from benchmarks.claims_run import Arm
from benchmarks.claims_verdict import Kind, steps_to

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from agentpipe.learning.options import TrainingOptions
    from benchmarks.claims_run import Change

    Row = Mapping[str, Any]

TARGET, COLD_TARGET = 0.85, 0.5
"""success that steps are counted to: from cloned weights, and from random ones"""


class Value(NamedTuple):
    """Of one seed."""

    value: float
    bound: bool = False
    """one of two arms did not reach the target: its budget stands for its steps"""


@dataclass(frozen=True)
class Claim:
    """Something that is said of a technique, and how it is measured."""

    system: str
    name: str
    says: str
    """the field's figure in words; empty where it gives none"""
    arms: tuple[str, ...]
    """names; with the technique first"""
    value: Callable[..., Value | None]
    """of the rows of the arms, in order, under one seed"""
    kind: Kind
    field: float | None = None
    neutral: float | None = None
    more_is_better: bool = True


# ------------------------------------------------------------------------------------------------ what arms change


def same(options: TrainingOptions) -> TrainingOptions:
    """The recipe as it is."""
    return options


def ppo(**changes: Any) -> Change:  # noqa: ANN401 - options of every type
    """Changes options of the policy gradient."""
    return lambda options: dataclasses.replace(options, ppo=dataclasses.replace(options.ppo, **changes))


def network(**changes: Any) -> Change:  # noqa: ANN401
    """Changes options of the network; it gets cloned weights of its own."""
    return lambda options: dataclasses.replace(options, network=dataclasses.replace(options.network, **changes))


def aids(**changes: Any) -> Change:  # noqa: ANN401
    """Changes the training aids."""
    return lambda options: dataclasses.replace(options, aids=dataclasses.replace(options.aids, **changes))


def orchestrated(options: TrainingOptions) -> TrainingOptions:
    """With the orchestrator at its defaults."""
    return dataclasses.replace(options, orchestrator=OrchestratorOptions())


def distilled(options: TrainingOptions) -> TrainingOptions:
    """The last two sevenths of the budget are spent on the hardest training environments alone."""
    last = round(options.budget_steps * 2 / 7)
    changed = aids(distillation="always", distillation_steps=last)(options)
    return dataclasses.replace(changed, budget_steps=options.budget_steps - last)


DEFAULT, COLD = "default", "default, random weights"
DEMONSTRATED = "50 demonstrations, else random weights"
STANDARD = "standard profile"
"""no arm: whole main jobs, measured by ``benchmarks.seeds``"""
ONE_CLIP = ppo(clip=(0.2,) * 4, normalise="batch")

ARMS = (
    Arm(DEFAULT, same),
    Arm("one clip range", ONE_CLIP),
    Arm("credit cut", ppo(credit="segment")),
    Arm("fusion, unit head", network(encoder="fusion", actor_head="unit", perception=0)),
    Arm("fusion, linear head", network(encoder="fusion", actor_head="linear", perception=0)),
    Arm("plain MLP", network(encoder="mlp", actor_head="linear", perception=0)),
    Arm("perception", network(perception=48)),
    Arm("no perception", network(perception=0)),
    Arm("memory", network(memory=32)),
    Arm("no memory", network(memory=0)),
    Arm("3,000 environments", same, environments=3_000),
    Arm("1,000 environments", same, environments=1_000),
    Arm("dynamic lambda", aids(dynamic_lambda="always")),
    Arm("layer-wise rates", aids(layer_rates="always")),
    Arm("curiosity", aids(curiosity="always")),
    Arm("orchestrator", orchestrated),
    Arm("distillation", distilled),
    Arm(COLD, same, cold=True),
    Arm("one clip range, random weights", ONE_CLIP, cold=True),
    Arm("curiosity, random weights", aids(curiosity="always"), cold=True),
    Arm(DEMONSTRATED, same, cold=True, demonstrations=50),
)

# ---------------------------------------------------------------------------------------------- what is measured


def learned_to(row: Row, target: float) -> float | None:
    """Steps of the policy gradient until the curve of ``row`` shows ``target``; ``None`` where it never does.

    What was cloned before does not count: the two arms of a claim cloned equally much, and the more of it there is in
    both, the nearer to one their ratio would be.
    """
    found = steps_to(row["curve"], target)
    return None if found is None else found - row["cloned_steps"]


def steps(target: float) -> Callable[[Row, Row], Value | None]:
    """Steps of the policy gradient to ``target`` with the technique over those without."""

    def value(mine: Row, other: Row) -> Value | None:
        reached = [learned_to(row, target) for row in (mine, other)]
        if reached == [None, None]:
            return None
        one, two = (
            row["steps"] - row["cloned_steps"] if found is None else found
            for row, found in zip((mine, other), reached, strict=True)
        )
        return Value(max(one, 1.0) / max(two, 1.0), None in reached)

    return value


def gain(mine: Row, other: Row) -> Value:
    """Success on held-out environments with the technique minus that without."""
    return Value(mine["success"] - other["success"])


def quotient(name: str, over: str = "") -> Callable[..., Value | None]:
    """One figure over another of the same row, or, without ``over``, over the same of the other row."""

    def value(mine: Row, other: Row | None = None) -> Value | None:
        below = (mine if other is None else other)[over or name]
        return Value(mine[name] / below) if below else None

    return value


def figure(name: str) -> Callable[[Row], Value]:
    """One figure of the row."""
    return lambda mine: Value(mine[name])


def helps(system: str, technique: str, arm: str, base: str = DEFAULT, target: float = TARGET) -> list[Claim]:
    """The two claims of a technique of which the field gives no figure: fewer steps, more success."""
    return [
        Claim(
            system,
            f"{technique}: steps to {target:.0%}",
            "",
            (arm, base),
            steps(target),
            "ratio",
            neutral=1.0,
            more_is_better=False,
        ),
        Claim(system, f"{technique}: success on held-out lines", "", (arm, base), gain, "difference", neutral=0.0),
    ]


def more_environments(fewer: str) -> list[Claim]:
    """What all 7,000 training environments are worth against fewer of them, in batches of the same size."""
    name, arms = f"7,000 environments, against {fewer.partition(' ')[0]}", (DEFAULT, fewer)
    return [
        Claim("S1", f"{name}: success on held-out lines", "", arms, gain, "difference", neutral=0.0),
        Claim(
            "S1",
            f"{name}: standard deviation of that over seeds",
            "",
            arms,
            gain,
            "spread",
            neutral=1.0,
            more_is_better=False,
        ),
    ]


CLAIMS = (
    Claim(
        "S20",
        "success of the standard profile on held-out lines",
        "51 % → 89.7 %",
        (STANDARD,),
        figure("success"),
        "level",
        0.897,
    ),
    Claim(
        "S20",
        "the same, minus that of the rules",
        "38.7 points",
        (STANDARD,),
        lambda mine: Value(mine["success"] - mine["rules_success"]),
        "difference",
        0.387,
        0.0,
    ),
    Claim(
        "S9",
        "clip range and normalisation of each segment, against one range of 0.2 for all: steps to 85%",
        "41 % faster",
        (DEFAULT, "one clip range"),
        steps(TARGET),
        "ratio",
        0.59,
        1.0,
        more_is_better=False,
    ),
    Claim(
        "S9",
        "the same from random weights: steps to 50%",
        "41 % faster",
        (COLD, "one clip range, random weights"),
        steps(COLD_TARGET),
        "ratio",
        0.59,
        1.0,
        more_is_better=False,
    ),
    Claim("S9", "the same: success on held-out lines", "", (DEFAULT, "one clip range"), gain, "difference", neutral=0),
    Claim(
        "S9",
        "credit over the whole episode, against credit cut at segments: what execute pays and identify is credited",
        "3.8 × reach",
        (DEFAULT,),
        quotient("arrived_episode", "arrived_segment"),
        "ratio",
        3.8,
        1.0,
    ),
    Claim(
        "S9",
        "the same: mean distance of the terms of an advantage",
        "3.8 × reach",
        (DEFAULT,),
        quotient("distance_episode", "distance_segment"),
        "ratio",
        3.8,
        1.0,
    ),
    *helps("S9", "credit over the whole episode", DEFAULT, "credit cut"),
    Claim(
        "S8",
        "fusion encoder and unit head, against a plain MLP: deviation of the action entropy",
        "−63 %",
        ("fusion, unit head", "plain MLP"),
        quotient("entropy_deviation"),
        "ratio",
        0.37,
        1.0,
        more_is_better=False,
    ),
    *helps("S8", "fusion encoder and unit head", "fusion, unit head", "plain MLP"),
    *helps("S8", "fusion encoder alone", "fusion, linear head", "plain MLP"),
    Claim(
        "S15",
        "causal draws over uniform ones: share of key-fault steps",
        "5.2 ×",
        (DEFAULT,),
        quotient("key_fault_causal", "key_fault_uniform"),
        "ratio",
        5.2,
        1.0,
    ),
    Claim(
        "S15",
        "the same: share of idle steps",
        "−78 %",
        (DEFAULT,),
        quotient("idle_causal", "idle_uniform"),
        "ratio",
        0.22,
        1.0,
        more_is_better=False,
    ),
    Claim("S15", "coverage of the ten most influential steps", "≥ 92 %", (DEFAULT,), figure("coverage"), "level", 0.92),
    Claim(
        "S7",
        "moves of the orchestrator in sensor × network (chance: 11.6%)",
        "83 %",
        ("orchestrator",),
        figure("coupled"),
        "level",
        0.83,
        25 / 216,
    ),
    Claim(
        "S7",
        "the same, load disturbed or not (chance: 69.4%)",
        "83 %",
        ("orchestrator",),
        figure("coupled_or_more"),
        "level",
        0.83,
        150 / 216,
    ),
    *helps("S7", "orchestrator", "orchestrator"),
    *more_environments("3,000 environments"),
    *more_environments("1,000 environments"),
    *helps("S12", "perception", "perception", "no perception"),
    *helps("S8", "recurrent memory", "memory", "no memory"),
    *helps("S10", "dynamic lambda", "dynamic lambda"),
    *helps("S10", "layer-wise rates", "layer-wise rates"),
    *helps("S10", "curiosity", "curiosity"),
    *helps("S10", "curiosity, from random weights", "curiosity, random weights", COLD, COLD_TARGET),
    *helps("S10", "50 demonstrations cloned, against random weights", DEMONSTRATED, COLD, COLD_TARGET),
    Claim(
        "S10",
        "distillation: success on held-out lines",
        "",
        ("distillation", DEFAULT),
        gain,
        "difference",
        neutral=0.0,
    ),
    Claim(
        "S10",
        "the same: success on the hardest training environments, after it and before",
        "",
        ("distillation",),
        lambda mine: Value(mine["hard_after"] - mine["hard_before"]),
        "difference",
        neutral=0.0,
    ),
    Claim(
        "S20",
        "trained policy over the rules: simulated time of a decision",
        "12.8 s → 3.4 s",
        (DEFAULT,),
        quotient("decision_seconds", "rules_decision_seconds"),
        "ratio",
        3.4 / 12.8,
        1.0,
        more_is_better=False,
    ),
)
