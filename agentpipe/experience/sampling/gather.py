"""Copying fields of scattered records into contiguous arrays.

Records are found by address (base of the shard + number × bytes of a record), so one compiled loop serves any number of
shards; whoever calls has checked that every number lies in its shard. While one record is copied, the lines of a record
some places on are asked for: in a large file nearly every record is a miss of the cache, and so many misses overlap.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]
from numba import extending, types

from agentpipe.environments.jit import entry

AHEAD: Final = 12
"""records between the one that is copied and the one that is asked for"""
LINE: Final = 64
"""bytes of a line of the cache"""

intrinsic: Any = extending.intrinsic
Addresses = npt.NDArray[np.uint64]


def _loads(kind: Any, bits: int) -> Any:  # noqa: ANN401 - a type of numba, and a function for its compiler
    """A compiled function that reads a number of ``bits`` at an address, which must lie in mapped memory."""

    @intrinsic
    def load(typing_context: Any, address: Any) -> Any:  # noqa: ANN401, ARG001 - numba's interface
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ANN401, ARG001
            pointer = builder.inttoptr(arguments[0], ir.IntType(bits).as_pointer())
            return builder.load(pointer, align=1)

        return kind(types.uint64), generate

    return load


_load8, _load32 = _loads(types.uint8, 8), _loads(types.uint32, 32)


@intrinsic
def _prefetch(typing_context: Any, address: Any) -> Any:  # noqa: ANN401, ARG001 - numba's interface
    """Asks for the line of the cache at an address that is about to be read; any address will do."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ANN401, ARG001
        pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        function = builder.module.declare_intrinsic(
            "llvm.prefetch", [pointer], ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        )
        read, keep, data = (ir.Constant(number, value) for value in (0, 3, 1))
        builder.call(function, [builder.inttoptr(arguments[0], pointer), read, keep, data])
        return context.get_dummy_value()

    return types.void(types.uint64), generate


@entry
def record_addresses(
    bases: Addresses, shards: npt.NDArray[np.uint16], numbers: npt.NDArray[np.int64], itemsize: int, found: Addresses
) -> None:
    """Address of each record."""
    for place in range(len(numbers)):
        found[place] = bases[shards[place]] + np.uint64(numbers[place] * itemsize)


@entry
def locate(
    starts: npt.NDArray[np.int64],
    chosen: npt.NDArray[np.uint32],
    ids: npt.NDArray[np.int64],
    shards: npt.NDArray[np.uint16],
    numbers: npt.NDArray[np.int64],
) -> int:
    """Shard and record of each id; the first place whose id is out of range, or -1.

    ``starts`` i64[shards + 1] is the first id of each shard and the number of all; ``chosen`` the record of each id,
    or of length 0 where every record of every shard has an id.
    """
    for place in range(len(ids)):
        step = ids[place]
        if step < 0 or step >= starts[-1]:
            return place
        low, high = 0, len(starts) - 1
        while high - low > 1:
            middle = (low + high) >> 1
            if starts[middle] <= step:
                low = middle
            else:
                high = middle
        shards[place] = low
        numbers[place] = step - starts[low] if len(chosen) == 0 else np.int64(chosen[step])
    return -1


@entry
def copy_words(addresses: Addresses, offset: int, out: npt.NDArray[np.uint32]) -> None:
    """``out`` u32[n, k]: k words of four bytes from byte ``offset`` of each record."""
    words = out.shape[1]
    for place in range(len(addresses)):
        ahead = addresses[min(place + AHEAD, len(addresses) - 1)] + np.uint64(offset)
        for line in range(0, words * 4, LINE):
            _prefetch(ahead + np.uint64(line))
        source = addresses[place] + np.uint64(offset)
        for word in range(words):
            out[place, word] = _load32(source + np.uint64(word * 4))


@entry
def copy_bytes(addresses: Addresses, offset: int, out: npt.NDArray[np.uint8]) -> None:
    """``out`` u8[n, k]: k bytes from byte ``offset`` of each record."""
    count = out.shape[1]
    for place in range(len(addresses)):
        _prefetch(addresses[min(place + AHEAD, len(addresses) - 1)] + np.uint64(offset))
        source = addresses[place] + np.uint64(offset)
        for byte in range(count):
            out[place, byte] = _load8(source + np.uint64(byte))


@entry
def copy_bits(addresses: Addresses, offset: int, out: npt.NDArray[np.bool_]) -> None:
    """``out`` bool[n, k]: k bits, lowest first, from byte ``offset`` of each record."""
    count = out.shape[1]
    for place in range(len(addresses)):
        _prefetch(addresses[min(place + AHEAD, len(addresses) - 1)] + np.uint64(offset))
        source = addresses[place] + np.uint64(offset)
        for bit in range(count):
            out[place, bit] = (_load8(source + np.uint64(bit >> 3)) >> (bit & 7)) & 1
