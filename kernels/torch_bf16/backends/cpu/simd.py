"""Operations on whole blocks in explicit vectors.

LLVM's vectoriser would turn a short loop over a block into a long one over blocks, with a gather
for each element.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types

from torch_bf16.formats import BLOCK

from .bits import intrinsic

__all__ = ["HALF_BLOCK", "fill", "largest_magnitude"]

HALF_BLOCK = BLOCK // 2

_LANES = 16
_I32 = ir.IntType(32)
_INTEGERS, _FLOATS = ir.VectorType(_I32, _LANES), ir.VectorType(ir.FloatType(), _LANES)


def _vectors(builder, floats, index, kind):
    """Pointers to the vectors of half a block from ``index`` on."""
    for start in range(0, HALF_BLOCK, _LANES):
        at = builder.add(index, index.type(start))
        yield builder.bitcast(builder.gep(floats, [at]), kind.as_pointer())


@intrinsic
def largest_magnitude(typingctx, floats, i, k):
    """The largest magnitude, as uint32, in half a block from ``i`` on and half from ``k`` on."""

    def codegen(context, builder, signature, arguments):
        floats, *indices = arguments
        magnitude = ir.Constant(_INTEGERS, [0x7FFFFFFF] * _LANES)
        largest = ir.Constant(_INTEGERS, [0] * _LANES)
        for index in indices:
            for each in _vectors(builder, floats, index, _INTEGERS):
                bits = builder.and_(builder.load(each, align=4), magnitude)
                larger = builder.icmp_unsigned(">", bits, largest)
                largest = builder.select(larger, bits, largest)
        name = f"llvm.vector.reduce.umax.v{_LANES}i32"
        kind = ir.FunctionType(_I32, [_INTEGERS])
        reduce = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
        return builder.call(reduce, [largest])

    return types.uint32(floats, i, k), codegen


@intrinsic
def fill(typingctx, floats, i, x):
    """Write ``x`` to the floats of half a block from ``i`` on."""

    def codegen(context, builder, signature, arguments):
        floats, index, x = arguments
        one = builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), x, _I32(0))
        lanes = ir.Constant(ir.VectorType(_I32, _LANES), [0] * _LANES)
        all_lanes = builder.shuffle_vector(one, ir.Constant(_FLOATS, ir.Undefined), lanes)
        for each in _vectors(builder, floats, index, _FLOATS):
            builder.store(all_lanes, each, align=4)
        return context.get_dummy_value()

    return types.none(floats, i, types.float32), codegen
