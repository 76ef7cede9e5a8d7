"""The disturbance orchestrator (S7): training environments go where the policy is least sure of what to do.

Before every ``every``-th update a share of the training environments, drawn anew, is given combinations of sensor,
network and load disturbances from their next episodes on, put together from rows of the pinned table; all others keep
the rows of their own. Part of the moves goes round all combinations evenly; the rest is drawn by a bandit over them
(:mod:`.orchestrator_bandit`), whose context is the environment's template. Which variant of a level an environment gets
is drawn evenly. What is learned of a combination comes from every environment that plays under it, steered or not.

Random numbers are keyed by seed and decision. Only pools for training can be given other disturbances
(:meth:`~agentpipe.environments.pool.LinePool.override`); where the pool is none of the built-in line nothing is done.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from agentpipe.environments.compound import BACKGROUND, NONE, compound_code, levels_of
from agentpipe.environments.jit import entry
from agentpipe.environments.layout import PROTOCOLS
from agentpipe.errors import NonFiniteError
from agentpipe.learning.aids.base import Aid
from agentpipe.learning.aids.orchestrator_bandit import ARMS, Bandit, arm_of, levels_of_arm
from agentpipe.learning.aids.orchestrator_log import (
    CLASSES,
    EVERYWHERE,
    FILE,
    GROUPS,
    REASONS,
    ROW,
    class_of,
    write_log,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from agentpipe.environments.compound import Compounds
    from agentpipe.environments.pool import LinePool
    from agentpipe.learning.aids.base import Knobs
    from agentpipe.learning.aids.options import OrchestratorOptions
    from agentpipe.learning.samples.rollout import Rollout
    from agentpipe.learning.tensors import Arrays

FLOOR, EXPLORE, EXPLOIT = range(len(REASONS))
_STREAM: Final = 0x0C
"""of the random numbers, beside other streams under the same seed"""
_COUNTERS: Final = ("updates", "decisions", "floor_moves")
_CODES: Final = np.array([[compound_code(level, place) for place in range(32)] for level in range(6)], np.uint8)

Codes = npt.NDArray[np.int64]


class Orchestrator(Aid):
    """Gives training environments the combinations that the policy's action entropy is highest under.

    Args:
        options: share, floor, and how often.
        seed: of the training.
    """

    name: ClassVar[str] = "orchestrator"

    def __init__(self, options: OrchestratorOptions, seed: int) -> None:
        super().__init__()
        self.options, self.seed = options, seed
        self.bandit = Bandit(options.discount, options.certainty)
        self.updates, self.decisions, self.floor_moves = 0, 0, 0
        self._kept: list[npt.NDArray[Any]] = []  # rows of earlier decisions
        self._rows = np.zeros(0, ROW)  # of the latest one
        self._row_of = np.zeros(0, np.int32)  # i32[N], the row of each environment, -1 = not steered
        self._played: tuple[npt.NDArray[Any], ...] = ()
        self._elsewhere = np.zeros(2)  # entropy and decisions of the environments that were not steered
        self._told = False

    @property
    def log(self) -> npt.NDArray[Any]:
        """Every decision so far, :data:`.orchestrator_log.ROW`; those of the latest as far as they were measured."""
        return np.concatenate([*self._kept, self._rows])

    def before(self, knobs: Knobs, pool: LinePool) -> None:
        """Decides, where it is time."""
        del knobs
        compounds = getattr(pool, "compounds", None)
        if compounds is None:
            if not self._told:
                self.note("idle", "the pool is not one of the built-in line for training: nothing to steer", 0.0)
            self._told = True
            return
        if self.updates % self.options.every == 0:
            self._decide(pool, compounds)
        self.updates += 1
        now, following = pool.compound, pool.next_compound()
        arms = np.stack([_arms(now, compounds), _arms(following, compounds)], axis=1)
        self._played = arms, (now != following).any(axis=1), _contexts(compounds)

    # -- deciding ----------------------------------------------------------------------------------------------

    def _decide(self, pool: LinePool, compounds: Compounds) -> None:
        sequence = np.random.SeedSequence(self.seed, spawn_key=(_STREAM, self.decisions))
        generator = np.random.Generator(np.random.Philox(sequence))
        allowed = np.flatnonzero(compounds.allowed)
        steered = np.sort(generator.permutation(allowed)[: round(self.options.share * len(allowed))])
        generator.shuffle(steered)
        floor = math.ceil(self.options.floor * len(steered))
        self.bandit.forget()
        contexts = _contexts(compounds)[steered]
        drawn, best = self.bandit.draw(contexts[floor:], generator)
        arms = np.concatenate([(self.floor_moves + np.arange(floor)) % ARMS, drawn])
        self.floor_moves += floor  # the floor goes round all combinations, and goes on there at the next decision
        reason = np.concatenate([np.full(floor, FLOOR), np.where(best, EXPLOIT, EXPLORE)])
        groups = np.where(reason == FLOOR, EVERYWHERE, contexts[:, 0] * len(PROTOCOLS) + contexts[:, 1])
        self._keep(pool, steered, groups, arms, reason, self.bandit.expected(arms, contexts))
        self.decisions += 1
        back = np.setdiff1d(np.flatnonzero(pool.next_compound().any(axis=1)), steered)
        pool.override(back, NONE)
        pool.override(steered, _codes(arms, compounds, generator))

    def _keep(
        self,
        pool: LinePool,
        steered: Codes,
        groups: Codes,
        arms: Codes,
        reason: Codes,
        expected: npt.NDArray[np.float64],
    ) -> None:
        """Begins the rows of a decision."""
        key = (reason * (GROUPS + 1) + groups - EVERYWHERE) * ARMS + arms
        _, first, row, count = np.unique(key, return_index=True, return_inverse=True, return_counts=True)
        self._kept.append(self._rows)
        self._rows = np.zeros(len(first), ROW)
        self._rows["update"] = self.updates + 1
        for name, values in (("group", groups), ("arm", arms), ("reason", reason)):
            self._rows[name] = values[first]
        self._rows["environments"] = count
        self._rows["expected"] = np.bincount(row, expected, len(first)) / count
        self._row_of = np.full(pool.size, -1, np.int32)
        self._row_of[steered] = row
        self._elsewhere[:] = 0.0
        self.note("steer", self._told_of(arms, reason, expected), float(len(arms)))

    def _told_of(self, arms: Codes, reason: Codes, expected: npt.NDArray[np.float64]) -> str:
        counts = np.bincount(reason, minlength=len(REASONS))
        classes = np.bincount(class_of(arms), minlength=len(CLASSES))
        text = ", ".join(f"{count} {name}" for name, count in zip(REASONS, counts, strict=True))
        most = CLASSES[int(classes.argmax())]
        known = f"; expected entropy {np.mean(expected):.3f} nats" if len(arms) and np.isfinite(expected).all() else ""
        return f"{len(arms)} environments: {text}; most often {most} ({int(classes.max())}){known}"

    # -- hearing -----------------------------------------------------------------------------------------------

    def collected(self, rollout: Rollout, pool: LinePool) -> None:
        """Learns how sure the policy was under each combination.

        Raises:
            NonFiniteError: an entropy is NaN or infinite; names environment and step.
        """
        if not self._played:
            return
        arms, waits, contexts = self._played
        self._played = ()
        entropy = rollout.entropy.numpy()
        if not math.isfinite(float(entropy.sum(dtype=np.float64))):
            step, row = (int(index) for index in np.argwhere(~np.isfinite(entropy))[0])
            remedy = "training stopped at the first such value; the last checkpoint is good"
            raise NonFiniteError("not finite", environment=pool.names[row], field="entropy", step=step, remedy=remedy)
        summed, decisions = np.zeros((pool.size, 2)), np.zeros((pool.size, 2), np.int64)
        begun = np.zeros(pool.size, np.int64)
        _add_up(entropy, rollout.mask.numpy(), rollout.done, summed, decisions, begun)
        played, part = np.nonzero((decisions > 0) & (arms >= 0))
        means = summed[played, part] / decisions[played, part]
        self.bandit.hear(arms[played, part], contexts[played], means, decisions[played, part])
        self._measure(summed, decisions, begun, waits)

    def _measure(
        self,
        summed: npt.NDArray[np.float64],
        decisions: Codes,
        begun: Codes,
        waits: npt.NDArray[np.bool_],
    ) -> None:
        """Adds to the rows of the latest decision what was played under its combinations."""
        steered = self._row_of >= 0
        summed[waits, 0], decisions[waits, 0] = 0.0, 0  # still under what was before
        self._elsewhere += summed[~steered].sum(), decisions[~steered].sum()
        row, size = self._row_of[steered], len(self._rows)
        self._rows["entropy"] += np.bincount(row, summed[steered].sum(axis=1), size)
        self._rows["decisions"] += np.bincount(row, decisions[steered].sum(axis=1), size).astype(np.int64)
        self._rows["episodes"] += np.bincount(row, begun[steered], size).astype(np.int32)

    def figures(self) -> dict[str, float]:
        """Steered environments, mean entropy there and elsewhere, share in sensor x network."""
        rows = self._rows
        if not len(rows) or not rows["decisions"].sum():
            return {}
        moves = np.bincount(class_of(rows["arm"]), rows["environments"], len(CLASSES))
        steered = float(rows["entropy"].sum() / rows["decisions"].sum())
        found = {"orchestrator/environments": float(moves.sum()), "orchestrator/entropy_steered": steered}
        if self._elsewhere[1]:
            found["orchestrator/entropy_elsewhere"] = float(self._elsewhere[0] / self._elsewhere[1])
        both = moves[CLASSES.index("sensor × network")] + moves[CLASSES.index("all three")]
        return found | {"orchestrator/sensor_network": float(both / moves.sum())}

    # -- keeping -----------------------------------------------------------------------------------------------

    def leave(self, directory: Path) -> Path:
        """Writes the log of decisions."""
        write_log(directory / FILE, self.log)
        return directory / FILE

    def state(self) -> tuple[dict[str, Any], Arrays]:
        """Counters; beliefs, the log, and who is steered."""
        content = {name: getattr(self, name) for name in _COUNTERS}
        content |= {"told": self._told, "latest": len(self._rows)}
        log = self.log
        assert ROW.names is not None
        rows = {f"log_{name}": np.ascontiguousarray(log[name]) for name in ROW.names}
        return content, {**self.bandit.state(), **rows, "row_of": self._row_of, "elsewhere": self._elsewhere}

    def restore(self, content: Mapping[str, Any], arrays: Arrays) -> None:
        """The inverse of :meth:`state`."""
        for name in _COUNTERS:
            setattr(self, name, int(content[name]))
        self._told = bool(content["told"])
        self.bandit.restore(arrays)
        assert ROW.names is not None
        log = np.zeros(len(arrays["log_update"]), ROW)
        for name in ROW.names:
            log[name] = arrays[f"log_{name}"]
        earlier = len(log) - int(content["latest"])
        self._kept, self._rows = [log[:earlier]], log[earlier:]
        rows, elsewhere = arrays["row_of"].astype(np.int32), arrays["elsewhere"].astype(np.float64)
        if rows.max(initial=-1) >= len(self._rows) or elsewhere.shape != self._elsewhere.shape:
            raise ValueError("the rows of the orchestrator's log are others")
        self._row_of, self._elsewhere = rows, elsewhere


def _contexts(compounds: Compounds) -> Codes:
    """i64[N, 4]: sensor type, protocol, topology and own fault mode of each environment."""
    parts = compounds.sensor_type, compounds.protocol, compounds.topology, compounds.own_mode
    return np.stack(parts, axis=1).astype(np.int64)


def _arms(codes: npt.NDArray[np.uint8], compounds: Compounds) -> Codes:
    """i64[N]: the combination that codes u8[N, 3] come to, -1 where it is none of the 216."""
    levels = levels_of(codes)
    return arm_of(np.where(levels < 0, compounds.own_levels, levels))


def _codes(arms: Codes, compounds: Compounds, generator: np.random.Generator) -> npt.NDArray[np.uint8]:
    """u8[k, 3]: combinations i64[k] with a variant for each kind, drawn evenly."""
    levels = levels_of_arm(arms).astype(np.int64)
    variants = compounds.variants[np.arange(3), np.maximum(levels - 1, 0)]
    places = np.minimum((generator.random(levels.shape) * variants).astype(np.int64), variants - 1)
    return np.where(levels == 0, np.uint8(BACKGROUND), _CODES[levels, places])


@entry
def _add_up(entropy, mask, done, summed, decisions, begun):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202 - a kernel
    """Entropy and number of the decisions with a choice, [N, 2]: before an environment's first new episode, and since.

    ``begun`` i64[N] counts the episodes that begin.
    """
    steps, size, actions = mask.shape
    for t in range(steps):
        for n in range(size):
            legal = 0
            for action in range(actions):
                if mask[t, n, action]:
                    legal += 1
                    if legal > 1:
                        since = 1 if begun[n] > 0 else 0
                        summed[n, since] += entropy[t, n]
                        decisions[n, since] += 1
                        break
            if done[t, n]:
                begun[n] += 1
