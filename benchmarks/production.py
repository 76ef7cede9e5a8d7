"""A day of simulated production: a policy decides, an annotator who learns the truth later labels what it decided."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from agentpipe.environments.pool import LinePool
    from agentpipe.feedback.labelled import LabelledDecisions
    from agentpipe.learning.policy.package import PolicyPackage

CONFIDENCE = 0.9
"""of every label"""


@dataclass(frozen=True)
class Day:
    """Decisions of one day that commit to something, n in total, in the order of episodes and steps.

    None of them comes after a wrong diagnosis of its episode.
    """

    columns: dict[str, npt.NDArray[Any]]
    """observation, last_action, time, mask, action, as the policy saw and chose; ``truth`` i64[n], the action that the
    true state asked for; ``probabilities`` f32[n, A]; ``episode`` i64[n]"""
    success: npt.NDArray[np.bool_]
    """bool[E], of each episode"""
    mode: npt.NDArray[np.int8]
    """i8[E], true fault mode"""


def committing() -> npt.NDArray[np.bool_]:
    """bool[A]: declaring, judging, choosing depth, rejecting; not measuring, and nothing that can be done again."""
    from agentpipe.environments.layout import A_DEPOT, A_MACHINE, ACTION_COUNT

    chosen = np.zeros(ACTION_COUNT, np.bool_)
    chosen[A_MACHINE:A_DEPOT] = True
    return chosen


def mistaken(pool: LinePool) -> npt.NDArray[np.bool_]:
    """bool[N]: the work order already names another machine or mode than the true one: what follows is not judged."""
    truth, order = pool.hidden(), pool.plant().order
    machine, mode = order[:, 0], order[:, 1]
    wrong: npt.NDArray[np.bool_] = (machine >= 0) & (machine != truth.machine)
    wrong |= (mode >= 0) & (mode != truth.mode)
    return wrong


def play_day(pool: LinePool, package: PolicyPackage, episodes: int = 1) -> Day:
    """``episodes`` episodes of each environment of ``pool``, greedy as a server answers."""
    from agentpipe.environments.players import OraclePlayer

    oracle, chosen = OraclePlayer(), committing()
    size = pool.size
    finished = np.zeros(size, np.int64)
    success, mode = np.zeros((size, episodes), np.bool_), np.zeros((size, episodes), np.int8)
    parts: list[dict[str, npt.NDArray[Any]]] = []
    pool.reset()
    while (finished < episodes).any():
        output = package.act(pool.observation, pool.last_action, pool.time, pool.mask)
        action, truth = output.action, oracle.act(pool).actions
        judged = chosen[action] & pool.mask[np.arange(size), truth] & ~mistaken(pool)
        rows = np.flatnonzero((finished < episodes) & judged)
        seen = {name: getattr(pool, name)[rows].copy() for name in ("observation", "last_action", "time", "mask")}
        seen |= {"action": action[rows], "truth": truth[rows], "probabilities": output.probabilities[rows]}
        parts.append({**seen, "episode": rows * episodes + finished[rows]})
        pool.step(action)
        ended = np.flatnonzero((pool.terminated | pool.truncated) & (finished < episodes))
        success[ended, finished[ended]] = pool.result_success[ended]
        mode[ended, finished[ended]] = pool.result_mode[ended]
        finished[ended] += 1
    order = np.argsort(np.concatenate([part["episode"] for part in parts]), kind="stable")
    columns = {name: np.concatenate([part[name] for part in parts])[order] for name in parts[0]}
    return Day(columns, success.ravel(), mode.ravel())


def label_day(day: Day, most: int, prefix: str, *, typed: bool = True) -> LabelledDecisions:
    """At most ``most`` labels, worst first: decisions of failed episodes, by the least probability of the action taken.

    A decision is correct where it is what the true state asked for, else wrong and corrected.

    Args:
        day: what was decided.
        most: labels.
        prefix: of the label ids.
        typed: with the error type of the decision's segment; else without one.
    """
    columns = day.columns
    failed = np.flatnonzero(~day.success[columns["episode"]])
    taken = columns["probabilities"][failed, columns["action"][failed]]
    rows = np.sort(failed[np.argsort(taken, kind="stable")][:most])
    part = {name: column[rows] for name, column in columns.items()}
    return as_labels(part, part["truth"], prefix, typed=typed)


def as_labels(
    part: dict[str, npt.NDArray[Any]], right: npt.NDArray[np.int64], prefix: str, *, typed: bool = True
) -> LabelledDecisions:
    """Labels that call ``right`` i64[n] the right actions of the decisions ``part``."""
    from agentpipe.environments.layout import ACTION_SEGMENT
    from agentpipe.feedback.labelled import CORRECT, EXECUTION, PERCEPTION, PLANNING, WRONG, LabelledDecisions

    # What an annotator calls an error in identify, assess, dispatch and execute.
    error_of_segment = np.array([PERCEPTION, PLANNING, PLANNING, EXECUTION], np.int8)
    wrong = part["action"] != right
    kind = error_of_segment[ACTION_SEGMENT[part["action"]]] if typed else np.full(len(right), -1, np.int8)
    return LabelledDecisions(
        label_id=tuple(f"{prefix}-{row:06d}" for row in range(len(right))),
        decision_id=tuple(f"decision-{prefix}-{row:06d}" for row in range(len(right))),
        line_id=("line",) * len(right),
        policy_version=("simulated",) * len(right),
        **{name: part[name] for name in ("observation", "last_action", "time", "mask", "action", "probabilities")},
        verdict=np.where(wrong, WRONG, CORRECT).astype(np.int8),
        error_type=np.where(wrong, kind, -1).astype(np.int8),
        confidence=np.full(len(right), CONFIDENCE, np.float32),
        corrected_action=np.where(wrong, right, -1).astype(np.int64),
    )


def shuffled(labelled: LabelledDecisions, seed: int) -> LabelledDecisions:
    """The negative control: a correction becomes another legal answer to the same question, each as likely.

    A permutation of the corrections would not do: most corrections of a weak mode are that mode, so that most decisions
    would keep theirs.
    """
    from agentpipe.environments.layout import A_DEPTH, A_MACHINE, A_MODE, A_REJECT, A_SEVERITY, ACTION_COUNT

    question = np.searchsorted([A_MACHINE, A_MODE, A_SEVERITY, A_DEPTH, A_REJECT], np.arange(ACTION_COUNT), "right")
    generator = np.random.default_rng(seed)
    corrected = labelled.corrected_action.copy()
    for row in np.flatnonzero(corrected >= 0):
        others = labelled.mask[row] & (question == question[corrected[row]])
        others[[corrected[row], labelled.action[row]]] = False
        if others.any():
            corrected[row] = generator.choice(np.flatnonzero(others))
    return dataclasses.replace(labelled, corrected_action=corrected)


def success_by_mode(
    make_pool: Callable[[], LinePool], names: Sequence[str], package: PolicyPackage, episodes: int
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int8]]:
    """Success bool[N, K] and true mode i8[N, K] of the greedy policy's first K episodes of each environment."""
    from agentpipe.evaluation.rollout import play_first_episodes
    from agentpipe.learning.policy.player import PolicyPlayer

    played = play_first_episodes(make_pool(), PolicyPlayer(package), episodes, environment_ids=names)
    return played["success"], played["mode"]
