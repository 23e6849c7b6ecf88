"""One compiled kernel per variant: decode -> rule -> encode for a range of chunks.

A kernel is put together from parts compiled on their own: the rule, lifted from its plain Python
source, and one codec per stored number. A chunk is a slice of one tensor, found through a table of
addresses, so that a single call serves every tensor of a bucket.
"""

from __future__ import annotations

import functools
import hashlib
from itertools import count
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import numba
import numpy as np
import torch

from torch_bf16 import rules
from torch_bf16.backends.bucket import Variant
from torch_bf16.formats import BLOCK, Plane

from .bits import ROOM, add32, address_as_pointer, low32, mul32, room_on_stack, shr32, xor32
from .blocks import BLOCK_CODECS, threshold
from .codecs import CODECS, noise16

__all__ = ["CHUNK", "compile_step"]

# Elements per chunk: all planes of one chunk, at most 20 bytes per element, fit a core's L2 cache.
CHUNK = 1 << 15

_ELEMENTS = {
    torch.bfloat16: np.uint16,
    torch.int16: np.uint16,
    torch.int8: np.uint8,
    torch.uint8: np.uint8,
    torch.float32: np.float32,
}

_ZERO, _PLUS_ONE, _MINUS_ONE = np.float32(0), np.float32(1), np.float32(-1)
_u32 = np.uint32
_NO_SCALE = np.float32(0)
carray: Any = numba.carray  # pyright: ignore[reportPrivateImportUsage]
_S15, _S16 = _u32(15), _u32(16)
_M1, _M2 = _u32(0x7FEB352D), _u32(0x846CA68B)
_STEP, _BLOCK = _u32(0x9E3779B9), _u32(0x85EBCA6B)

# IEEE division: Python's raises on zero, and that branch would keep the loop from vectorising.
_jit: Any = functools.partial(numba.njit, error_model="numpy", nogil=True)

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


@_jit
def _mix32(x):
    x = mul32(xor32(x, shr32(x, _S16)), _M1)
    x = mul32(xor32(x, shr32(x, _S15)), _M2)
    return xor32(x, shr32(x, _S16))


@_jit
def _block_keys(bases, tensor, step, index_hi):
    """``counter_rng.block_keys`` for each format of a tensor: uint32 ``[formats * 2]``."""
    keys = np.empty(2 * bases.shape[1], np.uint32)
    for number in range(bases.shape[1]):
        t0 = xor32(bases[tensor, number, 0], mul32(index_hi, _BLOCK))
        keys[2 * number] = _mix32(add32(t0, mul32(step, _STEP)))
        keys[2 * number + 1] = _mix32(xor32(bases[tensor, number, 1], keys[2 * number]))
    return keys


@_jit
def _sqrt(x):
    return np.sqrt(x)


@_jit
def _div(a, b):
    return a / b


@_jit
def _maximum(a, b):
    return a if a > b else (b if b >= a else a + b)


@_jit
def _minimum(a, b):
    return a if a < b else (b if b <= a else a + b)


@_jit
def _sign(x):
    return _PLUS_ONE if x > _ZERO else (_MINUS_ONE if x < _ZERO else x - x)


_ARITHMETIC = {
    "sqrt": _sqrt,
    "div": _div,
    "maximum": _maximum,
    "minimum": _minimum,
    "sign": _sign,
}


