"""One compiled kernel per variant: decode -> rule -> encode for a range of chunks.

A kernel is put together from parts compiled on their own: the rule, lifted from its plain Python
source, and one codec per stored number. A chunk is a slice of one tensor, found through a table of
addresses, so that a single call serves every tensor of a bucket.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from types import FunctionType, ModuleType

import numba
import numpy as np
import torch

from ... import rules
from ..bucket import Variant
from .bits import add32, address_as_pointer, low32, mul32, shr32, xor32
from .codecs import CODECS

__all__ = ["CHUNK", "compile_step"]

# Elements per chunk: all planes of one chunk, at most 20 bytes per element, fit a core's L2 cache.
CHUNK = 1 << 15

_ELEMENTS = {torch.bfloat16: np.uint16, torch.int16: np.uint16, torch.float32: np.float32}

_u32 = np.uint32
_S15, _S16 = _u32(15), _u32(16)
_M1, _M2 = _u32(0x7FEB352D), _u32(0x846CA68B)
_STEP, _BLOCK = _u32(0x9E3779B9), _u32(0x85EBCA6B)

# IEEE division: Python's raises on zero, and that branch would keep the loop from vectorising.
_jit = functools.partial(numba.njit, error_model="numpy", nogil=True)

_SIGNATURE = numba.void(
    numba.int64[:, ::1],
    numba.int64[:, ::1],
    numba.int64[::1],
    numba.int64[::1],
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
def _block_keys(bases, tensor, streams, step, index_hi):
    """``counter_rng.block_keys`` for each stream of a tensor: uint32 ``[streams, 2]``."""
    keys = np.empty((streams, 2), np.uint32)
    for stream in range(streams):
        t0 = xor32(bases[tensor, stream, 0], mul32(index_hi, _BLOCK))
        keys[stream, 0] = _mix32(add32(t0, mul32(step, _STEP)))
        keys[stream, 1] = _mix32(xor32(bases[tensor, stream, 1], keys[stream, 0]))
    return keys


@_jit
def _sqrt(x):
    return np.sqrt(x)


def _lift(update):
    """A rule with its ``arithmetic`` module swapped for Numba's primitives."""
    arithmetic = ModuleType("arithmetic")
    arithmetic.sqrt = _sqrt  # pyright: ignore[reportAttributeAccessIssue]
    return _jit(FunctionType(update.__code__, dict(update.__globals__, arithmetic=arithmetic)))


def _view_planes(dtypes, column):
    """``view(addresses, start, n)``: arrays over a chunk's planes, whose addresses start at ``column``."""
    if not dtypes:
        return _jit(lambda addresses, start, n: ())
    dtype, rest = _ELEMENTS[dtypes[0]], _view_planes(dtypes[1:], column + 1)
    itemsize = np.dtype(dtype).itemsize

    def view(addresses, start, n):
        pointer = address_as_pointer(addresses[column] + start * itemsize)
        return (numba.carray(pointer, (n,), dtype), *rest(addresses, start, n))

    return _jit(view)


def _fixed_tuple(length):
    """``take(row)``: the first ``length`` elements of an array as a tuple, kept in registers."""
    if length == 0:
        return _jit(lambda row: ())
    last, rest = length - 1, _fixed_tuple(length - 1)
    return _jit(lambda row: (*rest(row), row[last]))


def _state_codecs(formats, column, stream):
    """``(view, decode, encode)`` over all states at once, as nested tuples."""
    if not formats:
        return (
            _jit(lambda addresses, start, n: ()),
            _jit(lambda planes, i: ()),
            _jit(lambda planes, i, numbers, keys, index: None),
        )
    head, tail = formats[0], formats[1:]
    view_one = _view_planes([plane.dtype for plane in head.planes], column)
    decode_one, encode_one = CODECS[head.name]
    view_rest, decode_rest, encode_rest = _state_codecs(tail, column + len(head.planes), stream + 1)
    k0, k1 = 2 * stream, 2 * stream + 1

    def view(addresses, start, n):
        return (view_one(addresses, start, n), *view_rest(addresses, start, n))

    def decode(planes, i):
        return (decode_one(planes[0], i), *decode_rest(planes[1:], i))

    def encode(planes, i, numbers, keys, index):
        encode_one(planes[0], i, numbers[0], keys[k0], keys[k1], index)
        encode_rest(planes[1:], i, numbers[1:], keys, index)

    return _jit(view), _jit(decode), _jit(encode)


