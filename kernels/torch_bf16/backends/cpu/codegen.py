"""Generating the parts of a kernel that read and write the numbers of a variant.

Each part comes in two forms: for one element, and for two neighbours, of which the first has an
even global index. ``planes`` has a tuple of arrays for each number and ``i`` is the (first)
element; for formats in blocks, ``j`` is the number of the pair in its tile, and ``scratch`` the
memory that :mod:`.blocks` describes.
"""

from __future__ import annotations

from itertools import accumulate

import numpy as np

from torch_bf16.formats import Format

from .bits import inlined, no_effect, no_values, no_values_of_two
from .blocks import (
    BLOCK_CODECS,
    NOISE,
    ODD,
    ROOTS,
    SCALES,
    new_scales,
    size_in_scratch,
    spread,
    threshold,
)
from .codecs import CODECS, lower_draw, upper_draw, word, word_pair
from .compiler import Compiler
from .llvm_hints import SCRATCH
from .loads_stores import LOADS, STORES
from .planes import ELEMENTS

__all__ = ["blocks", "reads", "scratch_offsets", "words", "writes"]


def scratch_offsets(formats):
    """Where in ``scratch`` the section of each number starts."""
    sizes = [size_in_scratch(each) for each in formats]
    if sum(sizes) > SCRATCH:
        raise NotImplementedError(
            f"a rule's numbers in blocks take {sum(sizes)} floats of scratch, but there are only "
            f"{SCRATCH}; keep one of its states in another format"
        )
    return [0, *accumulate(sizes)][:-1]


def words(compiler: Compiler, n: int):
    """``one(keys, index)`` and ``two(keys, index, near)``: random words of elements as tuples.

    There are ``n`` words for an element, and two keys for each word.
    """
    if not n:
        return no_values, no_values_of_two
    key, (one_rest, two_rest) = 2 * (n - 1), words(compiler, n - 1)

    def one(keys, index):
        return (*one_rest(keys, index), word(keys[key], keys[key + 1], index))

    def two(keys, index, near):
        first, second = word_pair(keys[key], keys[key + 1], index, near)
        others = two_rest(keys, index, near)
        return (*others[0], first), (*others[1], second)

    return compiler.compile(one), compiler.compile(two)


@inlined
def _no_draw(words):
    return np.uint32(0)


def _draw(compiler, drawn):
    if drawn is None:
        return _no_draw
    number, shift = drawn
    half = {0: lower_draw, 16: upper_draw}[shift]
    return compiler.compile(lambda words: half(words[number]))


def reads(compiler: Compiler, formats: list[Format], offsets):
    """``one(planes, i)`` and ``two(planes, i, scratch, j)``: fp32 numbers as tuples."""
    if not formats:
        return no_values, no_values_of_two
    head, at = formats[0], offsets[0]
    one_rest, two_rest = reads(compiler, formats[1:], offsets[1:])
    decode = (BLOCK_CODECS if head.block > 1 else CODECS)[head.name][0]
    loads = [LOADS[ELEMENTS[plane.dtype]] for plane in head.planes]
    (load_one, load_two), (other_one, other_two) = loads[0], loads[-1]

    def one(planes, i):
        return (decode((load_one(planes[0][0], i),)), *one_rest(planes[1:], i))

    def two(planes, i, scratch, j):
        first, second = load_two(planes[0][0], i)
        rest = two_rest(planes[1:], i, scratch, j)
        return (decode((first,)), *rest[0]), (decode((second,)), *rest[1])

    def one_of_two_planes(planes, i):
        high, low = planes[0]
        return (decode((load_one(high, i), other_one(low, i))), *one_rest(planes[1:], i))

    def two_of_two_planes(planes, i, scratch, j):
        high, next_high = load_two(planes[0][0], i)
        low, next_low = other_two(planes[0][1], i)
        rest = two_rest(planes[1:], i, scratch, j)
        return (decode((high, low)), *rest[0]), (decode((next_high, next_low)), *rest[1])

    def two_of_a_block(planes, i, scratch, j):
        first, second = load_two(planes[0][0], i)
        scale = scratch[np.uintp(at + SCALES) + j]
        rest = two_rest(planes[1:], i, scratch, j)
        return (decode(first, scale), *rest[0]), (decode(second, scale), *rest[1])

    if head.block > 1:
        # There are only whole blocks, so no element is left alone.
        return no_values, compiler.compile(two_of_a_block)
    chosen = (one, two) if len(loads) == 1 else (one_of_two_planes, two_of_two_planes)
    return tuple(compiler.compile(each) for each in chosen)


