"""Rows of policy input, as arrays of one length, and where representative ones come from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from agentpipe.errors import ServingError
from agentpipe.experience.store.shard import open_shard
from agentpipe.serving.signature import MEMORY

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


@dataclass(frozen=True)
class PolicyInputs:
    """N rows of what a policy sees.

    Args:
        observation: float32 ``[N, D]``, raw (normalisation is inside the policy).
        last_action: int64 ``[N]``; A means "none yet".
        time: float32 ``[N]``, minutes since the alarm.
        mask: bool ``[N, A]``, True where the action is allowed.
        memory: float32 ``[N, M]``, what a policy with a memory remembers; of no width where none is given.
    """

    observation: npt.NDArray[np.float32]
    last_action: npt.NDArray[np.int64]
    time: npt.NDArray[np.float32]
    mask: npt.NDArray[np.bool_]
    memory: npt.NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 0), np.float32))

    def __post_init__(self) -> None:
        if not self.memory.size:
            object.__setattr__(self, "memory", np.zeros((len(self.observation), 0), np.float32))
        expected = {
            "observation": (np.float32, 2),
            "last_action": (np.int64, 1),
            "time": (np.float32, 1),
            "mask": (np.bool_, 2),
            "memory": (np.float32, 2),
        }
        for name, (dtype, rank) in expected.items():
            array = getattr(self, name)
            if array.dtype != dtype or array.ndim != rank or len(array) != len(self.observation):
                found = f"{array.dtype}{list(array.shape)}"
                wanted = f"{np.dtype(dtype)} of rank {rank} with {len(self.observation)} rows"
                raise ServingError(
                    f"{name} is {found}, wanted {wanted}", field=name, remedy="pass arrays of one length"
                )

    def __len__(self) -> int:
        return len(self.observation)

    def rows(self, index: slice | npt.NDArray[np.int64]) -> PolicyInputs:
        """The rows that ``index`` picks."""
        return PolicyInputs(*(array[index] for array in self.arrays))

    def with_mask(self, mask: npt.NDArray[np.bool_]) -> PolicyInputs:
        """The same rows with other masks."""
        return PolicyInputs(self.observation, self.last_action, self.time, mask, self.memory)

    def remembering(self, size: int, seed: int = 0) -> PolicyInputs:
        """The same rows with a memory of ``size`` units, drawn from -1 to 1, where a GRU's state lies."""
        drawn = np.random.default_rng(seed).uniform(-1.0, 1.0, (len(self), size)).astype(np.float32)
        return PolicyInputs(self.observation, self.last_action, self.time, self.mask, drawn)

    @property
    def arrays(self) -> tuple[npt.NDArray[Any], ...]:
        """All of them, in the order of the arguments."""
        return self.observation, self.last_action, self.time, self.mask, self.memory

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """The arrays as the graph takes them, by input name: vectors become columns ``[N, 1]``.

        The memory is among them only where it has a width.
        """
        kept = {MEMORY: self.memory} if self.memory.shape[1] else {}
        return {
            "observation": self.observation,
            "last_action": self.last_action[:, None],
            "time": self.time[:, None],
            "mask": self.mask,
            **kept,
        }

    @staticmethod
    def concatenate(parts: Sequence[PolicyInputs]) -> PolicyInputs:
        """All rows of ``parts``, in order."""
        columns = zip(*(part.arrays for part in parts), strict=True)
        return PolicyInputs(*(np.concatenate(column) for column in columns))


def recorded_inputs(shards: Sequence[Path], *, count: int = 512, seed: int = 0) -> PolicyInputs:
    """Draws ``count`` rows (or all, when there are fewer) evenly over sealed shards, reproducibly.

    Raises:
        ServingError: no shard holds a record.
        CorruptError: a shard is damaged.
    """
    generator = np.random.default_rng(seed)
    parts: list[PolicyInputs] = []
    for path in shards:
        shard = open_shard(path)
        share = min(len(shard.records), -(-count // len(shards)))
        if share:
            rows = np.sort(generator.choice(len(shard.records), size=share, replace=False))
            records = shard.records[rows]
            parts.append(
                PolicyInputs(
                    np.ascontiguousarray(records["observation"], dtype=np.float32),
                    records["last_action"].astype(np.int64),
                    records["time"].astype(np.float32),
                    shard.unpack_masks(records["mask"]),
                )
            )
    if not parts:
        raise ServingError("no recorded observation to compare with", remedy="materialise trajectories first")
    inputs = PolicyInputs.concatenate(parts)
    return inputs.rows(slice(0, count))
