"""Generating the parts of a kernel that read and write the numbers of a variant.

Each part is Python source in which all numbers are written out: Numba takes tens of milliseconds
to compile a function, however small, so with one for each number a kernel took a third longer. A
part treats two neighbours, of which the first has an even global index. ``planes`` has a tuple of
pointers for each number and ``i`` is the first element; for formats in blocks, ``j`` is the number
of the pair in its tile, and ``scratch`` the memory that :mod:`.blocks` describes.

For a gradient and a weight in bf16 the result of :func:`reads` is ::

    def read(planes, i, scratch, j):
        a0_0, b0_0 = loads0_0(planes[0][0], i)
        a1_0, b1_0 = loads1_0(planes[1][0], i)
        return (decode0((a0_0, )), decode1((a1_0, )), ), (decode0((b0_0, )), decode1((b1_0, )), )
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from torch_bf16.formats import Format

from .bits import inlined, no_effect, no_values_of_two
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
from .compiler import Compiler, tuple_of
from .indices import transposed_indices
from .llvm_hints import SCRATCH
from .loads_stores import LOADS, STORES
from .planes import ELEMENTS

__all__ = ["blocks", "reads", "scratch_offsets", "words", "writes"]

_NO_DRAW = "uint32(0)"
_DRAWS = {0: lower_draw, 16: upper_draw}


def scratch_offsets(formats):
    """Where in ``scratch`` the section of each number starts."""
    sizes = [size_in_scratch(each) for each in formats]
    if sum(sizes) > SCRATCH:
        raise NotImplementedError(
            f"a rule's numbers in blocks take {sum(sizes)} floats of scratch, but there are only "
            f"{SCRATCH}; keep one of its states in another format"
        )
    return [0, *accumulate(sizes)][:-1]


def words(compiler: Compiler, n: int, transposed: bool):
    """``words(keys, index, near, shape)``: the random words of two elements as tuples.

    There are ``n`` words for an element, and two keys for each word. Unless ``transposed``,
    ``index`` and ``near`` are those of :func:`.codecs.word_pair`; otherwise these and ``shape`` are
    those of :func:`.indices.transposed_indices`.
    """
    if not n:
        return no_values_of_two
    names: dict[str, Any] = {"word_pair": word_pair}
    lines = [
        f"a{k}, b{k} = word_pair(keys[{2 * k}], keys[{2 * k + 1}], index, near)" for k in range(n)
    ]
    if transposed:
        names = {"word": word, "indices": transposed_indices}
        lines = ["a, b = indices(index, near, shape)"]
        for k in range(n):
            pair = (f"word(keys[{2 * k}], keys[{2 * k + 1}], {each})" for each in "ab")
            lines.append(f"a{k}, b{k} = {', '.join(pair)}")
    first, second = tuple_of(f"a{k}" for k in range(n)), tuple_of(f"b{k}" for k in range(n))
    lines.append(f"return {first}, {second}")
    return compiler.write("words(keys, index, near, shape)", lines, names)


def reads(compiler: Compiler, formats: Sequence[Format], offsets):
    """``read(planes, i, scratch, j)``: the fp32 numbers of two elements as tuples."""
    names: dict[str, Any] = {}
    lines, firsts, seconds = [], [], []
    for k, (each, at) in enumerate(zip(formats, offsets, strict=True)):
        in_blocks = each.block > 1
        names[f"decode{k}"] = (BLOCK_CODECS if in_blocks else CODECS)[each.name][0]
        if in_blocks:
            names[f"loads{k}"] = LOADS[ELEMENTS[each.planes[0].dtype]]
            lines += [
                f"a{k}, b{k} = loads{k}(planes[{k}][0], i)",
                f"scale{k} = scratch[uintp({at + SCALES}) + j]",
            ]
            firsts.append(f"decode{k}(a{k}, scale{k})")
            seconds.append(f"decode{k}(b{k}, scale{k})")
            continue
        planes = [f"{k}_{p}" for p in range(len(each.planes))]
        for p, (plane, of) in enumerate(zip(planes, each.planes, strict=True)):
            names[f"loads{plane}"] = LOADS[ELEMENTS[of.dtype]]
            lines.append(f"a{plane}, b{plane} = loads{plane}(planes[{k}][{p}], i)")
        firsts.append(f"decode{k}({tuple_of(f'a{plane}' for plane in planes)})")
        seconds.append(f"decode{k}({tuple_of(f'b{plane}' for plane in planes)})")
    lines.append(f"return {tuple_of(firsts)}, {tuple_of(seconds)}")
    return compiler.write("read(planes, i, scratch, j)", lines, names)


def writes(compiler: Compiler, formats: Sequence[Format], offsets, drawn):
    """``write(planes, i, first, second, words, scratch, j)``, of the numbers of two elements.

    ``drawn`` has for each format the number of its random word and the shift in it, or None.
    """
    names: dict[str, Any] = {"put": _put, "put_with_noise": _put_with_noise}
    lines = []
    for k, (each, at, draw) in enumerate(zip(formats, offsets, drawn, strict=True)):
        if draw is None:
            draws = [_NO_DRAW] * 2
        else:
            names[f"draw{k}"] = _DRAWS[draw[1]]
            draws = [f"draw{k}(words[{one}][{draw[0]}])" for one in range(2)]
        if each.block > 1:
            put = "put_with_noise" if each.stochastic else "put"
            lines += [
                f"{put}(scratch, uintp({at}) + j, first[{k}], {draws[0]})",
                f"{put}(scratch, uintp({at + ODD}) + j, second[{k}], {draws[1]})",
            ]
            continue
        names[f"encode{k}"] = CODECS[each.name][1]
        lines += [
            f"a{k} = encode{k}(first[{k}], {draws[0]})",
            f"b{k} = encode{k}(second[{k}], {draws[1]})",
        ]
        for p, plane in enumerate(each.planes):
            names[f"stores{k}_{p}"] = STORES[ELEMENTS[plane.dtype]]
            lines.append(f"stores{k}_{p}(planes[{k}][{p}], i, a{k}[{p}], b{k}[{p}])")
    return compiler.write("write(planes, i, first, second, words, scratch, j)", lines, names)


@inlined
def _put(scratch, place, x, draw):
    scratch[place] = x
    scratch[place + np.uintp(ROOTS)] = np.sqrt(abs(x))


@inlined
def _put_with_noise(scratch, place, x, draw):
    scratch[place] = x
    # No magnitude: this is the root that the rule takes, too, so it is computed once.
    scratch[place + np.uintp(ROOTS)] = np.sqrt(x)
    # Now, while the word is at hand: another number may be rounded with other bits of it.
    scratch[place + np.uintp(NOISE)] = threshold(draw)


def blocks(compiler: Compiler, formats: Sequence[Format], offsets):
    """``load(planes, first, n, scratch)``, ``scale`` of the same arguments, and ``encode``.

    Before the update of the ``n`` elements from ``first`` on, ``load`` copies their scales into
    scratch; after it, ``scale`` computes new scales, and ``encode(planes, i, scratch, j)`` encodes
    a pair.
    """
    names: dict[str, Any] = {"spread": spread, "new_scales": new_scales}
    load, scale, encode = [], [], []
    for k, (each, at) in enumerate(zip(formats, offsets, strict=True)):
        if each.block == 1:
            continue
        _, names[f"encode{k}"], names[f"top{k}"] = BLOCK_CODECS[each.name]
        names[f"stores{k}"] = STORES[ELEMENTS[each.planes[0].dtype]]
        load.append(f"spread(planes[{k}], first, n, scratch, {at})")
        scale.append(f"new_scales(planes[{k}], first, n, scratch, {at}, top{k}, {each.stochastic})")
        encode += [
            f"even{k}, odd{k} = uintp({at}) + j, uintp({at + ODD}) + j",
            f"a{k} = encode{k}(scratch, even{k}, even{k})",
            f"b{k} = encode{k}(scratch, odd{k}, even{k})",
            f"stores{k}(planes[{k}][0], i, a{k}, b{k})",
        ]
    if not load:
        return no_effect, no_effect, no_effect
    return (
        compiler.write("load(planes, first, n, scratch)", load, names),
        compiler.write("scale(planes, first, n, scratch)", scale, names),
        compiler.write("encode(planes, i, scratch, j)", encode, names),
    )
