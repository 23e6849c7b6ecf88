"""Sums of a rule's statistic: one compiled kernel per variant, beside that of the step.

The sums are integers, so that neither threads nor the width of vectors change their bits.
"""

# Numba compiles what a type checker takes for Python.
# pyright: reportCallIssue=false

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import numpy as np

from torch_bf16.backends.bucket import Variant
from torch_bf16.rules import LARGEST_STATISTIC, STATISTIC_UNIT, lift

from . import codegen
from .bits import add32, and32, inlined, low32, shr32
from .compiler import ARITHMETIC, Compiler, with_parts
from .job import Work, compile_job, fetch_add, finish, take, unpack
from .kernel import CHUNK
from .llvm_hints import TILE, no_alias, wide_vectors
from .planes import copies_of_one, pointers, row, scratch_on_stack

__all__ = ["KINDS", "compile_statistic"]

KINDS = (
    *((np.int64, 2), (np.int64, 2), (np.int64, 1)),
    *((np.int64, 1), (np.float32, 2), (np.int64, 1)),
)
"""The kinds of chunks, addresses, numels, rows, scalars and sums."""
_unpack = unpack(KINDS)

_LARGEST, _UNIT = np.float32(LARGEST_STATISTIC), np.float32(STATISTIC_UNIT)
_LOW, _S16 = np.uint32(0xFFFF), np.uint32(16)

# A placeholder for the parts of a variant: each kernel gets a module of its own instead.
parts = ModuleType("parts")


@inlined
def _units(x):
    # A NaN is not below _LARGEST, so it becomes _LARGEST.
    bounded = x if x < _LARGEST else _LARGEST
    return low32(np.int64(np.int32(bounded * _UNIT)))


def _sum_slice(planes, size, scalars):
    no_alias()
    wide_vectors()
    scratch = scratch_on_stack()
    total = np.int64(0)
    for first in range(0, size, TILE):
        n = min(TILE, size - first)
        parts.load(planes, first, n, scratch)
        # Summed in two halves: a tile's sum exceeds 32 bits, and vectors hold half as many of 64.
        low = high = np.uint32(0)
        for pair in range(n // 2):
            # Unsigned: a loop is not vectorised if an index might be negative.
            j = np.uintp(pair)
            one, two = parts.read(planes, np.uintp(first) + j + j, scratch, j)
            units = _units(parts.statistic(one[1], one[0], one[2:], scalars))
            more = _units(parts.statistic(two[1], two[0], two[2:], scalars))
            low = add32(low, add32(and32(units, _LOW), and32(more, _LOW)))
            high = add32(high, add32(shr32(units, _S16), shr32(more, _S16)))
        total += np.int64(low) + (np.int64(high) << 16)
    return total


def _run(job):
    numbers, chunks, addresses, numels, rows, scalars, sums = _unpack(job)
    copies = parts.make_copies()
    while True:
        first, last = take(numbers)
        if first == last:
            break
        for chunk in range(first, last):
            tensor, start = chunks[chunk, 0], chunks[chunk, 1]
            # Column 0 is the gradient's address: 0 if there is none.
            if not addresses[tensor, 0]:
                continue
            planes, stop = row(addresses, tensor), min(start + CHUNK, numels[tensor])
            while start < stop:
                # An element left over at the end is counted beside a copy of itself.
                is_alone = stop - start == 1
                if is_alone:
                    parts.copy_one(planes, start, copies)
                n = 2 if is_alone else (stop - start) // 2 * 2
                total = parts.sum_slice(
                    parts.pointers(copies if is_alone else planes, 0 if is_alone else start),
                    n,
                    parts.take_scalars(row(scalars, rows[tensor])),
                )
                fetch_add(sums, tensor, total // 2 if is_alone else total)
                start += n
        finish(numbers, last - first)


@functools.cache
def compile_statistic(variant: Variant, n_scalars: int) -> Work:
    """Compile the kernel that sums a variant's statistic, which takes ``n_scalars`` scalars.

    It is compiled once per machine, and later read from Numba's cache.

    Returns:
        A function that takes a job of chunks over arrays: those of :func:`.kernel.compile_step` of
        the same names, and ``sums``, int64 ``[n]``, to which it adds the sum of each tensor.
    """
    name = f"statistic_{variant.name}"
    compiler = Compiler(name)
    formats = variant.read_formats
    offsets = codegen.scratch_offsets(formats)
    built: Any = ModuleType("parts")
    built.statistic = lift(variant.rule.statistic, ARITHMETIC, compiler.compile)
    built.read = codegen.reads(compiler, formats, offsets)
    built.load, _, _ = codegen.blocks(compiler, formats, offsets)
    built.pointers = pointers(formats)
    planes = [plane for each in formats for plane in each.planes]
    built.make_copies, built.copy_one, _ = copies_of_one(planes)
    built.take_scalars = compiler.take(n_scalars)
    built.sum_slice = compiler.compile(with_parts(built, _sum_slice))
    return compile_job(with_parts(built, _run), name, error_model="numpy")
