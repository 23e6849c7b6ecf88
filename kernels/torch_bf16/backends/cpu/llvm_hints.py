"""Memory in LLVM's terms: addresses, prefetches, and hints for its optimiser."""

from __future__ import annotations

from llvmlite import ir
from numba import types

from .bits import intrinsic

__all__ = [
    "LINE",
    "SCRATCH",
    "TILE",
    "emit_prefetch",
    "no_alias",
    "prefetch",
    "wide_vectors",
]

# Elements per tile: formats in blocks are encoded one tile at a time.
TILE = 256
# Floats of scratch: a tile of three numbers in the format that takes most.
SCRATCH = 12 * TILE
# Bytes of a cache line.
LINE = 64

_I32 = ir.IntType(32)


@intrinsic
def wide_vectors(typingctx):
    """Let LLVM use 512-bit vectors in the calling function if the processor has them."""

    def codegen(context, builder, signature, arguments):
        # llvmlite's own `add` refuses names that are not on its list.
        set.add(builder.function.attributes, '"prefer-vector-width"="512"')
        return context.get_dummy_value()

    return types.none(), codegen


@intrinsic
def no_alias(typingctx):
    """Promise LLVM that the calling function's arrays do not overlap, so that loops need no checks.

    Gradient and weight may still be the same memory: both are read before anything is stored.
    """

    def codegen(context, builder, signature, arguments):
        # The first two are Numba's own: where the result and an error go.
        for argument in builder.function.args[2:]:
            if isinstance(argument.type, ir.PointerType):
                argument.add_attribute("noalias")
        return context.get_dummy_value()

    return types.none(), codegen


def emit_prefetch(builder, address):
    """Prefetch the cache line at an address for writing, in code that is being generated.

    An invalid address does no harm.
    """
    pointer = builder.inttoptr(address, ir.IntType(8).as_pointer())
    kinds = [pointer.type, _I32, _I32, _I32]
    fetch = builder.module.declare_intrinsic(
        "llvm.prefetch", [pointer.type], ir.FunctionType(ir.VoidType(), kinds)
    )
    # For writing, into the nearest cache, of data.
    builder.call(fetch, [pointer, _I32(1), _I32(3), _I32(1)])


@intrinsic
def prefetch(typingctx, address):
    """Prefetch the cache line at an int64 address for writing."""

    def codegen(context, builder, signature, arguments):
        emit_prefetch(builder, arguments[0])
        return context.get_dummy_value()

    return types.none(types.int64), codegen
