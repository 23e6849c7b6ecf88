"""Where the numbers of a kernel are: addresses, the stack, and what LLVM may assume of them."""

from __future__ import annotations

from llvmlite import ir
from numba import types

from .bits import intrinsic

__all__ = [
    "SCRATCH",
    "TILE",
    "address_as_pointer",
    "no_alias",
    "prefetch",
    "scratch_on_stack",
    "wide_vectors",
]

# Elements whose numbers in blocks are on the stack together.
TILE = 256
# Floats there: for three states of a rule.
SCRATCH = 12 * TILE

_I32 = ir.IntType(32)


@intrinsic
def scratch_on_stack(typingctx):
    """``void*`` to SCRATCH floats that live until the calling function returns."""

    def codegen(context, builder, signature, arguments):
        # In the entry block, lest a loop take more each time; Numba's own way fills it with zeros.
        with builder.goto_entry_block():
            scratch = builder.alloca(ir.ArrayType(ir.FloatType(), SCRATCH))
        scratch.align = 64
        return builder.bitcast(scratch, ir.IntType(8).as_pointer())

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
    """Promise LLVM that the calling function's arrays do not overlap: no checks before loops.

    Gradient and weight may be the very same memory: a number that is stored is made of both.
    """

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
