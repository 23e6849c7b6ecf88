"""What a kernel sees of memory: pointers to planes and tables, and prefetches.

Planes are pointers, because an array of Numba's is a structure of seven numbers, which each
function that is given one takes apart and puts together again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.np.numpy_support import from_dtype

from torch_bf16.formats import Format, Plane

from .bits import intrinsic
from .llvm_hints import LINE, SCRATCH, emit_prefetch

__all__ = [
    "ELEMENTS",
    "copies_of_one",
    "fetch",
    "pointer_at",
    "pointer_type",
    "pointers",
    "row",
    "scratch_on_stack",
]

ELEMENTS = {
    torch.bfloat16: np.uint16,
    torch.int16: np.uint16,
    torch.int8: np.uint8,
    torch.uint8: np.uint8,
    torch.float32: np.float32,
}

_I64 = ir.IntType(64)


def pointer_type(dtype: Any) -> types.CPointer:
    """Numba's type of a pointer to numbers."""
    return types.CPointer(from_dtype(np.dtype(dtype)))


@intrinsic
def scratch_on_stack(typingctx):
    """A pointer to SCRATCH floats that live until the calling function returns."""

    def codegen(context, builder, signature, arguments):
        # In the entry block, or each turn of a loop would take more of the stack.
        with builder.goto_entry_block():
            scratch = builder.alloca(ir.ArrayType(ir.FloatType(), SCRATCH))
        scratch.align = 64
        return builder.bitcast(scratch, ir.FloatType().as_pointer())

    return pointer_type(np.float32)(), codegen


def pointer_at(dtype: Any) -> Any:
    """``pointer(address)``: a pointer to numbers at an int64 address."""
    kind = pointer_type(dtype)

    @intrinsic
    def pointer(typingctx, address):
        def codegen(context, builder, signature, arguments):
            return builder.inttoptr(arguments[0], context.get_value_type(kind))

        return kind(types.int64), codegen

    return pointer


@intrinsic
def row(typingctx, table, number):
    """A pointer to a row of a table of two dimensions."""

    def codegen(context, builder, signature, arguments):
        table, number = arguments
        array = context.make_array(signature.args[0])(context, builder, table)
        width = builder.extract_value(array.shape, 1)
        return builder.gep(array.data, [builder.mul(number, width)])

    return types.CPointer(table.dtype)(table, types.int64), codegen


def pointers(formats: Sequence[Format]) -> Any:
    """``pointers(addresses, start)``: for each number a tuple of pointers into its planes.

    ``addresses`` points to the address of each plane of all numbers; each pointer is to element
    ``start`` or, in a plane with one element per block, to that of its block.
    """
    kinds = [
        types.Tuple([pointer_type(ELEMENTS[plane.dtype]) for plane in each.planes])
        for each in formats
    ]

    @intrinsic
    def pointers(typingctx, addresses, start):
        def codegen(context, builder, signature, arguments):
            first, start = arguments
            numbers, column = [], 0
            for each, kind in zip(formats, kinds, strict=True):
                found = []
                for plane, of in zip(each.planes, kind, strict=True):
                    address = _address(builder, first, column, plane, start)
                    found.append(builder.inttoptr(address, context.get_value_type(of)))
                    column += 1
                numbers.append(context.make_tuple(builder, kind, found))
            return context.make_tuple(builder, signature.return_type, numbers)

        return types.Tuple(kinds)(addresses, types.int64), codegen

    return pointers


def fetch(planes: Sequence[Plane], n: int) -> Any:
    """``fetch(addresses, start)``: prefetches ``n`` elements of each plane, to be written."""

    @intrinsic
    def fetch(typingctx, addresses, start):
        def codegen(context, builder, signature, arguments):
            first, start = arguments
            for column, plane in enumerate(planes):
                address = _address(builder, first, column, plane, start)
                for line in range(-(-n * plane.dtype.itemsize // (plane.block * LINE))):
                    emit_prefetch(builder, builder.add(address, _I64(line * LINE)))
            return context.get_dummy_value()

        return types.none(addresses, types.int64), codegen

    return fetch


def copies_of_one(planes: Sequence[Plane]) -> tuple[Any, Any, Any]:
    """``make()``, ``copy(addresses, start, copies)`` and ``put_back`` of the same and ``which``.

    ``copies`` is a row of addresses as ``addresses`` is, but of planes of two elements, on the
    stack. ``copy`` writes element ``start`` to both; ``put_back`` writes the first or second copy
    to where it came from, in all planes but those of the gradient.
    """
    n = len(planes)

    @intrinsic
    def make(typingctx):
        def codegen(context, builder, signature, arguments):
            # In the entry block, or each turn of a loop would take more of the stack.
            with builder.goto_entry_block():
                addresses = builder.alloca(_I64, 2 * n)
                for column in range(n):
                    memory = builder.gep(addresses, [_I64(n + column)])
                    place = builder.gep(addresses, [_I64(column)])
                    builder.store(builder.ptrtoint(memory, _I64), place)
            return addresses

        return pointer_type(np.int64)(), codegen

    def places(builder, arguments):
        """For each plane the place of the element, and of the first copy."""
        addresses, start, copies = arguments
        for column, plane in enumerate(planes):
            kind = ir.IntType(8 * plane.dtype.itemsize).as_pointer()
            address = _address(builder, addresses, column, plane, start)
            copied = builder.gep(copies, [_I64(n + column)])
            yield builder.inttoptr(address, kind), builder.bitcast(copied, kind)

    @intrinsic
    def copy(typingctx, addresses, start, copies):
        def codegen(context, builder, signature, arguments):
            for place, first in places(builder, arguments):
                element = builder.load(place)
                builder.store(element, first)
                builder.store(element, builder.gep(first, [_I64(1)]))
            return context.get_dummy_value()

        return types.none(addresses, types.int64, copies), codegen

    @intrinsic
    def put_back(typingctx, addresses, start, copies, which):
        def codegen(context, builder, signature, arguments):
            *others, which = arguments
            _, *written = places(builder, others)
            for place, first in written:
                builder.store(builder.load(builder.gep(first, [which])), place)
            return context.get_dummy_value()

        return types.none(addresses, types.int64, copies, types.int64), codegen

    return make, copy, put_back


def _address(builder, first, column, plane, start):
    """The address of element ``start`` of a plane, whose own address is in ``column`` of a row."""
    address = builder.load(builder.gep(first, [_I64(column)]))
    block = builder.udiv(start, _I64(plane.block))
    return builder.add(address, builder.mul(block, _I64(plane.dtype.itemsize)))
