"""XXH64 in compiled code: over bytes, over every record of an array, and in one pass with copying and looking.

The function is that of the public specification (xxHash fast digest algorithm, seed 0). Every record is a multiple of
eight bytes and begins with its checksum, which covers all bytes behind it.

All kernels that hash stand in this module, and the offsets that they know are its own constants: numba keys its cache
by the file of a kernel, not by what it calls.
"""

# What numba compiles returns what the caller's types say; the annotations are for readers.
# mypy: warn_return_any=False
from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from agentpipe.environments.jit import entry, inlined

_P1: Final = np.uint64(0x9E3779B185EBCA87)
_P2: Final = np.uint64(0xC2B2AE3D27D4EB4F)
_P3: Final = np.uint64(0x165667B19E3779F9)
_P4: Final = np.uint64(0x85EBCA77C2B2AE63)
_P5: Final = np.uint64(0x27D4EB2F165667C5)
_START1: Final = np.uint64((0x9E3779B185EBCA87 + 0xC2B2AE3D27D4EB4F) & 0xFFFFFFFFFFFFFFFF)
_START4: Final = np.uint64(-0x9E3779B185EBCA87 & 0xFFFFFFFFFFFFFFFF)
_0, _1, _2, _3, _4, _8 = (np.uint64(number) for number in (0, 1, 2, 3, 4, 8))
_11, _23, _27, _29, _31, _32, _33, _64 = (np.uint64(number) for number in (11, 23, 27, 29, 31, 32, 33, 64))
_7, _12, _18 = (np.uint64(number) for number in (7, 12, 18))

# Where the step record holds what is looked at, in units of four bytes (a test holds them against the dtype).
_ENVIRONMENT: Final = 4
_EPISODE: Final = 5
_POLICY: Final = 6
_FLOATS: Final = 10
_ACTION: Final = 14
_STEP: Final = 15
_EXPONENT: Final = np.uint32(0x7F800000)
_LOWEST: Final = np.uint32(0x00800000)
_LOW: Final = np.uint32(0xFFFF)

FLOAT_FIELDS: Final = ("time", "log_probability", "value", "reward")
"""the numbers of a step that must be finite besides the observation, in the order of the record"""

NOT_FINITE, ENVIRONMENT, EPISODE, STEP, POLICY, ACTION = range(1, 7)
"""what the copying kernel finds wrong"""


@inlined
def _rotate(word: np.uint64, bits: np.uint64) -> np.uint64:
    return (word << bits) | (word >> (_64 - bits))


@inlined
def _round(lane: np.uint64, word: np.uint64) -> np.uint64:
    return _rotate(lane + word * _P2, _31) * _P1


@inlined
def _merge(state: np.uint64, lane: np.uint64) -> np.uint64:
    return (state ^ _round(_0, lane)) * _P1 + _P4


@inlined
def _gather(v1: np.uint64, v2: np.uint64, v3: np.uint64, v4: np.uint64) -> np.uint64:
    state = _rotate(v1, _1) + _rotate(v2, _7) + _rotate(v3, _12) + _rotate(v4, _18)
    return _merge(_merge(_merge(_merge(state, v1), v2), v3), v4)


@inlined
def _avalanche(state: np.uint64) -> np.uint64:
    state = (state ^ (state >> _33)) * _P2
    state = (state ^ (state >> _29)) * _P3
    return state ^ (state >> _32)


@inlined
def _body(words: npt.NDArray[np.uint64], start: np.uint64, count: np.uint64, length: np.uint64) -> np.uint64:
    """The state after ``count`` whole words from ``start`` of a message of ``length`` bytes."""
    at, end = start, start + count
    state = _P5
    if length >= _32:
        v1, v2, v3, v4 = _START1, _P2, _0, _START4
        while at + _4 <= end:
            v1 = _round(v1, words[at])
            v2 = _round(v2, words[at + _1])
            v3 = _round(v3, words[at + _2])
            v4 = _round(v4, words[at + _3])
            at += _4
        state = _gather(v1, v2, v3, v4)
    state += length
    while at < end:
        state = _rotate(state ^ _round(_0, words[at]), _27) * _P1 + _P4
        at += _1
    return state


@inlined
def _hash(words: npt.NDArray[np.uint64], start: np.uint64, count: np.uint64) -> np.uint64:
    return _avalanche(_body(words, start, count, count * _8))