def _update_slice(weights, gradient, states, scalars, keys, index):
    for i in range(gradient[0].shape[0]):
        weight, numbers = rule(
            decode_weight(weights, i),
            decode_gradient(gradient, i),
            decode_states(states, i),
            scalars,
        )
        element = add32(index, low32(i))
        encode_weight(weights, i, weight, keys[0], keys[1], element)
        encode_states(states, i, numbers, keys, element)


def _run_chunks(chunks, addresses, numels, offsets, bases, steps, rows, scalars, first, last):
    for chunk in range(first, last):
        tensor, start = chunks[chunk, 0], chunks[chunk, 1]
        stop = min(start + CHUNK, numels[tensor])
        while start < stop:
            index = offsets[tensor] + start
            # Noise keys hold for one block of 2**32 global indices.
            n = min(stop - start, 4294967296 - (index & 4294967295))
            keys = _block_keys(bases, tensor, STREAMS, low32(steps[tensor]), low32(index >> 32))
            update_slice(
                view_weights(addresses[tensor], start, n),
                view_gradient(addresses[tensor], start, n),
                view_states(addresses[tensor], start, n),
                take_scalars(scalars[rows[tensor]]),
                take_keys(keys.reshape(-1)),
                low32(index),
            )
            start += n


@functools.cache
def compile_step(variant: Variant, n_scalars: int):
    """The kernel of a variant, whose rule takes ``n_scalars`` scalars.

    Compiled at the first call on a machine and read from Numba's cache ever after.

    Returns:
        ``run(chunks, addresses, numels, offsets, bases, steps, rows, scalars, first, last)``: updates
        chunks ``first .. last - 1`` in place. ``chunks`` is int64 ``[chunks, 2]`` of (tensor, first
        element); ``addresses`` int64 ``[n, columns]`` holds for each tensor the addresses of the
        gradient, the weight's planes and each state's planes; the others are as in ``Bucket``.
        It releases the GIL, allocates nothing that grows with the tensors, and may run in several
        threads over different chunks.
    """
    weights = variant.weights
    view_states, decode_states, encode_states = _state_codecs(
        variant.states, 1 + len(weights.planes), 1
    )
    gradient_codec = "fp32" if variant.gradient == torch.float32 else "bf16_nearest"
    parts = {
        "rule": _lift(variant.rule.update),
        "decode_weight": CODECS[weights.name][0],
        "encode_weight": CODECS[weights.name][1],
        "decode_gradient": CODECS[gradient_codec][0],
        "decode_states": decode_states,
        "encode_states": encode_states,
        "view_weights": _view_planes([plane.dtype for plane in weights.planes], 1),
        "view_gradient": _view_planes([variant.gradient], 0),
        "view_states": view_states,
        "take_scalars": _fixed_tuple(n_scalars),
        "take_keys": _fixed_tuple(2 * len(variant.formats)),
        "STREAMS": len(variant.formats),
    }
    parts["update_slice"] = _jit(FunctionType(_update_slice.__code__, {**globals(), **parts}))
    run = FunctionType(_run_chunks.__code__, {**globals(), **parts}, _run_chunks.__name__)
    return _cached(run, f"run_{variant.name}_{_source_hash()}")


def _cached(function, name):
    # Numba files compiled code under the name and the source file's age. It sees neither the parts that
    # reach the kernel as globals nor their sources, so the name carries both.
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