class _Workshop:
    """Compiles the parts of one variant, each under a symbol of its own.

    Kernels read from the cache are linked by symbol, and Numba numbers symbols per process: parts
    of two variants that were compiled by two processes would be taken for one another.
    """

    def __init__(self, variant: Variant) -> None:
        self._suffix = f"{variant.name}_{_source_hash()}"
        self._numbers = count()

    def compile(self, function) -> Any:
        function.__qualname__ = f"{function.__name__}_{next(self._numbers)}_{self._suffix}"
        return _jit(function)

    def rebind(self, function, **names):
        """``function`` with some of its globals replaced, not yet compiled."""
        return FunctionType(function.__code__, {**function.__globals__, **names}, function.__name__)

    def lift(self, update):
        """A rule with its ``arithmetic`` module swapped for Numba's primitives."""
        return rules.lift(update, _ARITHMETIC, self.compile)

    def view(self, planes, column):
        """``view(addresses, start, n)``: arrays over planes whose addresses start at ``column``."""
        if not planes:
            return self.compile(lambda addresses, start, n: ())
        dtype, rest = _ELEMENTS[planes[0].dtype], self.view(planes[1:], column + 1)
        itemsize, block = np.dtype(dtype).itemsize, planes[0].block

        def view(addresses, start, n):
            pointer = address_as_pointer(addresses[column] + start // block * itemsize)
            array = carray(pointer, (n // block,), dtype)
            return (array, *rest(addresses, start, n))

        return self.compile(view)

    def views(self, formats, column):
        """The same for the planes of several states, as nested tuples."""
        if not formats:
            return self.compile(lambda addresses, start, n: ())
        one = self.view(formats[0].planes, column)
        rest = self.views(formats[1:], column + len(formats[0].planes))

        def view(addresses, start, n):
            return (one(addresses, start, n), *rest(addresses, start, n))

        return self.compile(view)

    def take(self, length):
        """``take(row)``: the first ``length`` elements as a tuple, kept in registers."""
        if length == 0:
            return self.compile(lambda row: ())
        last, rest = length - 1, self.take(length - 1)
        return self.compile(lambda row: (*rest(row), row[last]))

    def state_codecs(self, formats, draws, column):
        """``(view, decode, encode)`` over all states at once, as nested tuples.

        ``draws`` has for each state the number of its noise key and its shift.
        """
        if not formats:
            return (
                self.compile(lambda addresses, start, n: ()),
                self.compile(lambda planes, i: ()),
                self.compile(lambda planes, i, numbers, keys, index: None),
            )
        head, tail = formats[0], formats[1:]
        view_one = self.view(head.planes, column)
        decode_one, encode_one = CODECS[head.name]
        view_rest, decode_rest, encode_rest = self.state_codecs(
            tail, draws[1:], column + len(head.planes)
        )
        key, shift = draws[0]

        def view(addresses, start, n):
            return (view_one(addresses, start, n), *view_rest(addresses, start, n))

        def decode(planes, i):
            return (decode_one(planes[0], i), *decode_rest(planes[1:], i))

        def encode(planes, i, numbers, keys, index):
            encode_one(planes[0], i, numbers[0], keys[key], keys[key + 1], index, shift)
            encode_rest(planes[1:], i, numbers[1:], keys, index)

        return self.compile(view), self.compile(decode), self.compile(encode)

    def block_codecs(self, formats, draws, at=0):
        """``(load_scales, decode, encode, finish)`` where some of the states are in blocks.

        Numbers of those are put into ``room``, from ``at`` on, and encoded by ``finish``.
        """
        if not formats:
            return (
                self.compile(lambda planes, block: ()),
                self.compile(lambda planes, i, scales: ()),
                self.compile(lambda planes, i, numbers, keys, index, room, j: None),
                self.compile(lambda planes, first, room: None),
            )
        (head, *tail), (key, shift) = formats, draws[0]
        room_taken = 0 if head.block == 1 else head.block * (1 + head.stochastic)
        load_rest, decode_rest, encode_rest, finish_rest = self.block_codecs(
            tail, draws[1:], at + room_taken
        )
        codec: Any = (BLOCK_CODECS if room_taken else CODECS)[head.name]
        decode_one, encode_one = codec

        def load_block(planes, block):
            return (planes[0][1][block], *load_rest(planes[1:], block))

        def decode_block(planes, i, scales):
            one = decode_one(planes[0], i, scales[0])
            return (one, *decode_rest(planes[1:], i, scales[1:]))

        def put_aside(planes, i, numbers, keys, index, room, j):
            room[at + j] = numbers[0]
            encode_rest(planes[1:], i, numbers[1:], keys, index, room, j)

        def put_aside_with_noise(planes, i, numbers, keys, index, room, j):
            room[at + j] = numbers[0]
            # Here, because another number may be rounded with bits of the same word.
            r = noise16(keys[key], keys[key + 1], index, shift)
            room[at + BLOCK + j] = threshold(r)
            encode_rest(planes[1:], i, numbers[1:], keys, index, room, j)

        def encode_block(planes, first, room):
            encode_one(planes[0], first, room, at)
            finish_rest(planes[1:], first, room)

        def load(planes, block):
            return (_NO_SCALE, *load_rest(planes[1:], block))

        def decode(planes, i, scales):
            return (decode_one(planes[0], i), *decode_rest(planes[1:], i, scales[1:]))

        def encode(planes, i, numbers, keys, index, room, j):
            encode_one(planes[0], i, numbers[0], keys[key], keys[key + 1], index, shift)
            encode_rest(planes[1:], i, numbers[1:], keys, index, room, j)

        def finish(planes, first, room):
            finish_rest(planes[1:], first, room)

        put = put_aside_with_noise if head.stochastic else put_aside
        blocked = (load_block, decode_block, put, encode_block)
        parts = blocked if room_taken else (load, decode, encode, finish)
        return tuple(self.compile(each) for each in parts)


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
    room = carray(room_on_stack(), (ROOM,), np.float32)
    for block in range(gradient[0].shape[0] // BLOCK):
        first = block * BLOCK
        scales = parts.load_scales(states, block)
        for j in range(BLOCK):
            # Unsigned: an index that might be negative keeps the loop from vectorising.
            i = np.uintp(first + j)
            weight, numbers = parts.rule(
                parts.decode_weight(weights, i),
                parts.decode_gradient(gradient, i),
                parts.decode_states(states, i, scales),
                scalars,
            )
            element = add32(index, low32(first + j))
            parts.encode_weight(weights, i, weight, keys[0], keys[1], element, parts.shift)
            parts.encode_states(states, i, numbers, keys, element, room, j)
        parts.finish_states(states, first, room)


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
    workshop, weights = _Workshop(variant), variant.weights
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
            variant_parts.load_scales,
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
    return _cached(run, f"run_{variant.name}_{_source_hash()}")


def _cached(function, name):
    # Numba files compiled code under the name and the source file's age. It sees neither the parts
    # that reach the kernel as globals nor their sources, so the name carries both.
    function.__qualname__ = name
    try:
        return _jit(_SIGNATURE, cache=True)(function)
    except (RuntimeError, OSError):
        # No writable place for a cache: compile again in every process.
        return _jit(_SIGNATURE)(function)


@functools.cache
def _source_hash() -> str:
    digest = hashlib.blake2b(digest_size=8)
    for folder in (Path(rules.__file__).parent, Path(__file__).parent):
        for source in sorted(folder.glob("*.py")):
            digest.update(source.read_bytes())
    return digest.hexdigest()
