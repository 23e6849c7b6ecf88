"""What kernels are put together from: parts of a variant, each compiled on its own.

A kernel is the rule, lifted from its plain Python source, and one codec per stored number; here are
the parts that look after several numbers at once.
"""

from __future__ import annotations

import functools
import hashlib
from itertools import count
from pathlib import Path
from types import FunctionType
from typing import Any

import numba
import numpy as np
import torch

from torch_bf16 import rules
from torch_bf16.backends.bucket import Variant

from .bits import TILE, address_as_pointer
from .blocks import BLOCK_CODECS, threshold
from .codecs import CODECS, noise16

__all__ = ["Workshop", "carray", "jit", "source_hash"]

_ELEMENTS = {
    torch.bfloat16: np.uint16,
    torch.int16: np.uint16,
    torch.int8: np.uint8,
    torch.uint8: np.uint8,
    torch.float32: np.float32,
}

_ZERO, _PLUS_ONE, _MINUS_ONE = np.float32(0), np.float32(1), np.float32(-1)
carray: Any = numba.carray  # pyright: ignore[reportPrivateImportUsage]

# IEEE division: Python's raises on zero, and that branch would keep the loop from vectorising.
jit: Any = functools.partial(numba.njit, error_model="numpy", nogil=True)


@jit
def _sqrt(x):
    return np.sqrt(x)


@jit
def _div(a, b):
    return a / b


@jit
def _maximum(a, b):
    return a if a > b else (b if b >= a else a + b)


@jit
def _minimum(a, b):
    return a if a < b else (b if b <= a else a + b)


@jit
def _sign(x):
    return _PLUS_ONE if x > _ZERO else (_MINUS_ONE if x < _ZERO else x - x)


_ARITHMETIC = {
    "sqrt": _sqrt,
    "div": _div,
    "maximum": _maximum,
    "minimum": _minimum,
    "sign": _sign,
}


class Workshop:
    """Compiles the parts of one variant, each under a symbol of its own.

    Kernels read from the cache are linked by symbol, and Numba numbers symbols per process: parts
    of two variants that were compiled by two processes would be taken for one another.
    """

    def __init__(self, variant: Variant) -> None:
        self._suffix = f"{variant.name}_{source_hash()}"
        self._numbers = count()

    def compile(self, function) -> Any:
        function.__qualname__ = f"{function.__name__}_{next(self._numbers)}_{self._suffix}"
        return jit(function)

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
        """``(load, decode, encode, finish)`` where some of the states are in blocks.

        ``load`` decodes a tile of those into ``room``, from ``at`` on, where ``encode`` puts the
        new numbers, and ``finish`` encodes the tile.
        """
        if not formats:
            return (
                self.compile(lambda planes, first, n, room: None),
                self.compile(lambda planes, i, room, j: ()),
                self.compile(lambda planes, i, numbers, keys, index, room, j: None),
                self.compile(lambda planes, first, n, room: None),
            )
        (head, *tail), (key, shift) = formats, draws[0]
        room_taken = 0 if head.block == 1 else TILE * (2 + head.stochastic)
        load_rest, decode_rest, encode_rest, finish_rest = self.block_codecs(
            tail, draws[1:], at + room_taken
        )
        codec: Any = (BLOCK_CODECS if room_taken else CODECS)[head.name]
        decode_one, encode_one = codec

        def load_blocks(planes, first, n, room):
            decode_one(planes[0], first, n, room, at)
            load_rest(planes[1:], first, n, room)

        def look_up(planes, i, room, j):
            return (room[np.uintp(at) + j], *decode_rest(planes[1:], i, room, j))

        def put_aside(planes, i, numbers, keys, index, room, j):
            room[np.uintp(at) + j] = numbers[0]
            room[np.uintp(at + TILE) + j] = np.sqrt(abs(numbers[0]))
            encode_rest(planes[1:], i, numbers[1:], keys, index, room, j)

        def put_aside_with_noise(planes, i, numbers, keys, index, room, j):
            room[np.uintp(at) + j] = numbers[0]
            # Not of its magnitude: so it is the root that a rule has taken.
            room[np.uintp(at + TILE) + j] = np.sqrt(numbers[0])
            # Here, because another number may be rounded with bits of the same word.
            r = noise16(keys[key], keys[key + 1], index, shift)
            room[np.uintp(at + 2 * TILE) + j] = threshold(r)
            encode_rest(planes[1:], i, numbers[1:], keys, index, room, j)

        def encode_blocks(planes, first, n, room):
            encode_one(planes[0], first, n, room, at)
            finish_rest(planes[1:], first, n, room)

        def load(planes, first, n, room):
            load_rest(planes[1:], first, n, room)

        def decode(planes, i, room, j):
            return (decode_one(planes[0], i), *decode_rest(planes[1:], i, room, j))

        def encode(planes, i, numbers, keys, index, room, j):
            encode_one(planes[0], i, numbers[0], keys[key], keys[key + 1], index, shift)
            encode_rest(planes[1:], i, numbers[1:], keys, index, room, j)

        def finish(planes, first, n, room):
            finish_rest(planes[1:], first, n, room)

        put = put_aside_with_noise if head.stochastic else put_aside
        blocked = (load_blocks, look_up, put, encode_blocks)
        parts = blocked if room_taken else (load, decode, encode, finish)
        return tuple(self.compile(each) for each in parts)


@functools.cache
def source_hash() -> str:
    digest = hashlib.blake2b(digest_size=8)
    for folder in (Path(rules.__file__).parent, Path(__file__).parent):
        for source in sorted(folder.glob("*.py")):
            digest.update(source.read_bytes())
    return digest.hexdigest()
