"""Who plays where: the recording behaviour, the expert, and those that the policy is judged beside."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentpipe.errors import CorruptError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from agentpipe.defs.resources import Workspace
    from agentpipe.defs.scene import Scene
    from agentpipe.environments.demonstrator import Expert
    from agentpipe.environments.line_profile import LineProfile
    from agentpipe.environments.players import Player
    from agentpipe.learning.policy.package import PolicyPackage
    from agentpipe.learning.succession.champion import Champion

EPSILON = 0.2
"""How often the behaviour acts at random before there is a champion."""
TUNING_ENVIRONMENTS, TUNING_TRIALS = 1_000, 40
"""On how many training environments the thresholds of the rules are searched, and how many are tried."""
DIAGNOSES, MOST_EPISODES = 20_000, 12
"""How many labelled faults the diagnoser learns from, and from how many episodes of one environment at most."""
VALIDATION_EPISODES = 8
"""Episodes of each validation environment in one look."""


def champion(workspace: Workspace) -> Champion | None:
    """The policy that is in use, or ``None`` before the first.

    Raises:
        CorruptError: there is none, although a candidate was published beside one: the pointer was lost.
    """
    from agentpipe.learning.succession.champion import ChampionStore

    folder = workspace.root / "champion"
    current = ChampionStore(folder).current()
    if current is None and workspace.references.tell_of("publish", "champion"):
        remedy = "restore champion.json from a backup; to begin anew remove references/publish"
        raise CorruptError("the champion's pointer is lost", file=folder / "champion.json", remedy=remedy)
    return current


def parent_of(workspace: Workspace, partition: str | None) -> Champion | None:
    """The champion that the candidate recorded as its parent, whoever is champion now; ``None`` where it had none."""
    from agentpipe.learning.succession.champion import ChampionStore

    parent = workspace.references.load("policy_checkpoint", partition).figure("parent")
    history = ChampionStore(workspace.root / "champion").history()
    return next((entry for entry in reversed(history) if entry.digest == parent), None)


def rules(profile: LineProfile) -> Player:
    """The rule-based player with its frozen thresholds."""
    from agentpipe.environments.rules import RulesPlayer

    return RulesPlayer(profile)


@dataclass(frozen=True)
class Behaviour:
    """Who records trajectories."""

    player: Player
    version: str
    """what it is: a package digest, or name and version of a built-in player"""
    ordinal: int
    """how many champions there have been; samplers count freshness in these"""


def behaviour(workspace: Workspace) -> Behaviour:
    """Who records trajectories: the champion sampled, before that the rules with ε = 0.2."""
    from agentpipe.environments.layout import SIMULATOR_VERSION
    from agentpipe.experience.behaviour import epsilon_player

    seed, current = workspace.settings.seed, champion(workspace)
    if current is None:
        player = epsilon_player(rules(workspace.line_profile()), EPSILON)
        return Behaviour(player, f"rules-{SIMULATOR_VERSION}-epsilon-{EPSILON}", 0)
    from agentpipe.learning.policy.package import PolicyPackage
    from agentpipe.learning.policy.player import PolicyPlayer

    package = PolicyPackage.load(workspace.root / current.package)
    sampled = PolicyPlayer(package, greedy=False, seed=seed, name="champion")
    return Behaviour(sampled, current.digest, current.sequence)


def expert() -> Expert:
    """Whom the warm-up clones: measures like an engineer, then declares and repairs what is true."""
    from agentpipe.environments.demonstrator import DemonstratorPlayer

    return DemonstratorPlayer()


def validator(setting: Scene) -> Callable[[PolicyPackage], float]:
    """Scores a package by its greedy success over the validation environments; the hold-out is never touched."""
    from agentpipe.evaluation.rollout import play_first_episodes
    from agentpipe.learning.policy.player import PolicyPlayer

    environments = setting.catalog.environments("validation")
    names = [environment.environment_id for environment in environments]

    def score(package: PolicyPackage) -> float:
        pool = setting.pool(environments, "VALIDATION")
        played = play_first_episodes(pool, PolicyPlayer(package), VALIDATION_EPISODES, environment_ids=names)
        return float(played["success"].mean())

    return score


def judged_players(package: Path, setting: Scene) -> list[Player]:
    """The policy and those it is judged beside: random, rules, diagnoser, oracle."""
    from agentpipe.environments.players import OraclePlayer, RandomPlayer

    return [policy_player(package), RandomPlayer(), tuned_rules(setting), diagnoser(setting), OraclePlayer()]


def tuned_rules(setting: Scene) -> Player:
    """The rules as an honest rival: their thresholds are searched anew for a line of the user's own."""
    from agentpipe.environments.line_profile import default_profile
    from agentpipe.environments.rules import RulesPlayer, tune_rules
    from agentpipe.evaluation.rollout import play_first_episodes

    if setting.profile.digest == default_profile().digest:
        return RulesPlayer(setting.profile)
    environments = setting.catalog.spread("train", TUNING_ENVIRONMENTS)
    names = [environment.environment_id for environment in environments]

    def score(player: Player) -> float:
        pool = setting.pool(environments, "TRAIN")
        return float(play_first_episodes(pool, player, 1, environment_ids=names)["success"].mean())

    return tune_rules(setting.profile, score, trials=TUNING_TRIALS, seed=setting.seed)[0]


def diagnoser(setting: Scene) -> Player:
    """A classifier trained on labelled faults of training environments, with the rules behind it."""
    from agentpipe.environments.diagnoser import DiagnoserPlayer, fit_diagnosis

    environments = setting.catalog.environments("train")
    episodes = min(MOST_EPISODES, -(-DIAGNOSES // len(environments)))
    return DiagnoserPlayer(fit_diagnosis(setting.pool(environments, "TRAIN"), episodes, seed=setting.seed % 2**32))


def policy_player(package: Path) -> Player:
    """The greedy policy of a package."""
    from agentpipe.learning.policy.package import PolicyPackage
    from agentpipe.learning.policy.player import PolicyPlayer

    return PolicyPlayer(PolicyPackage.load(package))
