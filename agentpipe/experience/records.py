"""Fixed-size binary records: one a step, one an episode. Every number little-endian, every record with its checksum."""

from __future__ import annotations

import zlib
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from agentpipe.errors import CorruptError

FORMAT: Final = 1
RECORDS: Final = "records.bin"
EPISODES: Final = "episodes.bin"
CHECKSUM: Final = "crc"

EPISODE: Final = np.dtype(
    [
        ("environment", "<u4"),  # index in the catalogue
        ("episode", "<u4"),
        ("first", "<u8"),  # its first record; the others follow
        ("steps", "<u2"),
        ("success", "u1"),
        ("reason", "i1"),  # agentpipe.environments.layout.REASONS
        ("mode", "i1"),  # true fault mode
        ("machine", "i1"),  # true machine
        ("return", "<f4"),
        ("elapsed_seconds", "<f4"),
        ("decision_seconds", "<f4"),
        (CHECKSUM, "<u4"),
    ]
)


def step_dtype(observation_size: int, action_count: int) -> np.dtype[Any]:
    """The record of one step: what the player saw, what it did and how likely that was, what came of it."""
    return np.dtype(
        [
            ("environment", "<u4"),  # index in the catalogue
            ("episode", "<u4"),
            ("step", "<u2"),
            ("segment", "i1"),
            ("terminated", "u1"),
            ("truncated", "u1"),
            ("last_action", "<i2"),  # action_count = none yet
            ("action", "<i2"),
            ("time", "<f4"),  # minutes since the alarm, before the action
            ("log_probability", "<f4"),  # of the action, under the player
            ("reward", "<f4"),
            ("policy", "<u4"),  # index in the manifest's list of policies
            ("fingerprint", "<u4"),  # CRC-32 form of the disturbance fingerprint
            ("mask", "u1", (-(-action_count // 8),)),  # bit i of byte j = action 8 j + i
            ("observation", "<f4", (observation_size,)),
            (CHECKSUM, "<u4"),
        ]
    )


def pack_masks(mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint8]:
    """Booleans ``[n, A]`` as bits, uint8 ``[n, ceil(A/8)]``."""
    return np.packbits(mask, axis=-1, bitorder="little")


def unpack_masks(packed: npt.NDArray[np.uint8], action_count: int) -> npt.NDArray[np.bool_]:
    """The inverse of :func:`pack_masks`."""
    bits = np.unpackbits(np.ascontiguousarray(packed), axis=-1, count=action_count, bitorder="little")
    return bits.view(np.bool_)


def checksums(records: npt.NDArray[Any]) -> npt.NDArray[np.uint32]:
    """CRC-32 of each record's bytes before its checksum field."""
    size = records.dtype.itemsize
    covered = size - 4
    data = memoryview(records.tobytes())
    values = (zlib.crc32(data[start : start + covered]) for start in range(0, size * len(records), size))
    return np.fromiter(values, dtype=np.uint32, count=len(records))


def seal(records: npt.NDArray[Any]) -> None:
    """Fills in the checksum of every record, in place."""
    records[CHECKSUM] = checksums(records)


def check(records: npt.NDArray[Any], file: object, *, block: int = 65_536) -> None:
    """Recomputes every checksum.

    Raises:
        CorruptError: names ``file`` and the first record that differs.
    """
    for start in range(0, len(records), block):
        part = records[start : start + block]
        wrong = checksums(part) != part[CHECKSUM]
        if wrong.any():
            remedy = "materialise these trajectories again"
            raise CorruptError("checksum differs", file=file, record=start + int(wrong.argmax()), remedy=remedy)


def describe(dtype: np.dtype[Any]) -> list[dict[str, Any]]:
    """Name, format, shape and byte offset of each field, for the manifest."""
    assert dtype.fields is not None
    assert dtype.names is not None
    described = []
    for name in dtype.names:
        field, offset = dtype.fields[name][:2]
        described.append({"name": name, "format": field.base.str, "shape": list(field.shape), "offset": int(offset)})
    return described
