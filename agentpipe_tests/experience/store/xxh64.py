"""XXH64 as its specification writes it, one step after another; slow, and shares nothing with the kernels."""

from __future__ import annotations

MASK = 2**64 - 1
PRIMES = (11400714785074694791, 14029467366897019727, 1609587929392839161, 9650029242287828579, 2870177450012600261)


def rotl(value, bits):
    return ((value << bits) | (value >> (64 - bits))) & MASK


def accumulate(lane, value):
    return rotl((lane + value * PRIMES[1]) & MASK, 31) * PRIMES[0] & MASK


def merge(state, lane):
    return ((state ^ accumulate(0, lane)) * PRIMES[0] + PRIMES[3]) & MASK


def reference(data):
    p1, p2, p3, p4, p5 = PRIMES
    rest = data
    if len(data) >= 32:
        lanes = [(p1 + p2) & MASK, p2, 0, -p1 & MASK]
        while len(rest) >= 32:
            words = [int.from_bytes(rest[8 * i : 8 * i + 8], "little") for i in range(4)]
            lanes = [accumulate(lane, word) for lane, word in zip(lanes, words, strict=True)]
            rest = rest[32:]
        state = sum(rotl(lane, bits) for lane, bits in zip(lanes, (1, 7, 12, 18), strict=True)) & MASK
        for lane in lanes:
            state = merge(state, lane)
    else:
        state = p5
    state = (state + len(data)) & MASK
    while len(rest) >= 8:
        state = (rotl(state ^ accumulate(0, int.from_bytes(rest[:8], "little")), 27) * p1 + p4) & MASK
        rest = rest[8:]
    if len(rest) >= 4:
        state = (rotl(state ^ (int.from_bytes(rest[:4], "little") * p1 & MASK), 23) * p2 + p3) & MASK
        rest = rest[4:]
    for byte in rest:
        state = rotl(state ^ (byte * p5 & MASK), 11) * p1 & MASK
    state = ((state ^ (state >> 33)) * p2) & MASK
    state = ((state ^ (state >> 29)) * p3) & MASK
    return state ^ (state >> 32)
