"""How planes are read and written: two neighbours at once.

In registers an element of two bytes is the upper half of a uint32, one of a single byte its top
byte; a store drops the bits below. Two bf16 neighbours are one load of 32 bits, which a shift and a
mask take apart, so that a vector of them needs no shuffle. This assumes a little-endian processor.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types

from .bits import and32, inlined, intrinsic, or32, shl32, shr32

__all__ = ["LOADS", "STORES"]

_u32 = np.uint32


def _address_of_two(builder, plane, index, width):
    return builder.bitcast(builder.gep(plane, [index]), ir.IntType(width).as_pointer())


def _pair_access(width):
    """``(load, store)`` of two neighbours of a plane as one word of ``width`` bits."""

    @intrinsic
    def load(typingctx, plane, i):
        def codegen(context, builder, signature, arguments):
            plane, index = arguments
            where = _address_of_two(builder, plane, index, width)
            # Aligned as one element is: the pair may start in the middle of a word.
            word = builder.load(where, align=width // 16)
            return word if width == 32 else builder.zext(word, ir.IntType(32))

        return types.uint32(plane, i), codegen

    @intrinsic
    def store(typingctx, plane, i, word):
        def codegen(context, builder, signature, arguments):
            plane, index, word = arguments
            where = _address_of_two(builder, plane, index, width)
            low = word if width == 32 else builder.trunc(word, ir.IntType(width))
            builder.store(low, where, align=width // 16)
            return context.get_dummy_value()

        return types.none(plane, i, types.uint32), codegen

    return load, store


def _access(bits):
    """``(load_two, store_two)`` for elements of 8 or 16 bits."""
    load, store = _pair_access(2 * bits)
    # Distances from the top of a 32-bit word to its first element, and to its second.
    below, below_two = _u32(32 - bits), _u32(32 - 2 * bits)
    top = _u32((1 << bits) - 1 << 32 - bits)
    second_of_two = _u32((1 << bits) - 1 << bits)

    @inlined
    def load_two(plane, i):
        word = load(plane, i)
        return shl32(word, below), and32(shl32(word, below_two), top)

    @inlined
    def store_two(plane, i, first, second):
        store(plane, i, or32(shr32(first, below), and32(shr32(second, below_two), second_of_two)))

    return load_two, store_two


@inlined
def load_floats(plane, i):
    return plane[i], plane[i + np.uintp(1)]


@inlined
def store_floats(plane, i, first, second):
    plane[i] = first
    plane[i + np.uintp(1)] = second


_ACCESS = {
    np.uint16: _access(16),
    np.uint8: _access(8),
    np.float32: (load_floats, store_floats),
}

LOADS = {dtype: load for dtype, (load, _) in _ACCESS.items()}
"""``load(plane, i)`` of elements ``i`` and ``i + 1``, by the plane's dtype."""

STORES = {dtype: store for dtype, (_, store) in _ACCESS.items()}
"""``store(plane, i, first, second)``, by the plane's dtype."""
