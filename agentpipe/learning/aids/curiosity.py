"""Curiosity: a bonus for what has rarely been tried, by counting (Strehl and Littman, 2008; Tang et al., 2017).

Each step falls into a cell, made of a coarse view of the observation acted on and the action taken. With n(cell) the
steps of all environments that fell into it since the aid began, this rollout's included, a step's bonus is

    weight / sqrt(n(cell))

beside its scaled reward. All steps of a rollout are counted before any bonus is given: which environment stands first
makes no difference. Counts are kept in a table of fixed size; cells that hash to the same place count together.

*The coarse view.* On the built-in line: the work order (segment, what was declared, judged and dispatched, how the
repair stands), bit by bit, and how much has been heard of the machines together, in steps of half a standard deviation.
Readings are left out: they are noise to a count, no two of them are alike, and every step would be new. Where the
features have other names: the signs of :data:`BITS` random projections of the normalised observation (SimHash, Charikar
2002), under which observations at an angle a differ in each bit with probability a / pi; and the segment.

The table begins empty when the aid starts. A policy that has given up on most of what it once tried meets it as new.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
import numpy.typing as npt
import torch

from agentpipe.environments.jit import entry, inlined
from agentpipe.environments.rng import fold
from agentpipe.learning.aids.plateau import Plateau
from agentpipe.learning.aids.remedy import Remedy

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agentpipe.learning.aids.options import AidOptions
    from agentpipe.learning.gates import GateFigure
    from agentpipe.learning.samples.rollout import Rollout
    from agentpipe.learning.tensors import Arrays

ORDER: Final = (
    "segment",
    "declared_machine",
    "declared_mode",
    "severity",
    "depth",
    "depot",
    "technician",
    "order",
)
"""blocks of the line's observation that are looked at feature by feature"""
HEARD: Final = "count"
"""block of which the mean counts"""
BITS: Final = 16
"""random projections, where there are no such blocks"""
TABLE: Final = 2**18
"""places in the table of counts: one million bytes"""


class Cells:
    """Which cell a step falls into.

    Args:
        names: of the D observation features.
        seed: of the random projections.
    """

    def __init__(self, names: Sequence[str], seed: int) -> None:
        blocks = [name.partition(".")[0] for name in names]
        known = set(ORDER) | {HEARD} <= set(blocks)
        self.size = len(names)
        self.exact = np.array([i for i, block in enumerate(blocks) if known and block in ORDER], np.int64)
        self.pooled = np.array([i for i, block in enumerate(blocks) if known and block == HEARD], np.int64)
        generator = np.random.default_rng(np.random.SeedSequence([seed, 0xC0]))
        drawn = generator.standard_normal((self.size, 0 if known else BITS)).astype(np.float32)
        self.planes = torch.from_numpy(drawn)

    def place(self, rollout: Rollout, out: npt.NDArray[np.int64]) -> None:
        """Writes the place in the table of each of the rollout's M steps into ``out``, i64[M]."""
        encoded = rollout.encoded.reshape(rollout.live, -1)
        signs = torch.mm(encoded[:, : self.size], self.planes).numpy()
        action = rollout.action.reshape(-1).numpy()
        _place(encoded.numpy(), signs, self.exact, self.pooled, action, rollout.segment.reshape(-1), out)


class Curiosity(Remedy):
    """Adds a bonus to rewards.

    Args:
        options: of all aids.
        names: of the observation features.
        seed: of the training.
    """

    name: ClassVar[str] = "curiosity"

    def __init__(self, options: AidOptions, names: Sequence[str], seed: int) -> None:
        super().__init__(options.curiosity, options)
        self.cells = Cells(names, seed)
        self.plateau = Plateau(options.stall_updates)
        self.counts: npt.NDArray[np.uint32] = np.zeros(TABLE if self.active else 0, np.uint32)
        self._mean = 0.0

    def begin(self, reason: str) -> None:
        """Starts with an empty table."""
        super().begin(reason)
        self.counts = np.zeros(TABLE, np.uint32)

    def end(self, reason: str, *, rest: int = 0) -> None:
        """Forgets the counts."""
        super().end(reason, rest=rest)
        self.counts, self._mean = np.zeros(0, np.uint32), 0.0

    def bonus(self, rollout: Rollout) -> npt.NDArray[np.float32] | None:
        """Counts the rollout's steps, and gives each its bonus, f32[T, N]."""
        if not self.active:
            return None
        place = np.empty(rollout.live, np.int64)
        bonus = np.empty(rollout.live, np.float32)
        self.cells.place(rollout, place)
        _count(place, self.counts, np.float32(self.options.curiosity_weight), bonus)
        self._mean = float(bonus.mean(dtype=np.float64))
        return bonus.reshape(rollout.steps, rollout.size)

    def updated(self, figures: Mapping[str, float], warnings: Sequence[GateFigure]) -> None:
        """Starts at a standstill, ends when it is over."""
        self.judge(self.plateau.hear(figures, warnings))

    def figures(self) -> dict[str, float]:
        """On or off; while on, the mean bonus of a step and how many cells were met."""
        if not self.active:
            return {"aids/curiosity": 0.0}
        cells = float(np.count_nonzero(self.counts))
        return {"aids/curiosity": 1.0, "aids/curiosity_bonus": self._mean, "aids/curiosity_cells": cells}

    def state(self) -> tuple[dict[str, Any], Arrays]:
        """See :meth:`Remedy.state`; with the returns that are listened to, and the counts."""
        content, _ = super().state()
        return {**content, "returns": self.plateau.returns, "mean": self._mean}, {"counts": self.counts}

    def restore(self, content: Mapping[str, Any], arrays: Arrays) -> None:
        """The inverse of :meth:`state`.

        Raises:
            ValueError: the table of counts has another size.
        """
        super().restore(content, arrays)
        self.plateau.returns, self._mean = list(content["returns"]), float(content["mean"])
        if arrays["counts"].shape != (TABLE if self.active else 0,):
            raise ValueError(f"a table of {arrays['counts'].shape} counts")
        self.counts = arrays["counts"].astype(np.uint32)


@inlined
def _mixed(key, value):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202 - a kernel
    return fold(key, np.uint64(np.int64(value)))


@entry
def _place(encoded, signs, exact, pooled, action, segment, out):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202 - a kernel
    # A two-valued feature has values at least two standard deviations apart: one of them tells them from each other.
    for row in range(len(out)):
        word = np.uint64(0)
        for index in exact:
            word = word * np.uint64(31) + np.uint64(np.int64(math.floor(encoded[row, index])))
        heard = np.float32(0.0)
        for index in pooled:
            heard += encoded[row, index]
        if len(pooled) > 0:
            word = _mixed(word, math.floor(np.float32(2.0) * heard / np.float32(len(pooled))))
        for bit in range(signs.shape[1]):
            word = np.uint64(2) * word + np.uint64(signs[row, bit] > np.float32(0.0))
        word = _mixed(_mixed(word, action[row]), segment[row])
        out[row] = np.int64(word & np.uint64(TABLE - 1))


@entry
def _count(place, counts, weight, bonus):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202 - a kernel
    for row in range(len(place)):
        counts[place[row]] += np.uint32(1)
    for row in range(len(place)):
        bonus[row] = weight / np.float32(math.sqrt(counts[place[row]]))
