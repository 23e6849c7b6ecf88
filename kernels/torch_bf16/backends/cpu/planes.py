"""What a kernel sees of planes: arrays over their memory, and prefetches.

Written in LLVM's instructions: in Python each array and each cache line would be a function of its
own, which Numba takes 50 ms to compile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.np.arrayobj import np_cfarray
from numba.np.numpy_support import from_dtype

from torch_bf16.formats import Format, Plane

from .bits import intrinsic
from .llvm_hints import LINE, SCRATCH, emit_prefetch

__all__ = ["ELEMENTS", "array_at", "array_over", "array_type", "fetch", "scratch_on_stack", "views"]

ELEMENTS = {
    torch.bfloat16: np.uint16,
    torch.int16: np.uint16,
    torch.int8: np.uint8,
    torch.uint8: np.uint8,
    torch.float32: np.float32,
}

_I8, _I64 = ir.IntType(8), ir.IntType(64)


def array_type(dtype: Any, ndim: int = 1) -> types.Array:
    """Numba's type of a contiguous array."""
    return types.Array(from_dtype(np.dtype(dtype)), ndim, "C")


def array_at(context, builder, kind, address, sizes):
    """An array of a type at a ``void*``, in code that is being generated."""
    shape = types.UniTuple(types.intp, kind.ndim)
    arguments = address, context.make_tuple(builder, shape, sizes)
    return np_cfarray(context, builder, kind(types.voidptr, shape), arguments)


@intrinsic
def scratch_on_stack(typingctx):
    """SCRATCH floats that live until the calling function returns."""
    kind = array_type(np.float32)

    def codegen(context, builder, signature, arguments):
        # In the entry block, or each turn of a loop would take more of the stack. Numba's own
        # arrays are filled with zeros.
        with builder.goto_entry_block():
            scratch = builder.alloca(ir.ArrayType(ir.FloatType(), SCRATCH))
        scratch.align = 64
        pointer = builder.bitcast(scratch, _I8.as_pointer())
        return array_at(context, builder, kind, pointer, [_I64(SCRATCH)])

    return kind(), codegen


def array_over(dtype: Any) -> Any:
    """``array(address, n)``: an array over ``n`` numbers in memory at an int64 address."""
    kind = array_type(dtype)

    @intrinsic
    def array(typingctx, address, n):
        def codegen(context, builder, signature, arguments):
            pointer = builder.inttoptr(arguments[0], _I8.as_pointer())
            return array_at(context, builder, kind, pointer, [arguments[1]])

        return kind(types.int64, types.int64), codegen

    return array


def views(formats: Sequence[Format]) -> Any:
    """``view(addresses, start, n)``: for each number a tuple of arrays, over its planes.

    ``addresses`` has the address of each plane of all numbers; each array begins at element
    ``start``, and has ``n`` elements or, for a plane with one element per block, one per block.
    """
    kinds = [
        types.Tuple([array_type(ELEMENTS[plane.dtype]) for plane in each.planes])
        for each in formats
    ]

    @intrinsic
    def view(typingctx, addresses, start, n):
        def codegen(context, builder, signature, arguments):
            first = _data(context, builder, signature, arguments)
            numbers, column = [], 0
            for each, kind in zip(formats, kinds, strict=True):
                arrays = []
                for plane, of in zip(each.planes, kind, strict=True):
                    address = _address(builder, first, column, plane, arguments[1])
                    size = builder.udiv(arguments[2], _I64(plane.block))
                    pointer = builder.inttoptr(address, _I8.as_pointer())
                    arrays.append(array_at(context, builder, of, pointer, [size]))
                    column += 1
                numbers.append(context.make_tuple(builder, kind, arrays))
            return context.make_tuple(builder, signature.return_type, numbers)

        return types.Tuple(kinds)(addresses, types.int64, types.int64), codegen

    return view


def fetch(planes: Sequence[Plane], n: int) -> Any:
    """``fetch(addresses, start)``: prefetches ``n`` elements of each plane, to be written."""

    @intrinsic
    def fetch(typingctx, addresses, start):
        def codegen(context, builder, signature, arguments):
            first = _data(context, builder, signature, arguments)
            for column, plane in enumerate(planes):
                address = _address(builder, first, column, plane, arguments[1])
                for line in range(-(-n * plane.dtype.itemsize // (plane.block * LINE))):
                    emit_prefetch(builder, builder.add(address, _I64(line * LINE)))
            return context.get_dummy_value()

        return types.none(addresses, types.int64), codegen

    return fetch


def _data(context, builder, signature, arguments):
    """The pointer to the first argument's data."""
    return context.make_array(signature.args[0])(context, builder, arguments[0]).data


def _address(builder, first, column, plane, start):
    """The address of element ``start`` of a plane, whose own address is in ``column`` of a row."""
    address = builder.load(builder.gep(first, [_I64(column)]))
    block = builder.udiv(start, _I64(plane.block))
    return builder.add(address, builder.mul(block, _I64(plane.dtype.itemsize)))
