"""How planes are read and written: one element, or two neighbours at once.

In registers an element of two bytes is the upper half of a uint32 and one of a single byte its
uppermost quarter; what is below is dropped when it is written. Two bf16 neighbours are one load of
32 bits, whose halves a shift and a mask tell apart, and a vector of them needs no shuffle. That is
so where the lower byte comes first in memory.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types

from .bits import and32, intrinsic, or32, part, shl32, shr32

__all__ = ["LOADS", "STORES", "load_bytes", "store_bytes"]

_u32 = np.uint32
_S16, _S24 = _u32(16), _u32(24)
_HIGH, _TOP, _SECOND = _u32(0xFFFF0000), _u32(0xFF000000), _u32(0x0000FF00)


def _address_of_two(context, builder, array_type, array, index, width):
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), ir.IntType(width).as_pointer())


def _both(width):
    """``(load, store)`` of two neighbours of a plane as one word of ``width`` bits."""

    @intrinsic
    def load(typingctx, plane, i):
        def codegen(context, builder, signature, arguments):
            plane, index = arguments
            where = _address_of_two(context, builder, signature.args[0], plane, index, width)
            # Of the alignment of one element: it may be the second of its word.
            word = builder.load(where, align=width // 16)
            return word if width == 32 else builder.zext(word, ir.IntType(32))

        return types.uint32(plane, i), codegen

    @intrinsic
    def store(typingctx, plane, i, word):
        def codegen(context, builder, signature, arguments):
            plane, index, word = arguments
            where = _address_of_two(context, builder, signature.args[0], plane, index, width)
            low = word if width == 32 else builder.trunc(word, ir.IntType(width))
            builder.store(low, where, align=width // 16)
            return context.get_dummy_value()

        return types.none(plane, i, types.uint32), codegen

    return load, store


_load_32, _store_32 = _both(32)
_load_16, _store_16 = _both(16)


@part
def load_half(plane, i):
    return shl32(_u32(plane[i]), _S16)


@part
def load_halves(plane, i):
    word = _load_32(plane, i)
    return shl32(word, _S16), and32(word, _HIGH)


@part
def store_half(plane, i, bits):
    plane[i] = np.uint16(shr32(bits, _S16))


@part
def store_halves(plane, i, first, second):
    _store_32(plane, i, or32(shr32(first, _S16), and32(second, _HIGH)))


@part
def load_byte(plane, i):
    return shl32(_u32(plane[i]), _S24)


@part
def load_bytes(plane, i):
    word = _load_16(plane, i)
    return shl32(word, _S24), and32(shl32(word, _S16), _TOP)


@part
def store_byte(plane, i, bits):
    plane[i] = np.uint8(shr32(bits, _S24))


@part
def store_bytes(plane, i, first, second):
    _store_16(plane, i, or32(shr32(first, _S24), and32(shr32(second, _S16), _SECOND)))


@part
def load_float(plane, i):
    return plane[i]


@part
def load_floats(plane, i):
    return plane[i], plane[i + np.uintp(1)]


@part
def store_float(plane, i, x):
    plane[i] = x


@part
def store_floats(plane, i, first, second):
    plane[i] = first
    plane[i + np.uintp(1)] = second


LOADS = {
    np.uint16: (load_half, load_halves),
    np.uint8: (load_byte, load_bytes),
    np.float32: (load_float, load_floats),
}
"""``load(plane, i)`` of one element and of ``i`` and ``i + 1``, by the array's dtype."""

STORES = {
    np.uint16: (store_half, store_halves),
    np.uint8: (store_byte, store_bytes),
    np.float32: (store_float, store_floats),
}
"""``store(plane, i, x)`` and ``store(plane, i, first, second)``, likewise."""
