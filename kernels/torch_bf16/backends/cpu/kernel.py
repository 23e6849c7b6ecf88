"""One compiled kernel per variant: decode -> rule -> encode for a range of chunks.

A kernel consists of parts that are compiled on their own and inlined: the rule, lifted from its
plain Python source, and a codec for each stored number. A chunk is a slice of one tensor, found
through a table of addresses, so that one call serves every tensor of a bucket.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import numpy as np

from torch_bf16.backends.bucket import Variant
from torch_bf16.rules import lift

from . import codegen
from .bits import add32, inlined, low32, mul32, no_values, shl32, shr32, xor32
from .compiler import ARITHMETIC, Compiler, tuple_of, with_parts
from .indices import PARTS
from .job import Work, compile_job, finish, take, unpack
from .llvm_hints import TILE, no_alias, wide_vectors
from .planes import copies_of_one, fetch, pointers, row, scratch_on_stack

__all__ = ["CHUNK", "KINDS", "compile_step"]

# Elements per chunk: all planes of one chunk fit an L2 cache of 512 KiB if they take at most 16
# bytes per element, as in both modes.
CHUNK = 1 << 15

KINDS = (
    *((np.int64, 2), (np.int64, 2), (np.int64, 1), (np.int64, 2)),
    *((np.uint32, 3), (np.int64, 1), (np.int64, 1), (np.float32, 2)),
)
"""The kinds of chunks, addresses, numels, runs, bases, steps, rows and scalars."""
_unpack = unpack(KINDS)

# Elements that are prefetched together, and how far ahead: a processor's own prefetching ends with
# each page of memory, which is 2048 numbers in bf16. A larger strip is more than it can fetch
# beside the update; the loop over a smaller one is not vectorised everywhere.
_STRIP, _AHEAD = 64, 512

_u32 = np.uint32
_ONE = _u32(1)
_S15, _S16 = _u32(15), _u32(16)
_M1, _M2 = _u32(0x7FEB352D), _u32(0x846CA68B)
_STEP, _BLOCK = _u32(0x9E3779B9), _u32(0x85EBCA6B)


@inlined
def _mix32(x):
    x = mul32(xor32(x, shr32(x, _S16)), _M1)
    x = mul32(xor32(x, shr32(x, _S15)), _M2)
    return xor32(x, shr32(x, _S16))


@inlined
def _block_keys(bases, tensor, stream, step, index_hi):
    """``counter_rng.block_keys`` for a stream of a tensor: two uint32."""
    t0 = xor32(bases[tensor, stream, 0], mul32(index_hi, _BLOCK))
    first = _mix32(add32(t0, mul32(step, _STEP)))
    return first, _mix32(xor32(bases[tensor, stream, 1], first))


def _keys(compiler, streams):
    """``keys(bases, tensor, step, index_hi)``: the block keys of all streams, in one tuple."""
    if not streams:
        return no_values
    lines = [f"a{k}, b{k} = block_keys(bases, tensor, {k}, step, index_hi)" for k in range(streams)]
    lines.append(f"return {tuple_of(f'a{k}, b{k}' for k in range(streams))}")
    names = {"block_keys": _block_keys}
    return compiler.write("keys(bases, tensor, step, index_hi)", lines, names)


# A placeholder for the parts of a variant: each kernel gets a module of its own instead.
parts = ModuleType("parts")


def _update_slice(planes, size, scalars, keys, index, shape, addresses, start, numel):
    no_alias()
    wide_vectors()
    scratch = scratch_on_stack()
    for first in range(0, size, parts.tile):
        n = min(parts.tile, size - first)
        parts.load(planes, first, n, scratch)
        for strip in range(0, n, _STRIP):
            if start + first + strip + _AHEAD < numel:
                parts.fetch(addresses, start + first + strip + _AHEAD)
            element = add32(index, low32(first + strip))
            for pair in range(min(_STRIP, n - strip) // 2):
                # Unsigned: a loop is not vectorised if an index might be negative.
                j = np.uintp(pair)
                i = np.uintp(first + strip) + j + j
                j = np.uintp(strip // 2) + j
                one, two = parts.read(planes, i, scratch, j)
                weight, states = parts.rule(one[1], one[0], one[2:], scalars)
                next_weight, next_states = parts.rule(two[1], two[0], two[2:], scalars)
                words = parts.words(keys, add32(element, shl32(low32(pair), _ONE)), index, shape)
                parts.write(
                    planes[1:], i, (weight, *states), (next_weight, *next_states), words, scratch, j
                )
        parts.scale(planes, first, n, scratch)
        for pair in range(n // 2):
            j = np.uintp(pair)
            parts.encode(planes, np.uintp(first) + j + j, scratch, j)


def _run(job):
    numbers, chunks, addresses, numels, runs, bases, steps, rows, scalars = _unpack(job)
    copies = parts.make_copies()
    while True:
        first, last = take(numbers)
        if first == last:
            break
        for chunk in range(first, last):
            tensor, start = chunks[chunk, 0], chunks[chunk, 1]
            # Column 0 is the gradient's address: 0 if there is none, and then nothing is done.
            stop = min(start + CHUNK, numels[tensor]) if addresses[tensor, 0] else start
            while start < stop:
                # A slice lies in one block of 2**32 indices, for which noise keys hold.
                index, n = parts.reach(runs, tensor, start, stop)
                # A pair starts at an even index; an element left over at either end of a slice is
                # updated beside a copy of itself.
                odd, planes = index & 1, row(addresses, tensor)
                is_alone = odd or n == 1
                if is_alone:
                    parts.copy_one(planes, start, copies)
                n = 1 if is_alone else n // 2 * 2
                parts.update_slice(
                    parts.pointers(copies if is_alone else planes, 0 if is_alone else start),
                    2 if is_alone else n,
                    parts.take_scalars(row(scalars, rows[tensor])),
                    parts.keys(bases, tensor, low32(steps[tensor]), low32(index >> 32)),
                    low32(index - odd),
                    parts.shape(runs, tensor, index - odd),
                    planes,
                    start,
                    numels[tensor],
                )
                if is_alone:
                    parts.put_back(planes, start, copies, odd)
                start += n
        finish(numbers, last - first)


@functools.cache
def compile_step(variant: Variant, n_scalars: int) -> Work:
    """Compile the kernel of a variant whose rule takes ``n_scalars`` scalars.

    It is compiled once per machine, and later read from Numba's cache.

    Returns:
        A function that takes a job of chunks over arrays and updates the chunks in place:
        ``chunks``, int64 ``[chunks, 2]`` of (tensor, first element); ``addresses``, int64
        ``[n, columns]``, of the gradient (0 if there is none: nothing is updated), the weight's
        planes and each state's planes; ``numels``; ``runs``, int64 ``[n, 3]``, offset, width and
        pitch; ``bases``; ``steps``, ``rows`` and ``scalars``, as in ``Bucket`` and ``ScalarRows``.
        It allocates nothing that grows with the tensors.
    """
    name = f"run_{variant.name}"
    compiler = Compiler(name)
    formats = variant.read_formats
    offsets = codegen.scratch_offsets(formats)
    streams = variant.streams
    draws = [
        (streams.index(draw.stream), draw.shift) if each.stochastic else None
        for each, draw in zip(variant.formats, variant.draws, strict=True)
    ]
    built: Any = ModuleType("parts")
    built.rule = lift(variant.rule.update, ARITHMETIC, compiler.compile)
    built.read = codegen.reads(compiler, formats, offsets)
    built.write = codegen.writes(compiler, formats[1:], offsets[1:], draws)
    built.load, built.scale, built.encode = codegen.blocks(compiler, formats, offsets)
    built.reach, built.shape = PARTS[variant.indices]
    built.words = codegen.words(compiler, len(streams), variant.indices == "transposed")
    built.pointers = pointers(formats)
    built.tile = TILE if any(each.block > 1 for each in formats) else _STRIP
    planes = [plane for each in formats for plane in each.planes]
    built.fetch = fetch(planes, _STRIP)
    built.make_copies, built.copy_one, built.put_back = copies_of_one(planes)
    built.take_scalars = compiler.take(n_scalars)
    built.keys = _keys(compiler, len(streams))
    built.update_slice = compiler.compile(with_parts(built, _update_slice))
    return compile_job(with_parts(built, _run), name, error_model="numpy")
