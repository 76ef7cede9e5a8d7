"""XXH64: the published values, and a reference that was written from the specification."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentpipe.experience.store import checksum
from agentpipe.experience.store import records as rec
from agentpipe.experience.store.audit import field_at
from agentpipe_tests.experience.fakes import make_episodes

from .xxh64 import reference


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (b"", 0xEF46DB3751D8E999),
        (b"a", 0xD24EC4F1A98C6E5B),
        (b"abc", 0x44BC2CF5AD770999),
        (b"Nobody inspects the spammish repetition", 0xFBCEA83C8A378BF1),
    ],
)
def test_published_values(message, expected):
    assert checksum.xxh64(message) == expected
    assert reference(message) == expected


@given(st.binary(max_size=300))
def test_it_is_the_function_of_the_specification(message):
    assert checksum.xxh64(message) == reference(message)


@given(st.integers(1, 70).flatmap(lambda size: st.binary(min_size=24 * size, max_size=24 * size)))
def test_each_record_is_hashed_behind_its_checksum(message):
    size = len(message) // 3
    records = np.frombuffer(message, np.dtype([("checksum", "<u8"), ("rest", "u1", (size - 8,))])).copy()
    checksum.fill(records)
    assert records["checksum"].tolist() == [reference(message[i + 8 : i + size]) for i in range(0, 3 * size, size)]
    assert not checksum.wrong(records).any()
    records["checksum"][1] ^= 1
    assert checksum.wrong(records).tolist() == [False, True, False]


def test_ranges_of_words():
    words = np.arange(40, dtype=np.uint64)
    found = checksum.range_checksums(words, np.array([0, 3, 40]), np.array([40, 5, 0]))
    assert found.tolist() == [reference(words.tobytes()), reference(words[3:8].tobytes()), reference(b"")]


@given(st.integers(0, 87), st.integers(1, 255))
def test_one_changed_byte_is_found(offset, change):
    steps, *_ = make_episodes(np.random.default_rng(3), 1)
    checksum.fill(steps)
    raw = bytearray(steps[:1].tobytes())
    raw[offset] ^= change
    assert checksum.find_flip(bytes(raw)) == (offset, raw[offset] ^ change)


def test_two_changed_bytes_are_not_taken_for_one():
    steps, *_ = make_episodes(np.random.default_rng(3), 1)
    checksum.fill(steps)
    raw = bytearray(steps[:1].tobytes())
    raw[20] ^= 1
    raw[40] ^= 1
    assert checksum.find_flip(bytes(raw)) is None


def test_a_changed_byte_is_found_where_the_checksum_stands_elsewhere():
    message = bytes(range(40))
    right = reference(message)
    assert checksum.find_flip(message[:17] + b"\xff" + message[18:], right) == (17, 17)
    assert checksum.find_flip(message, right ^ 0x0400) == (-1, right >> 8 & 255)


def test_the_kernel_looks_where_the_step_record_has_its_fields():
    fields = rec.step_dtype(4, 6).fields
    places = {
        "environment": 4 * checksum._ENVIRONMENT,
        "episode": 4 * checksum._EPISODE,
        "policy": 4 * checksum._POLICY,
        "action": 4 * checksum._ACTION,
        "step": 4 * checksum._STEP,
        **{name: 4 * (checksum._FLOATS + i) for i, name in enumerate(checksum.FLOAT_FIELDS)},
    }
    assert places == {name: fields[name][1] for name in places}


def test_an_offset_is_named_by_the_field_that_holds_it():
    dtype = rec.step_dtype(4, 6)
    assert [field_at(dtype, offset) for offset in (0, 7, 8, 16, 63, 68, 72, 87)] == [
        *("checksum", "checksum", "time_ns", "environment", "terminated", "mask", "observation", "observation")
    ]
