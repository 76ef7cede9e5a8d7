"""The counter: two slots, one of which is always true."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentpipe.errors import CorruptError
from agentpipe.experience.store.counter import SLOT_BYTES, Counter, Counts, decode, encode, newest, read_counts

numbers = st.integers(0, 2**63)
counts = st.builds(Counts, numbers, numbers, numbers, numbers, numbers)


@given(counts)
def test_a_slot_says_what_was_written(count):
    assert len(encode(count)) == SLOT_BYTES
    assert decode(encode(count)) == count


@given(counts, st.integers(0, SLOT_BYTES - 1), st.integers(1, 255))
def test_any_changed_byte_makes_a_slot_void(count, place, change):
    slot = bytearray(encode(count))
    slot[place] ^= change
    assert decode(bytes(slot)) is None


@given(counts, counts, st.integers(0, 2 * SLOT_BYTES - 1))
def test_with_one_slot_torn_the_other_one_holds(first, second, place):
    data = bytearray(encode(first) + encode(second))
    assert newest(bytes(data)) in {first, second}
    data[place] ^= 255
    assert newest(bytes(data)) == (second if place < SLOT_BYTES else first)


def test_slots_are_written_in_turn_and_the_newer_one_counts(tmp_path):
    counter = Counter(tmp_path / "c")
    for steps in (5, 9, 12):
        counter.move(Counts(steps=steps, episodes=1), sync=steps == 9)
    data = (tmp_path / "c").read_bytes()
    assert len(data) == 128
    assert decode(data[:64]) == Counts(2, 9, 1)
    assert decode(data[64:]) == Counts(3, 12, 1)
    assert Counter(tmp_path / "c").counts == Counts(3, 12, 1)


def test_after_a_torn_slot_counting_goes_on(tmp_path):
    counter = Counter(tmp_path / "c")
    counter.move(Counts(steps=5), sync=False)
    counter.move(Counts(steps=8), sync=False)
    data = bytearray((tmp_path / "c").read_bytes())
    data[7] ^= 1
    (tmp_path / "c").write_bytes(data)
    counter = Counter(tmp_path / "c")
    assert counter.counts.steps == 5
    counter.move(Counts(steps=6), sync=False)
    assert Counter(tmp_path / "c").counts.steps == 6


def test_with_both_slots_torn_it_is_an_error(tmp_path):
    Counter(tmp_path / "c").close()
    (tmp_path / "c").write_bytes(bytes(128))
    with pytest.raises(CorruptError, match="neither slot") as caught:
        Counter(tmp_path / "c")
    assert caught.value.where == {"file": tmp_path / "c"}


def test_a_count_that_could_not_be_forced_to_disk_does_not_count(tmp_path, monkeypatch):
    counter = Counter(tmp_path / "c")
    counter.move(Counts(steps=5), sync=True)

    def fails(descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fails)
        with pytest.raises(Exception, match="disk is full"):
            counter.move(Counts(steps=9), sync=True)
    assert counter.counts.steps == 5
    descriptor = os.open(tmp_path / "c", os.O_RDONLY)
    assert read_counts(descriptor, tmp_path / "c").steps == 5
    os.close(descriptor)
    counter.move(Counts(steps=7), sync=True)
    assert Counter(tmp_path / "c").counts.steps == 7
