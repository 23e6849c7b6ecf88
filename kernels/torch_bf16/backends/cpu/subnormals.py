"""Runs a job with subnormal numbers, in each thread that shares it, where they would be flushed.

A thread is told to flush them to zero, and threads that it starts later inherit this. Only x86's
switches are known here: on other processors torch changes those of its own threads.
"""

from __future__ import annotations

import functools
import platform
from typing import Any

from llvmlite import ir
from numba import types

from .bits import intrinsic
from .job import FUNCTION, Work, compile_job, unpack

__all__ = ["keeping_subnormals"]

_I32, _POINTER = ir.IntType(32), ir.IntType(8).as_pointer()
# In the register MXCSR: subnormal results become zero, and so do subnormal operands.
_FLUSH = 1 << 15 | 1 << 6
_unpack = unpack(())


@functools.cache
def keeping_subnormals() -> Work | None:
    """A function that runs the ``FUNCTION`` of a job with subnormal numbers; None if unknown how.

    The function is called by its address, not inlined: else its arithmetic could be moved across
    the switches.
    """
    return compile_job(_run, "keeping_subnormals") if _on_x86() else None


def _on_x86() -> bool:
    return platform.machine() in ("x86_64", "AMD64")


def _run(job):
    (numbers,) = _unpack(job)
    _call(numbers[FUNCTION], job)


@intrinsic
def _call(typingctx, function, job):
    """Call a function that takes a job, with flushing switched off."""

    def codegen(context, builder, signature, arguments):
        address, job = arguments
        of_job: Any = ir.FunctionType(ir.VoidType(), [_POINTER])
        before, within = builder.alloca(_I32), builder.alloca(_I32)

        def switches(name, place):
            intrinsic = builder.module.declare_intrinsic(f"llvm.x86.sse.{name}", (), of_job)
            builder.call(intrinsic, [builder.bitcast(place, _POINTER)])

        switches("stmxcsr", before)
        builder.store(builder.and_(builder.load(before), _I32(~_FLUSH)), within)
        switches("ldmxcsr", within)
        builder.call(builder.inttoptr(address, of_job.as_pointer()), [job])
        switches("ldmxcsr", before)
        return context.get_dummy_value()

    return types.none(types.int64, types.voidptr), codegen
