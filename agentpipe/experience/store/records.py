"""Fixed-size binary records: every number little-endian, every record with its own checksum.

Four kinds: one a step, one an episode, one for the observation that a cut episode would have gone on from, and the
compact form of a step from which the simulator makes the full one again. Each begins with ``checksum`` (XXH64 of all
bytes behind it), then ``time_ns``; what follows those 16 bytes is *content*, which alone enters digests: equal
episodes have equal digests, whenever they were played. Every size is a multiple of eight bytes.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

FORMAT: Final = 2
COMPOUND_FORMAT: Final = 3
"""as 2, but some episodes were played under a compound disturbance, without which they cannot be played again"""
READABLE: Final = (FORMAT, COMPOUND_FORMAT)
RECORDS: Final = "records.bin"
EPISODES: Final = "episodes.bin"
FINALS: Final = "finals.bin"
GRAPH: Final = "graph.bin"
CHECKSUM: Final = "checksum"
PREFIX: Final = 16
"""bytes of checksum and time stamp before the content"""
MAX_EPISODE_STEPS: Final = 4_096
"""longest episode that a shard takes; its graph has 64 words a step"""
NO_FINAL: Final = -1

EPISODE: Final = np.dtype(
    [
        (CHECKSUM, "<u8"),
        ("time_ns", "<i8"),  # of its first step
        ("first", "<u8"),  # its first record; the others follow
        ("graph", "<u8"),  # its first word in the graph file
        ("graph_checksum", "<u8"),  # XXH64 of its words
        ("final", "<i8"),  # its record in the finals, NO_FINAL where it ended by itself
        ("environment", "<u4"),  # index in the catalogue
        ("episode", "<u4"),
        ("steps", "<u4"),
        ("return", "<f4"),
        ("elapsed_seconds", "<f4"),
        ("decision_seconds", "<f4"),
        ("success", "u1"),
        ("reason", "i1"),  # agentpipe.environments.layout.REASONS; -1 where the recording was cut
        ("mode", "i1"),  # true fault mode
        ("machine", "i1"),  # true machine
        ("cut", "u1"),  # 1 = the recording ended before the episode
        ("compound", "u1", (3,)),  # agentpipe.environments.compound; 0 = the disturbance of the environment's own row
    ]
)

COMPACT: Final = np.dtype(
    [
        (CHECKSUM, "<u8"),
        ("time_ns", "<i8"),
        ("log_probability", "<f4"),
        ("value", "<f4"),
        ("policy", "<u4"),
        ("action", "<i2"),
        ("padding", "u1", (2,)),
    ]
)
"""one step of a shrunk episode: what the simulator cannot say again"""


def format_of(episodes: npt.NDArray[Any]) -> int:
    """The format of a shard of these rows."""
    return COMPOUND_FORMAT if episodes["compound"].any() else FORMAT


def step_dtype(observation_size: int, action_count: int) -> np.dtype[Any]:
    """The record of one step: what the player saw, what it did and how likely that was, what came of it."""
    return _padded(
        [
            (CHECKSUM, "<u8"),
            ("time_ns", "<i8"),  # UTC, when the step was taken
            ("environment", "<u4"),  # index in the catalogue
            ("episode", "<u4"),
            ("policy", "<u4"),  # index in the shard's list of policies
            ("fingerprint", "<u4"),  # CRC-32 form of the disturbance fingerprint
            ("produced", "<u4"),  # tokens that this step made (agentpipe.environments.layout.TOKENS)
            ("used", "<u4"),  # tokens that it needed
            ("time", "<f4"),  # minutes since the alarm, before the action
            ("log_probability", "<f4"),  # of the action, under the player
            ("value", "<f4"),  # of the observation, under the player; 0 for a player without a critic
            ("reward", "<f4"),
            ("action", "<i2"),
            ("last_action", "<i2"),  # action_count = none yet
            ("step", "<u2"),
            ("segment", "i1"),
            ("terminated", "u1"),
            ("truncated", "u1"),
            ("earned", "u1"),  # 1 = the reward is not just the running cost of time
            ("reserved", "u1", (2,)),
            ("mask", "u1", (mask_bytes(action_count),)),  # bit i of byte j = action 8 j + i
            ("observation", "<f4", (observation_size,)),
        ]
    )


def final_dtype(observation_size: int, action_count: int) -> np.dtype[Any]:
    """What the player would have seen next, where an episode was cut: for the value that stands in for the rest."""
    return _padded(
        [
            (CHECKSUM, "<u8"),
            ("time_ns", "<i8"),
            ("environment", "<u4"),
            ("episode", "<u4"),
            ("time", "<f4"),
            ("last_action", "<i2"),
            ("segment", "i1"),
            ("reserved", "u1"),
            ("mask", "u1", (mask_bytes(action_count),)),
            ("observation", "<f4", (observation_size,)),
        ]
    )


def mask_bytes(action_count: int) -> int:
    """Bytes of a packed mask, a multiple of four so that the observation behind it is aligned."""
    return -(-action_count // 32) * 4


def _padded(fields: list[tuple[Any, ...]]) -> np.dtype[Any]:
    size = np.dtype(fields).itemsize
    return np.dtype([*fields, ("padding", "u1", (-size % 8,))]) if size % 8 else np.dtype(fields)


def pack_masks(mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint8]:
    """Booleans ``[n, A]`` as bits, uint8 ``[n, mask_bytes(A)]``."""
    packed = np.packbits(mask, axis=-1, bitorder="little")
    missing = mask_bytes(mask.shape[-1]) - packed.shape[-1]
    return np.pad(packed, [(0, 0)] * (packed.ndim - 1) + [(0, missing)]) if missing else packed


def unpack_masks(packed: npt.NDArray[np.uint8], action_count: int) -> npt.NDArray[np.bool_]:
    """The inverse of :func:`pack_masks`."""
    bits = np.unpackbits(np.ascontiguousarray(packed), axis=-1, count=action_count, bitorder="little")
    return bits.view(np.bool_)


def graph_words(steps: int) -> int:
    """Words of 64 bits in the graph of an episode: a row a step, one bit for each step that it may depend on."""
    return steps * (-(-steps // 64))


def describe(dtype: np.dtype[Any]) -> list[dict[str, Any]]:
    """Name, format, shape and byte offset of each field, for the manifest."""
    assert dtype.fields is not None
    assert dtype.names is not None
    described = []
    for name in dtype.names:
        field, offset = dtype.fields[name][:2]
        described.append({"name": name, "format": field.base.str, "shape": list(field.shape), "offset": int(offset)})
    return described
