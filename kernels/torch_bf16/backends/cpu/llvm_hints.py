"""Memory in LLVM's terms: addresses, scratch on the stack, and hints for its optimiser."""

from __future__ import annotations

from llvmlite import ir
from numba import types

from .bits import intrinsic

__all__ = [
    "LINE",
    "SCRATCH",
    "TILE",
    "address_as_pointer",
    "no_alias",
    "prefetch",
    "scratch_on_stack",
    "wide_vectors",
]

# Elements per tile: a tile of the formats in blocks is encoded at a time.
TILE = 256
# Floats of scratch: a tile of three numbers in the format that takes the most.
SCRATCH = 12 * TILE
# Bytes of a cache line.
LINE = 64

_I32 = ir.IntType(32)


@intrinsic
def scratch_on_stack(typingctx):
    """``void*`` to SCRATCH floats that live until the calling function returns."""

    def codegen(context, builder, signature, arguments):
        # In the entry block, or each turn of a loop would take more of the stack. Numba's own
        # way fills it with zeros.
        with builder.goto_entry_block():
            scratch = builder.alloca(ir.ArrayType(ir.FloatType(), SCRATCH))
        scratch.align = 64
        return builder.bitcast(scratch, ir.IntType(8).as_pointer())

    return types.voidptr(), codegen


@intrinsic
def wide_vectors(typingctx):
    """Let LLVM use 512-bit vectors in the calling function where the processor has them."""

    def codegen(context, builder, signature, arguments):
        # llvmlite's own `add` refuses names that are not on its list.
        set.add(builder.function.attributes, '"prefer-vector-width"="512"')
        return context.get_dummy_value()

    return types.none(), codegen


@intrinsic
def no_alias(typingctx):
    """Promise LLVM that the calling function's arrays do not overlap, so that it checks no loop.

    Gradient and weight may still be the same memory: both are read before anything is stored.
    """

    def codegen(context, builder, signature, arguments):
        # The first two are Numba's own: where the result and an error go.
        for argument in builder.function.args[2:]:
            if isinstance(argument.type, ir.PointerType):
                argument.add_attribute("noalias")
        return context.get_dummy_value()

    return types.none(), codegen


@intrinsic
def prefetch(typingctx, address):
    """Prefetch the cache line at an int64 address for writing; an invalid address does no harm."""

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