@entry
def _hash_bytes(words: npt.NDArray[np.uint64], tail: npt.NDArray[np.uint8], length: int) -> np.uint64:
    state = _body(words, _0, np.uint64(words.size), np.uint64(length))
    at, left = 0, tail.size
    if left >= 4:
        half = np.uint64(tail[0]) | np.uint64(tail[1]) << _8
        half |= np.uint64(tail[2]) << np.uint64(16) | np.uint64(tail[3]) << np.uint64(24)
        state = _rotate(state ^ (half * _P1), _23) * _P2 + _P3
        at = 4
    while at < left:
        state = _rotate(state ^ (np.uint64(tail[at]) * _P5), _11) * _P1
        at += 1
    return _avalanche(state)


@entry
def _fill(words: npt.NDArray[np.uint64], width: int) -> None:
    for record in range(words.size // width):
        start = np.uint64(record * width)
        words[start] = _hash(words, start + _1, np.uint64(width - 1))


@entry
def _wrong(words: npt.NDArray[np.uint64], width: int, wrong: npt.NDArray[np.bool_]) -> int:
    found = 0
    for record in range(words.size // width):
        start = np.uint64(record * width)
        wrong[record] = words[start] != _hash(words, start + _1, np.uint64(width - 1))
        found += wrong[record]
    return found


@entry
def _ranges(
    words: npt.NDArray[np.uint64],
    first: npt.NDArray[np.int64],
    count: npt.NDArray[np.int64],
    out: npt.NDArray[np.uint64],
) -> None:
    for i in range(first.size):
        out[i] = _hash(words, np.uint64(first[i]), np.uint64(count[i]))


@entry
def _flip(words: npt.NDArray[np.uint64], start: int) -> np.int64 | int:
    """256 × offset + what to XOR there, for the one byte whose change makes the checksum fit; -1 = no single one."""
    width = np.uint64(words.size)
    difference = words[0] ^ _hash(words, np.uint64(start), width - np.uint64(start))
    for byte in range(8):
        low = difference >> np.uint64(8 * byte)
        if low < np.uint64(256) and low << np.uint64(8 * byte) == difference:
            return 256 * byte + np.int64(low)
    for word in range(start, words.size):
        for byte in range(8):
            for value in range(1, 256):
                change = np.uint64(value) << np.uint64(8 * byte)
                words[word] ^= change
                fits = _hash(words, np.uint64(start), width - np.uint64(start)) == words[0]
                words[word] ^= change
                if fits:
                    return 256 * (8 * word + byte) + value
    return -1


@inlined
def _look(  # noqa: C901, PLR0913, PLR0917 - one return for each thing that can be wrong
    halves: npt.NDArray[np.uint32],
    half: int,
    keys: npt.NDArray[np.uint32],
    e: int,
    step: int,
    observation: int,
    size: int,
    actions: int,
    policies: int,
    where: npt.NDArray[np.int64],
) -> int:
    """What is wrong with the step record that begins at ``half``, or 0."""
    bad = np.uint32(0)  # its top bit is set once an exponent is all ones; without a branch, so that it vectorises
    for at in range(np.uint64(half + _FLOATS), np.uint64(half + _FLOATS + 4)):
        bad |= (halves[at] & _EXPONENT) + _LOWEST
    for at in range(np.uint64(half + observation), np.uint64(half + observation + size)):
        bad |= (halves[at] & _EXPONENT) + _LOWEST
    if halves[half + _ENVIRONMENT] != keys[e, 0]:
        return ENVIRONMENT
    if halves[half + _EPISODE] != keys[e, 1]:
        return EPISODE
    if np.int64(halves[half + _STEP] & _LOW) != step:
        return STEP
    if bad >> np.uint32(31):
        for i in range(3 + size, -1, -1):
            at = half + (_FLOATS + i if i < 4 else observation + i - 4)
            if (halves[at] & _EXPONENT) == _EXPONENT:
                where[2] = i
        return NOT_FINITE
    if np.int64(halves[half + _POLICY]) >= policies:
        return POLICY
    if np.int64(halves[half + _ACTION] & _LOW) >= actions:
        return ACTION
    return 0


@entry
def inspect_steps(  # noqa: PLR0913, PLR0917 - kernels take arrays one by one
    halves: npt.NDArray[np.uint32],
    keys: npt.NDArray[np.uint32],
    lengths: npt.NDArray[np.int64],
    words: int,
    observation: int,
    size: int,
    actions: int,
    policies: int,
    where: npt.NDArray[np.int64],
) -> int:
    """The looking part of :func:`copy_steps`."""
    half = 0
    for e in range(lengths.size):
        for step in range(lengths[e]):
            where[0], where[1] = e, step
            found = _look(halves, half, keys, e, step, observation, size, actions, policies, where)
            if found:
                return found
            half += 2 * words
    return 0


@entry
def copy_steps(  # noqa: PLR0913, PLR0917 - kernels take arrays one by one
    source: npt.NDArray[np.uint64],
    halves: npt.NDArray[np.uint32],
    target: npt.NDArray[np.uint64],
    keys: npt.NDArray[np.uint32],
    lengths: npt.NDArray[np.int64],
    words: int,
    observation: int,
    size: int,
    actions: int,
    policies: int,
    where: npt.NDArray[np.int64],
) -> int:
    """Copies step records, fills in their checksums and looks at each while it is at hand.

    Args:
        source: The records as words, one after another.
        halves: The same memory as uint32.
        target: Where they go; as long as ``source``.
        keys: Environment and episode of each episode, uint32 ``[e, 2]``.
        lengths: Steps of each episode, int64 ``[e]``; they add up to the records.
        words: Words of a record.
        observation: Offset of the observation in a record, in units of four bytes.
        size: Numbers in the observation.
        actions: How many actions there are.
        policies: How many policies there are.
        where: Takes the episode, the step in it, and which number is not finite (in the observation from 4 on).

    Returns:
        0, or the first thing that is wrong.
    """
    width = np.uint64(words)
    record = _0
    for e in range(lengths.size):
        for step in range(lengths[e]):
            start = record * width
            target[start] = _0
            at, end = start + _1, start + width
            state = _P5
            if width >= np.uint64(5):
                v1, v2, v3, v4 = _START1, _P2, _0, _START4
                while at + _4 <= end:
                    w1, w2, w3, w4 = source[at], source[at + _1], source[at + _2], source[at + _3]
                    target[at], target[at + _1], target[at + _2], target[at + _3] = w1, w2, w3, w4
                    v1, v2, v3, v4 = _round(v1, w1), _round(v2, w2), _round(v3, w3), _round(v4, w4)
                    at += _4
                state = _gather(v1, v2, v3, v4)
            state += (width - _1) * _8
            while at < end:
                target[at] = source[at]
                state = _rotate(state ^ _round(_0, source[at]), _27) * _P1 + _P4
                at += _1
            target[start] = _avalanche(state)

            where[0], where[1] = e, step
            found = _look(halves, np.int64(start) * 2, keys, e, step, observation, size, actions, policies, where)
            if found:
                return found
            record += _1
    return 0


def as_words(records: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """Contiguous records of a multiple of eight bytes each, as the same memory in words."""
    return records.view(np.uint64).reshape(-1) if len(records) else np.zeros(0, np.uint64)


def xxh64(data: bytes | bytearray | memoryview | npt.NDArray[Any]) -> int:
    """XXH64 of ``data``, seed 0.

    >>> hex(xxh64(b"abc"))
    '0x44bc2cf5ad770999'
    """
    raw = np.frombuffer(data, np.uint8) if len(data) else np.zeros(0, np.uint8)
    whole = raw.size // 8 * 8
    return int(_hash_bytes(raw[:whole].view(np.uint64), raw[whole:], raw.size))


def fill(records: npt.NDArray[Any]) -> None:
    """Writes the checksum of each of the contiguous ``records`` into its first eight bytes."""
    _fill(as_words(records), records.itemsize // 8)


def wrong(records: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """True for each of the contiguous ``records`` whose checksum does not fit."""
    found = np.zeros(len(records), np.bool_)
    _wrong(as_words(records), records.itemsize // 8, found)
    return found


def range_checksums(
    words: npt.NDArray[np.uint64], first: npt.NDArray[np.int64], count: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint64]:
    """XXH64 of each range ``words[first:first + count]``, uint64 ``[ranges]``."""
    out = np.zeros(len(first), np.uint64)
    _ranges(words, first, count, out)
    return out


def find_flip(message: bytes, checksum: int | None = None) -> tuple[int, int] | None:
    """Which single byte was changed: its offset, and the value that it must have had.

    Tries every change of one byte until the checksum fits: some milliseconds for a record, and with a chance of about
    one in 10**13 of being wrong.

    Args:
        message: A record, its checksum first; a multiple of eight bytes.
        checksum: The checksum, where it stands elsewhere and all of ``message`` is covered. Then an offset of -1 says
            that the checksum itself was changed.
    """
    head = message if checksum is None else checksum.to_bytes(8, "little") + message
    words = np.frombuffer(head, np.uint64).copy()
    found = int(_flip(words, 1))
    if found < 0:
        return None
    offset, change = divmod(found, 256)
    value = head[offset] ^ change
    if checksum is None:
        return offset, value
    return (offset - 8, value) if offset >= 8 else (-1, value)
