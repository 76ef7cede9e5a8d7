"""Rows of policy input, as arrays of one length, and where representative ones come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from agentpipe.errors import ServingError
from agentpipe.experience.store.shard import open_shard

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
    """

    observation: npt.NDArray[np.float32]
    last_action: npt.NDArray[np.int64]
    time: npt.NDArray[np.float32]
    mask: npt.NDArray[np.bool_]

    def __post_init__(self) -> None:
        expected = {
            "observation": (np.float32, 2),
            "last_action": (np.int64, 1),
            "time": (np.float32, 1),
            "mask": (np.bool_, 2),
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
        return PolicyInputs(self.observation[index], self.last_action[index], self.time[index], self.mask[index])

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """The arrays as the graph takes them, by input name: vectors become columns ``[N, 1]``."""
        return {
            "observation": self.observation,
            "last_action": self.last_action[:, None],
            "time": self.time[:, None],
            "mask": self.mask,
        }

    @staticmethod
    def concatenate(parts: Sequence[PolicyInputs]) -> PolicyInputs:
        """All rows of ``parts``, in order."""
        return PolicyInputs(
            np.concatenate([part.observation for part in parts]),
            np.concatenate([part.last_action for part in parts]),
            np.concatenate([part.time for part in parts]),
            np.concatenate([part.mask for part in parts]),
        )


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
