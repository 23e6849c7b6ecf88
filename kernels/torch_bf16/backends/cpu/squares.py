"""Sums of squares in fp64, piece by piece, so that threads do not change their bits."""

# Numba compiles what a type checker takes for Python.
# pyright: reportCallIssue=false

from __future__ import annotations

import functools
from types import FunctionType
from typing import Any

import numba
import numpy as np
import torch
from numba import types

from .bits import float_from_bits, inlined, shl32
from .compiler import ELEMENTS, carray, source_hash
from .llvm_hints import address_as_pointer

__all__ = ["PIECE", "compile_squares"]

PIECE = 1 << 16
"""Elements per piece."""

# What a kernel is made of, given for each dtype.
element: Any = None
decode: Any = None

_TABLE, _SUMS = types.Array(types.int64, 2, "C"), types.Array(types.float64, 1, "C")
_HALF = np.uint32(16)


@inlined
def _from_bf16(x):
    return float_from_bits(shl32(types.uint32(x), _HALF))


@inlined
def _from_fp32(x):
    return x


_DECODE = {torch.bfloat16: _from_bf16, torch.float32: _from_fp32}


def _run(table, sums, first, last):
    for piece in range(first, last):
        numbers = carray(address_as_pointer(table[piece, 0]), (table[piece, 1],), element)
        total = 0.0
        for i in range(len(numbers)):
            x = np.float64(decode(numbers[i]))
            total += x * x
        sums[piece] = total


@functools.cache
def compile_squares(dtype: torch.dtype) -> Any:
    """``run(table, sums, first, last)``: the sum of the squares of each piece from first to last.

    Reads: ``table``, int64 ``[n, 2]``, address and number of elements of each piece.
    Writes: ``sums``, fp64 ``[n]``.

    Args:
        dtype: of the elements, bfloat16 or float32.
    """
    parts = {"element": ELEMENTS[dtype], "decode": _DECODE[dtype]}
    run = FunctionType(_run.__code__, {**globals(), **parts}, _run.__name__)
    # Numba's cache sees neither the parts nor their sources, so the name stands for both.
    run.__qualname__ = f"squares_{str(dtype).removeprefix('torch.')}_{source_hash()}"
    # Several sums at a time; an fp64 square of an fp32 number is exact.
    fast: Any = {"reassoc", "contract"}
    signature = types.void(_TABLE, _SUMS, types.int64, types.int64)
    compile_ = functools.partial(numba.njit, signature, nogil=True, fastmath=fast)
    try:
        return compile_(cache=True)(run)
    except (RuntimeError, OSError):
        # No directory for a cache can be written: compile again in every process.
        return compile_()(run)
