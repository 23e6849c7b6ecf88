"""32-bit integer arithmetic and bit casts for Numba kernels, and the decorator of their parts.

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
    "add32",
    "and32",
    "float_from_bits",
    "float_to_bits",
    "inlined",
    "intrinsic",
    "low32",
    "max32",
    "mul32",
    "no_effect",
    "no_values",
    "no_values_of_two",
    "or32",
    "shl32",
    "shr32",
    "sub32",
    "xor32",
]

# Its functions are called without their first argument, which type checkers cannot see.
intrinsic: Any = extending.intrinsic

inlined: Any = functools.partial(
    numba.njit,  # pyright: ignore[reportCallIssue]
    # IEEE division: Python's raises on zero, and that branch would keep a loop from vectorising.
    error_model="numpy",
    nogil=True,
    # A function that is not inlined is linked by its symbol: in the process that compiles it, this
    # is code that was optimised without its caller, and may be scalar.
    forceinline=True,
    # Wrappers for Python and C would make compiling take half as long again, and counting
    # references to arrays, which nothing here owns, a fifth.
    no_cpython_wrapper=True,
    no_cfunc_wrapper=True,
    _nrt=False,
)
"""Decorator for a part of a kernel, which is inlined into the kernel."""


@inlined
def no_effect(*arguments):
    return None


@inlined
def no_values(*arguments):
    return ()


@inlined
def no_values_of_two(*arguments):
    return (), ()


_I32 = ir.IntType(32)


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


@inlined
def max32(a, b):
    return a if a > b else b


def _cast(operation, source, target, kind):
    @intrinsic
    def apply(typingctx, x):
        def codegen(context, builder, signature, arguments):
            return getattr(builder, operation)(arguments[0], kind)

        return target(source), codegen

    return apply


float_to_bits = _cast("bitcast", types.float32, types.uint32, _I32)
float_from_bits = _cast("bitcast", types.uint32, types.float32, ir.FloatType())
low32 = _cast("trunc", types.int64, types.uint32, _I32)
"""The low 32 bits of a 64-bit integer."""
