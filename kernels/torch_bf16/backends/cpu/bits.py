"""32-bit integer arithmetic and bit casts for Numba kernels.

Numba promotes uint32 arithmetic to 64 bits. That halves the vector width and is wrong for a hash
that relies on wrap-around, so each operation is emitted on i32 directly.
"""

from __future__ import annotations

import functools
from typing import Any

import numba
from llvmlite import ir
from numba import extending, types

__all__ = [
    "ROOM",
    "TILE",
    "add32",
    "address_as_pointer",
    "and32",
    "float_from_bits",
    "float_to_bits",
    "low32",
    "max32",
    "mul32",
    "no_alias",
    "or32",
    "part",
    "prefetch",
    "room_on_stack",
    "shl32",
    "shr32",
    "sub32",
    "wide_vectors",
    "xor32",
]

_njit: Any = numba.njit
part: Any = functools.partial(
    _njit, no_cpython_wrapper=True, no_cfunc_wrapper=True, forceinline=True
)
"""Compiles what only kernels call: without wrappers for others, which take half as long again."""

# Its functions are called without their first argument, which no type checker knows.
intrinsic: Any = extending.intrinsic

# Elements whose numbers in blocks are on the stack together.
TILE = 256
# Floats: for each of at most four states of a rule, a tile, its roots, scales and noise.
ROOM = 16 * TILE

_I32 = ir.IntType(32)
_F32 = ir.FloatType()


def _binary(operation):
    @intrinsic
    def apply(typingctx, a, b):
        if a != types.uint32 or b != types.uint32:
            return None

        def codegen(context, builder, signature, arguments):
            return getattr(builder, operation)(*arguments)

        return types.uint32(types.uint32, types.uint32), codegen

    return apply


add32 = _binary("add")
sub32 = _binary("sub")
mul32 = _binary("mul")
xor32 = _binary("xor")
and32 = _binary("and_")
or32 = _binary("or_")
shl32 = _binary("shl")
shr32 = _binary("lshr")


@part
def max32(a, b):
    return a if a > b else b


@intrinsic
def float_to_bits(typingctx, x):
    """float32 -> its bit pattern as uint32."""

    def codegen(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], _I32)

    return types.uint32(types.float32), codegen


@intrinsic
def float_from_bits(typingctx, bits):
    """uint32 bit pattern -> float32."""

    def codegen(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], _F32)

    return types.float32(types.uint32), codegen


@intrinsic
def low32(typingctx, x):
    """The low 32 bits of a 64-bit integer."""

    def codegen(context, builder, signature, arguments):
        return builder.trunc(arguments[0], _I32)

    return types.uint32(types.int64), codegen


@intrinsic
def room_on_stack(typingctx):
    """``void*`` to ROOM floats that live until the calling function returns."""

    def codegen(context, builder, signature, arguments):
        # In the entry block, lest a loop take more each time; Numba's own way fills it with zeros.
        with builder.goto_entry_block():
            room = builder.alloca(ir.ArrayType(_F32, ROOM))
        room.align = 64
        return builder.bitcast(room, ir.IntType(8).as_pointer())

    return types.voidptr(), codegen


@intrinsic
def wide_vectors(typingctx):
    """Have LLVM use vectors of 512 bits in the calling function where the processor has them."""

    def codegen(context, builder, signature, arguments):
        # llvmlite knows the names of attributes that it takes; a set takes any.
        set.add(builder.function.attributes, '"prefer-vector-width"="512"')
        return context.get_dummy_value()

    return types.none(), codegen


@intrinsic
def no_alias(typingctx):
    """Promise LLVM that the calling function's arrays do not overlap: no checks before loops."""

    def codegen(context, builder, signature, arguments):
        # The first two are where results go.
        for argument in builder.function.args[2:]:
            if isinstance(argument.type, ir.PointerType):
                argument.add_attribute("noalias")
        return context.get_dummy_value()

    return types.none(), codegen


@intrinsic
def prefetch(typingctx, address):
    """Have the cache line at an int64 address fetched for writing; any address will do."""

    def codegen(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())
        kinds = [pointer.type, _I32, _I32, _I32]
        fetch = builder.module.declare_intrinsic(
            "llvm.prefetch", [pointer.type], ir.FunctionType(ir.VoidType(), kinds)
        )
        # For writing, into the nearest cache, of data.
        builder.call(fetch, [pointer, _I32(1), _I32(3), _I32(1)])
        return context.get_dummy_value()

    return types.none(types.int64), codegen


@intrinsic
def address_as_pointer(typingctx, address):
    """An int64 address -> ``void*``, for ``numba.carray``."""

    def codegen(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), codegen