def writes(compiler: Compiler, formats: list[Format], offsets, drawn):
    """``one(planes, i, numbers, words)`` and ``two(planes, i, first, second, words, scratch, j)``.

    ``drawn`` has for each format the number of its random word and the shift in it, or None.
    """
    if not formats:
        return no_effect, no_effect
    head, at = formats[0], offsets[0]
    one_rest, two_rest = writes(compiler, formats[1:], offsets[1:], drawn[1:])
    draw = _draw(compiler, drawn[0])
    if head.block > 1:
        return no_effect, _writes_to_scratch(compiler, at, draw, two_rest, head.stochastic)
    encode = CODECS[head.name][1]
    stores = [STORES[ELEMENTS[plane.dtype]] for plane in head.planes]
    (store_one, store_two), (other_one, other_two) = stores[0], stores[-1]

    def one(planes, i, numbers, words):
        store_one(planes[0][0], i, encode(numbers[0], draw(words))[0])
        one_rest(planes[1:], i, numbers[1:], words)

    def two(planes, i, first, second, words, scratch, j):
        value, next_value = encode(first[0], draw(words[0])), encode(second[0], draw(words[1]))
        store_two(planes[0][0], i, value[0], next_value[0])
        two_rest(planes[1:], i, first[1:], second[1:], words, scratch, j)

    def one_of_two_planes(planes, i, numbers, words):
        high, low = encode(numbers[0], draw(words))
        store_one(planes[0][0], i, high)
        other_one(planes[0][1], i, low)
        one_rest(planes[1:], i, numbers[1:], words)

    def two_of_two_planes(planes, i, first, second, words, scratch, j):
        high, low = encode(first[0], draw(words[0]))
        next_high, next_low = encode(second[0], draw(words[1]))
        store_two(planes[0][0], i, high, next_high)
        other_two(planes[0][1], i, low, next_low)
        two_rest(planes[1:], i, first[1:], second[1:], words, scratch, j)

    chosen = (one, two) if len(stores) == 1 else (one_of_two_planes, two_of_two_planes)
    return tuple(compiler.compile(each) for each in chosen)


def _writes_to_scratch(compiler, at, draw, two_rest, stochastic):
    def put(scratch, place, x, words):
        scratch[place] = x
        scratch[place + np.uintp(ROOTS)] = np.sqrt(abs(x))

    def put_with_noise(scratch, place, x, words):
        scratch[place] = x
        # No magnitude: this is the root that the rule takes, too, so it is computed once.
        scratch[place + np.uintp(ROOTS)] = np.sqrt(x)
        # Now, while the word is at hand: another number may be rounded with other bits of it.
        scratch[place + np.uintp(NOISE)] = threshold(draw(words))

    put = compiler.compile(put_with_noise if stochastic else put)

    def two(planes, i, first, second, words, scratch, j):
        place = np.uintp(at) + j
        put(scratch, place, first[0], words[0])
        put(scratch, place + np.uintp(ODD), second[0], words[1])
        two_rest(planes[1:], i, first[1:], second[1:], words, scratch, j)

    return compiler.compile(two)


def blocks(compiler: Compiler, formats: list[Format], offsets):
    """``load(planes, first, n, scratch)``, ``scale`` of the same arguments, and ``two``.

    Before the update of the ``n`` elements from ``first`` on, ``load`` copies their scales into
    scratch; after it, ``scale`` computes new scales, and ``two(planes, i, scratch, j)`` encodes a
    pair.
    """
    numbers = [number for number, each in enumerate(formats) if each.block > 1]
    if not numbers:
        return no_effect, no_effect, no_effect
    number = numbers[-1]
    at, stochastic = offsets[number], formats[number].stochastic
    _, encode, top = BLOCK_CODECS[formats[number].name]
    _, store_two = STORES[ELEMENTS[formats[number].planes[0].dtype]]
    load_others, scale_others, others = blocks(compiler, formats[:number], offsets)

    def load(planes, first, n, scratch):
        load_others(planes, first, n, scratch)
        spread(planes[number], first, n, scratch, at)

    def scale(planes, first, n, scratch):
        scale_others(planes, first, n, scratch)
        new_scales(planes[number], first, n, scratch, at, top, stochastic)

    def two(planes, i, scratch, j):
        others(planes, i, scratch, j)
        place = np.uintp(at) + j
        even, odd = encode(scratch, place, place), encode(scratch, place + np.uintp(ODD), place)
        store_two(planes[number][0], i, even, odd)

    return tuple(compiler.compile(each) for each in (load, scale, two))
