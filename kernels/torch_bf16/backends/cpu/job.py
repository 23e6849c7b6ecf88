"""Jobs: what threads share in one call, namely a counter that hands out the work, and the arrays.

A compiled function takes the address of a job and nothing else, so that OpenMP can call it. Each
thread takes pieces until none is left: many in a row at first, because at the border between two
threads' pieces both wait for cache lines that the other has just fetched; few at the end, so that a
thread on a busy core leaves the rest to the other threads, and all end together.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.np.arrayobj import np_cfarray
from numba.np.numpy_support import from_dtype

from .bits import inlined, intrinsic
from .cache import compile_cached
from .planes import pointer_type

__all__ = [
    "FUNCTION",
    "Kinds",
    "Work",
    "compile_job",
    "fetch_add",
    "finish",
    "finished",
    "new_job",
    "share",
    "take",
    "unpack",
]

Work = Callable[[int], None]
"""A compiled function: takes the address of a job, and releases the GIL."""

Kinds = tuple[tuple[Any, int], ...]
"""Dtype and number of dimensions of each array of a job."""

# In a job of int64: index of the first array, and entries per array, its address and up to 3 sizes.
_ARRAYS, _EACH = 24, 4
# The numbers that threads write lie in cache lines of their own.
_NEXT, _FINISHED, _COUNT, _PARTS = 0, 8, 16, 17

FUNCTION = 18
"""Where the address of a job's function is, if another function is to call it."""

_I64 = ir.IntType(64)
_SIGNATURE = types.void(types.voidptr)
_WORK: Any = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def new_job(kinds: Kinds, arrays: Sequence[np.ndarray], count: int) -> np.ndarray:
    """A job over ``count`` pieces, for one thread until :func:`share`: int64.

    Args:
        kinds: the kinds of the arrays, as for :func:`unpack`.
        arrays: contiguous; they must outlive the job.
        count: number of pieces.

    Raises:
        TypeError: an array is not of its kind.
    """
    job = np.zeros(_ARRAYS + _EACH * len(arrays), np.int64)
    job[_COUNT], job[_PARTS] = count, 1
    for number, (array, kind) in enumerate(zip(arrays, kinds, strict=True)):
        if (array.dtype, array.ndim) != kind or not array.flags.c_contiguous:
            found = f"{array.dtype}, {array.ndim} dimensions, strides {array.strides}"
            raise TypeError(f"array {number} of a kernel is {found}; it takes {kind}, contiguous")
        at = _ARRAYS + _EACH * number
        job[at], job[at + 1 : at + 1 + array.ndim] = array.ctypes.data, array.shape
    return job


def unpack(kinds: Kinds) -> Any:
    """For a compiled function: ``unpack(job)``, a tuple of pointers and arrays.

    The first is a pointer to the job's numbers; an array of one dimension is a pointer, too, and
    knows no length.
    """
    places = range(_ARRAYS, _ARRAYS + _EACH * len(kinds), _EACH)
    found = [
        pointer_type(dtype) if ndim == 1 else types.Array(from_dtype(np.dtype(dtype)), ndim, "C")
        for dtype, ndim in kinds
    ]

    @intrinsic
    def unpack(typingctx, job):
        def codegen(context, builder, signature, arguments):
            numbers = builder.bitcast(arguments[0], _I64.as_pointer())

            def number(at):
                return builder.load(builder.gep(numbers, [_I64(at)]))

            arrays = []
            for at, kind in zip(places, found, strict=True):
                if isinstance(kind, types.CPointer):
                    arrays.append(builder.inttoptr(number(at), context.get_value_type(kind)))
                    continue
                shape = types.UniTuple(types.intp, kind.ndim)
                sizes = [number(at + 1 + i) for i in range(kind.ndim)]
                address = builder.inttoptr(number(at), arguments[0].type)
                described = address, context.make_tuple(builder, shape, sizes)
                arrays.append(np_cfarray(context, builder, kind(types.voidptr, shape), described))
            return context.make_tuple(builder, signature.return_type, [numbers, *arrays])

        return types.Tuple([pointer_type(np.int64), *found])(types.voidptr), codegen

    return unpack


def share(job: np.ndarray, threads: int) -> None:
    """Set how many threads take pieces of a job: each time one takes half its share of the rest."""
    job[_PARTS] = 1 if threads <= 1 else 2 * threads


def finished(job: np.ndarray) -> bool:
    """Whether all of a job's pieces were taken and none failed."""
    return bool(job[_FINISHED] == job[_COUNT])


def compile_job(function: Any, name: str, **options: Any) -> Work:
    """Compile a function of a job once per machine; later read it from Numba's cache.

    Args:
        function: takes a job's address; it calls :func:`take` until nothing is left, and
            :func:`finish` after the pieces of each call.
        name: what the function is known by: another name for each set of its parts.
        **options: options of Numba's compiler.
    """
    # `numba.cfunc` would optimise everything twice.
    options = {"no_cpython_wrapper": True, "_nrt": False, **options}
    dispatcher = compile_cached(function, name, _SIGNATURE, **options)
    (compiled,) = dispatcher.overloads.values()
    symbol = compiled.fndesc.llvm_cfunc_wrapper_name
    work = _WORK(compiled.library.get_pointer_to_function(symbol))
    # The machine code lives as long as the dispatcher.
    work.compiled = dispatcher
    return work


@intrinsic
def fetch_add(typingctx, numbers, place, n):
    """Add ``n`` to a number atomically; returns its previous value."""

    def codegen(context, builder, signature, arguments):
        numbers, place, n = arguments
        return builder.atomic_rmw("add", builder.gep(numbers, [place]), n, "monotonic")

    return types.int64(numbers, types.int64, types.int64), codegen


@intrinsic
def _exchange(typingctx, numbers, place, expected, new):
    """Replace a number atomically if it is the expected one; returns its previous value."""

    def codegen(context, builder, signature, arguments):
        numbers, place, expected, new = arguments
        where = builder.gep(numbers, [place])
        was = builder.cmpxchg(where, expected, new, "monotonic", "monotonic")
        return builder.extract_value(was, 0)

    return types.int64(numbers, types.int64, types.int64, types.int64), codegen


@inlined
def take(numbers):
    """Take the next pieces of a job: the first, and the one after the last; equal at its end."""
    count = numbers[_COUNT]
    first = numbers[_NEXT]
    while first < count:
        last = first + max((count - first) // numbers[_PARTS], 1)
        found = _exchange(numbers, _NEXT, first, last)
        if found == first:
            return first, last
        first = found
    return count, count


@inlined
def finish(numbers, count):
    """Add ``count`` to the pieces of a job that are done."""
    fetch_add(numbers, _FINISHED, count)
