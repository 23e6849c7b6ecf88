"""Sums of squares in fp64, piece by piece, so that threads do not change the bits."""

# Numba compiles what a type checker takes for Python.
# pyright: reportCallIssue=false

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import numpy as np
import torch

from torch_bf16.formats import BF16_NEAREST, FP32

from .bits import inlined, shl32
from .codecs import CODECS
from .compiler import with_parts
from .job import Work, compile_job, finish, take, unpack
from .llvm_hints import LINE, prefetch, wide_vectors
from .planes import ELEMENTS, pointer_at

__all__ = ["KINDS", "PIECE", "compile_squares"]

PIECE = 1 << 16
"""Elements per piece."""

KINDS = ((np.int64, 2), (np.float64, 1))
"""The kinds of a job's arrays."""
_unpack = unpack(KINDS)

# A placeholder for the parts of a dtype: each kernel gets a module of its own instead.
parts = ModuleType("parts")

# Elements that are prefetched together, and how many bytes ahead: a processor's own prefetching
# ends with each page of memory.
_STRIP, _AHEAD = 256, 1024


_S16 = np.uint32(16)


@inlined
def _load_float(elements, i):
    return elements[i]


@inlined
def _load_upper_half(elements, i):
    return shl32(np.uint32(elements[i]), _S16)


def _run(job):
    wide_vectors()
    numbers, table, sums = _unpack(job)
    while True:
        first, last = take(numbers)
        if first == last:
            break
        for piece in range(first, last):
            address, size = table[piece, 0], table[piece, 1]
            elements = parts.pointer(address)
            total = 0.0
            for strip in range(0, size, _STRIP):
                ahead = address + strip * parts.itemsize + _AHEAD
                for line in range(0, _STRIP * parts.itemsize, LINE):
                    prefetch(ahead + line)
                for i in range(min(_STRIP, size - strip)):
                    # Unsigned: a loop is not vectorised if an index might be negative.
                    place = np.uintp(strip) + np.uintp(i)
                    x = np.float64(parts.decode((parts.load(elements, place),)))
                    total += x * x
            sums[piece] = total
        finish(numbers, last - first)


@functools.cache
def compile_squares(dtype: torch.dtype) -> Work:
    """Compile the kernel that computes the sum of the squares of each piece.

    Args:
        dtype: the dtype of the elements, bfloat16 or float32.

    Returns:
        A function that takes a job of pieces over ``table``, int64 ``[n, 2]``, address and number
        of elements of each piece, and ``sums``, fp64 ``[n]``, to which it writes.
    """
    name = f"squares_{str(dtype).removeprefix('torch.')}"
    built: Any = ModuleType("parts")
    is_float = dtype == torch.float32
    built.pointer, built.itemsize = pointer_at(ELEMENTS[dtype]), dtype.itemsize
    built.load = _load_float if is_float else _load_upper_half
    built.decode, _ = CODECS[(FP32 if is_float else BF16_NEAREST).name]
    # Allows several partial sums at a time; an fp64 square of an fp32 number is exact.
    fast: Any = {"reassoc", "contract"}
    return compile_job(with_parts(built, _run), name, fastmath=fast)
