"""One compiled kernel per variant: decode -> rule -> encode for a range of chunks.

A kernel is put together from parts compiled on their own: the rule, lifted from its plain Python
source, and one codec per stored number. A chunk is a slice of one tensor, found through a table of
addresses, so that a single call serves every tensor of a bucket.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import numba
import numpy as np
import torch

from torch_bf16.backends.bucket import Variant
from torch_bf16.formats import Plane

from .bits import ROOM, TILE, add32, low32, mul32, room_on_stack, shr32, wide_vectors, xor32
from .codecs import CODECS
from .workshop import Workshop, carray, jit, source_hash

__all__ = ["CHUNK", "compile_step"]

# Elements per chunk: all planes of one chunk, at most 20 bytes per element, fit a core's L2 cache.
CHUNK = 1 << 15

_u32 = np.uint32
_S15, _S16 = _u32(15), _u32(16)
_M1, _M2 = _u32(0x7FEB352D), _u32(0x846CA68B)
_STEP, _BLOCK = _u32(0x9E3779B9), _u32(0x85EBCA6B)

_SIGNATURE = numba.void(
    numba.int64[:, ::1],
    numba.int64[:, ::1],
    numba.int64[::1],
    numba.int64[:, ::1],
    numba.uint32[:, :, ::1],
    numba.int64[::1],
    numba.int64[::1],
    numba.float32[:, ::1],
    numba.int64,
    numba.int64,
)


@jit
def _mix32(x):
    x = mul32(xor32(x, shr32(x, _S16)), _M1)
    x = mul32(xor32(x, shr32(x, _S15)), _M2)
    return xor32(x, shr32(x, _S16))


@jit
def _block_keys(bases, tensor, step, index_hi):
    """``counter_rng.block_keys`` for each format of a tensor: uint32 ``[formats * 2]``."""
    keys = np.empty(2 * bases.shape[1], np.uint32)
    for number in range(bases.shape[1]):
        t0 = xor32(bases[tensor, number, 0], mul32(index_hi, _BLOCK))
        keys[2 * number] = _mix32(add32(t0, mul32(step, _STEP)))
        keys[2 * number + 1] = _mix32(xor32(bases[tensor, number, 1], keys[2 * number]))
    return keys


# What a variant is made of; each kernel gets a module of its own in its place.
parts = ModuleType("parts")


def _update_slice(weights, gradient, states, scalars, keys, index):
    for i in range(gradient[0].shape[0]):
        weight, numbers = parts.rule(
            parts.decode_weight(weights, i),
            parts.decode_gradient(gradient, i),
            parts.decode_states(states, i),
            scalars,
        )
        element = add32(index, low32(i))
        parts.encode_weight(weights, i, weight, keys[0], keys[1], element, parts.shift)
        parts.encode_states(states, i, numbers, keys, element)


def _update_blocks(weights, gradient, states, scalars, keys, index):
    wide_vectors()
    room = carray(room_on_stack(), (ROOM,), np.float32)
    size = gradient[0].shape[0]
    for first in range(0, size, TILE):
        n = min(TILE, size - first)
        parts.load_states(states, first, n, room)
        element = add32(index, low32(first))
        for j in range(n):
            # Unsigned: an index that might be negative keeps the loop from vectorising.
            i = np.uintp(first + j)
            weight, numbers = parts.rule(
                parts.decode_weight(weights, i),
                parts.decode_gradient(gradient, i),
                parts.decode_states(states, i, room, np.uintp(j)),
                scalars,
            )
            at = add32(element, low32(j))
            parts.encode_weight(weights, i, weight, keys[0], keys[1], at, parts.shift)
            parts.encode_states(states, i, numbers, keys, at, room, np.uintp(j))
        parts.finish_states(states, first, n, room)


def _run_chunks(chunks, addresses, numels, runs, bases, steps, rows, scalars, first, last):
    for chunk in range(first, last):
        tensor, start = chunks[chunk, 0], chunks[chunk, 1]
        stop = min(start + CHUNK, numels[tensor])
        while start < stop:
            offset, width, pitch = runs[tensor]
            run = start // width
            index = offset + run * pitch + start - run * width
            # A slice has consecutive indices, and noise keys hold for one block of 2**32.
            n = min(stop, (run + 1) * width) - start
            n = min(n, 4294967296 - (index & 4294967295))
            keys = _block_keys(bases, tensor, low32(steps[tensor]), low32(index >> 32))
            parts.update_slice(
                parts.view_weights(addresses[tensor], start, n),
                parts.view_gradient(addresses[tensor], start, n),
                parts.view_states(addresses[tensor], start, n),
                parts.take_scalars(scalars[rows[tensor]]),
                parts.take_keys(keys),
                low32(index),
            )
            start += n


@functools.cache
def compile_step(variant: Variant, n_scalars: int):
    """The kernel of a variant, whose rule takes ``n_scalars`` scalars.

    Compiled at the first call on a machine and read from Numba's cache ever after.

    Returns:
        ``run(chunks, addresses, numels, runs, bases, steps, rows, scalars, first, last)``:
        updates chunks ``first .. last - 1`` in place. ``chunks`` is int64 ``[chunks, 2]`` of
        (tensor, first element); ``addresses`` int64 ``[n, columns]`` holds for each tensor the
        addresses of the gradient, the weight's planes and each state's planes; ``runs`` int64
        ``[n, 3]`` offset, width and pitch; the others are as in ``Bucket``. It releases the GIL,
        allocates nothing that grows with the tensors, and may run in several threads over different
        chunks.
    """
    workshop, weights = Workshop(variant), variant.weights
    # Two numbers that share a stream share its word: same keys, so that it is computed once.
    streams = [draw.stream for draw in variant.draws]
    draws = [(2 * streams.index(draw.stream), _u32(draw.shift)) for draw in variant.draws]
    column = 1 + len(weights.planes)
    in_blocks = any(each.block > 1 for each in variant.states)
    gradient_codec = "fp32" if variant.gradient == torch.float32 else "bf16_nearest"
    variant_parts: Any = ModuleType("parts")
    variant_parts.rule = workshop.lift(variant.rule.update)
    variant_parts.decode_weight = CODECS[weights.name][0]
    variant_parts.encode_weight = CODECS[weights.name][1]
    variant_parts.decode_gradient = CODECS[gradient_codec][0]
    if in_blocks:
        (
            variant_parts.load_states,
            variant_parts.decode_states,
            variant_parts.encode_states,
            variant_parts.finish_states,
        ) = workshop.block_codecs(variant.states, draws[1:])
        variant_parts.view_states = workshop.views(variant.states, column)
    else:
        (
            variant_parts.view_states,
            variant_parts.decode_states,
            variant_parts.encode_states,
        ) = workshop.state_codecs(variant.states, draws[1:], column)
    variant_parts.view_weights = workshop.view(weights.planes, 1)
    variant_parts.view_gradient = workshop.view([Plane("", variant.gradient)], 0)
    variant_parts.take_scalars = workshop.take(n_scalars)
    variant_parts.take_keys = workshop.take(2 * len(variant.formats))
    variant_parts.shift = draws[0][1]
    variant_parts.update_slice = workshop.compile(
        workshop.rebind(_update_blocks if in_blocks else _update_slice, parts=variant_parts)
    )
    run = workshop.rebind(_run_chunks, parts=variant_parts)
    return _cached(run, f"run_{variant.name}_{source_hash()}")


def _cached(function, name):
    # Numba files compiled code under the name and the source file's age. It sees neither the parts
    # that reach the kernel as globals nor their sources, so the name carries both.
    function.__qualname__ = name
    try:
        return jit(_SIGNATURE, cache=True)(function)
    except (RuntimeError, OSError):
        # No writable place for a cache: compile again in every process.
        return jit(_SIGNATURE)(function)
