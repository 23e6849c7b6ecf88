"""One kernel for every variant: decode -> rule -> encode over all tensors of a bucket.

A program updates one chunk of one tensor, and reads from tables which chunk it is and where the
tensor's planes are. The kernel's arguments are four addresses and no number, so that nothing that
changes between steps makes Triton recompile.
"""

# Device code is Triton's language, which a type checker takes for Python.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from torch_bf16.backends.bucket import Variant
from torch_bf16.rules import STATISTIC_UNIT

from .arithmetic import lift_factor, lift_update
from .chunks import find_chunk, load_numbers, store_plane
from .codecs import encode, key_pair, noise_word
from .ieee import together
from .indices import matrix_at, strided_indices, transposed_indices

__all__ = ["BLOCK", "CHUNK", "constants", "options", "step"]

# Elements per turn of a program: eight for each of 128 threads, one access of 16 bytes in bf16.
BLOCK = 1024
# Elements per turn if a mask is needed: few, so that the tail takes no more registers.
TAIL = 256
UNIT = tl.constexpr(STATISTIC_UNIT)
# Elements per program: enough turns that the initial look-ups cost little.
CHUNK = 8 * BLOCK


@triton.jit
def _block(
    addresses,
    scalars,
    keys,
    next_keys,
    start,
    stop,
    index,
    run,
    bases,
    step_number,
    RULE: tl.constexpr,
    FORMATS: tl.constexpr,
    SIZES: tl.constexpr,
    SHARED: tl.constexpr,
    DRAWS: tl.constexpr,
    INDICES: tl.constexpr,
    TOGETHER: tl.constexpr,
    BLOCK: tl.constexpr,
    FULL: tl.constexpr,
):
    """Update one block of a chunk, from the chunk's element ``start`` on.

    ``addresses`` are those of the chunk's first element, ``index`` the lower half of its global
    index. ``FULL``: no element is missing, planes are aligned to 16 bytes, the index to eight
    elements, and ``keys`` hold for all elements. Otherwise elements from ``stop`` on are masked,
    and those whose index has wrapped around take ``next_keys``.

    With "strided" ``INDICES``, ``run`` and ``index`` are those of :func:`.indices.strided_indices`,
    and unless ``FULL``, keys are computed from ``bases``. With "transposed" ones, ``run`` is that
    of :func:`.indices.matrix_at`, and keys hold for all elements.

    Reads: each plane of each number, including the gradient, once.
    Writes: each plane but the gradient's, once and in place.
    Numerics: fp32, no operation fused; one rounding of each number that is stored.
    Launch: inlined into ``step``.
    """
    numbers = load_numbers(addresses, start, stop, FORMATS, SIZES, SHARED, BLOCK, FULL)
    weight, states = RULE(numbers[1], numbers[0], numbers[2:], scalars)
    results = (weight,) + states

    words = ()
    for k in tl.static_range(len(keys)):
        k0, k1 = keys[k]
        if INDICES == "transposed":
            indices = transposed_indices(start, run, BLOCK, FULL)
            word = noise_word(k0, k1, indices, False)
        elif INDICES == "strided":
            indices = strided_indices(start, run, index, BLOCK, FULL)
            if not FULL:
                t0, t1 = bases[k]
                k0, k1 = key_pair(t0, t1, step_number, (indices >> 32).to(tl.uint32))
            word = noise_word(k0, k1, indices.to(tl.uint32), False)
        elif FULL:
            eights = index + (start + 8 * tl.arange(0, BLOCK // 8)).to(tl.uint32)
            word = noise_word(k0, k1, eights, True)
        else:
            indices = index + (start + tl.arange(0, BLOCK)).to(tl.uint32)
            wrapped = indices < index
            k0 = tl.where(wrapped, next_keys[k][0], k0)
            k1 = tl.where(wrapped, next_keys[k][1], k1)
            word = noise_word(k0, k1, indices, False)
        words = words + (word,)

    for i in tl.static_range(1, len(FORMATS)):
        planes = encode(
            tl.constexpr(FORMATS[i]), results[i - 1], words,
            tl.constexpr(DRAWS[i][0]), tl.constexpr(DRAWS[i][1]), TOGETHER,
        )  # fmt: skip
        for j in tl.static_range(len(SIZES[i])):
            store_plane(
                addresses[i][j], start, stop, planes[j], tl.constexpr(SIZES[i][j]),
                tl.constexpr(SHARED[i][j]), BLOCK, FULL,
            )  # fmt: skip


@triton.jit(do_not_specialize=["chunks_ptr", "tensors_ptr", "gradients_ptr", "table_ptr"])
def step(
    chunks_ptr,
    tensors_ptr,
    gradients_ptr,
    table_ptr,
    RULE: tl.constexpr,
    FORMATS: tl.constexpr,
    SIZES: tl.constexpr,
    SHARED: tl.constexpr,
    DRAWS: tl.constexpr,
    N_WORDS: tl.constexpr,
    N_SCALARS: tl.constexpr,
    N_COLUMNS: tl.constexpr,
    INDICES: tl.constexpr,
    TOGETHER: tl.constexpr,
    TOTALS: tl.constexpr,
    FACTOR: tl.constexpr,
    BLOCK: tl.constexpr,
    TAIL: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Take one optimizer step for every chunk of a bucket; ``launch.py`` describes the tables.

    Reads: the tables, and each plane of each number once.
    Writes: each plane but the gradient's, once and in place; no two programs write one element.
    Numerics: fp32, nothing fused, IEEE division and square root: the bits of the
        oracle in ``tests/support``.
    Launch: one program per chunk, in one dimension; no number among the arguments.
    """
    row, first, scalars, step_number, addresses, address_bits, n_elements = find_chunk(
        chunks_ptr, tensors_ptr, gradients_ptr, table_ptr, SIZES, SHARED, DRAWS, N_SCALARS,
        N_COLUMNS, CHUNK,
    )  # fmt: skip
    start_index = tl.load(row + 1) + first
    if TOTALS > 0:
        # The mean over the whole tensor; see statistic.py.
        total = tl.load(tl.load(row + TOTALS).to(tl.pointer_type(tl.int64)))
        mean = total.to(tl.float64) / (tl.load(row + TOTALS + 1).to(tl.float64) * UNIT)
        scalars = scalars + (FACTOR(mean).to(tl.float32),)

    run = ()
    if INDICES != "consecutive":
        width = tl.load(row + N_COLUMNS - 2)
        pitch = tl.load(row + N_COLUMNS - 1)
    if INDICES == "transposed":
        run = matrix_at(start_index, width, pitch)
    elif INDICES == "strided":
        start_index = tl.load(row + 1) + first // width * pitch
        run = ((first % width).to(tl.int32), width.to(tl.int32), pitch)

    bases, keys, next_keys = (), (), ()
    block = (start_index >> 32).to(tl.uint32)
    for k in tl.static_range(N_WORDS):
        t0 = tl.load(row + 2 + 2 * k).to(tl.uint32)
        t1 = tl.load(row + 3 + 2 * k).to(tl.uint32)
        bases = bases + ((t0, t1),)
        keys = keys + (key_pair(t0, t1, step_number, block),)
        next_keys = next_keys + (key_pair(t0, t1, step_number, block + 1),)

    if INDICES == "strided":
        index = start_index
        aligned = (address_bits & 15) == 0
        reach = ((first % width + CHUNK) // width + 1) * pitch
        crosses = (start_index & 0xFFFFFFFF) + reach > 4294967296
    else:
        index = start_index.to(tl.uint32)
        aligned = ((address_bits & 15) | (start_index & 7)) == 0
        crosses = (start_index & 0xFFFFFFFF) + CHUNK > 4294967296
    if INDICES != "consecutive":
        aligned = aligned & (width >= 8)
    n_whole = tl.where(aligned & (not crosses), n_elements // BLOCK, 0)
    # `while`, because Triton 3.6's interpreter takes no `range` whose end is a tensor.
    turn = 0
    while turn < n_whole:
        _block(
            addresses, scalars, keys, next_keys, turn * BLOCK, n_elements, index, run, bases,
            step_number, RULE, FORMATS, SIZES, SHARED, DRAWS, INDICES, TOGETHER,
            BLOCK, True,
        )  # fmt: skip
        turn += 1
    start = n_whole * BLOCK
    while start < n_elements:
        _block(
            addresses, scalars, keys, next_keys, start, n_elements, index, run, bases,
            step_number, RULE, FORMATS, SIZES, SHARED, DRAWS, INDICES, TOGETHER,
            TAIL, False,
        )  # fmt: skip
        start += TAIL


def options(variant: Variant, n_scalars: int, architecture: int | str) -> dict[str, Any]:
    """The compiler options of ``step`` for a variant.

    Args:
        variant: the variant to compile.
        n_scalars: number of scalars that the rule's ``update`` takes.
        architecture: the device's, as Triton names it: 90 for sm_90, "gfx942"; 0 for its
            interpreter.
    """
    # Always explicit: the default changes in Triton 3.10, and a fused multiply-add rounds once.
    exact = {"enable_fp_fusion": False}
    # Eight elements of BLOCK for each of 128 threads: two warps of 64 on gfx9, else four of 32.
    if isinstance(architecture, str):
        return {**exact, "num_warps": 2 if architecture.startswith("gfx9") else 4}
    sizes = {plane.dtype.itemsize for each in variant.formats for plane in each.planes}
    in_blocks = any(each.block > 1 for each in variant.formats)
    # Eight elements of each number take registers, most if planes have two sizes; from sm_100 on
    # the assembler uses more of them.
    numbers, packs = len(variant.formats), architecture >= 100
    mixed = {2, 4} <= sizes and numbers > 2
    # With 80 registers six programs share a multiprocessor. Variants that pack bytes or hold much
    # at once would spill: with more registers five or four programs share it. With two numbers in
    # blocks a few spill nevertheless, but on an H200 five programs are 1.3 times as fast as three.
    holds_more = n_scalars > 9 or variant.rule.statistic is not None
    large = mixed or 1 in sizes or numbers + packs > 4 or holds_more
    registers = 128 if (mixed or in_blocks) and packs else 96 if large else 80
    return {**exact, "num_warps": 4, "maxnreg": registers}


@functools.cache
def constants(variant: Variant, n_scalars: int, architecture: int | str) -> dict[str, Any]:
    """The compile-time arguments of ``step``, those in capitals.

    ``FORMATS``, ``SIZES`` (bytes per element of each plane), ``SHARED`` (how many numbers share an
    element of the plane) and ``DRAWS`` (number of the noise word, shift, the first plane's column
    in the table of tensors) have an entry for the gradient, then the weights, then each state.
    """
    gradient = "fp32" if variant.gradient_dtype == torch.float32 else "bf16_nearest"
    streams = variant.streams
    column, draws = 2 + 2 * len(streams), [(0, 0, 0)]
    for each, draw in zip(variant.formats, variant.draws, strict=True):
        word = streams.index(draw.stream) if each.stochastic else 0
        draws.append((word, draw.shift, column))
        column += len(each.planes)
    totals = column if variant.rule.statistic is not None else 0
    sizes = [tuple(plane.dtype.itemsize for plane in each.planes) for each in variant.formats]
    shared = [tuple(plane.block for plane in each.planes) for each in variant.formats]
    return {
        "RULE": lift_update(variant.rule, together(architecture)),
        "FORMATS": (gradient, *(each.name for each in variant.formats)),
        "SIZES": ((variant.gradient_dtype.itemsize,), *sizes),
        "SHARED": ((1,), *shared),
        "DRAWS": tuple(draws),
        "N_WORDS": len(streams),
        "N_SCALARS": n_scalars - bool(totals),
        "N_COLUMNS": column + 2 * bool(totals) + 2 * (variant.indices != "consecutive"),
        "INDICES": variant.indices,
        "TOGETHER": together(architecture),
        "TOTALS": totals,
        "FACTOR": lift_factor(variant.rule) if totals else None,
        "BLOCK": BLOCK,
        "TAIL": TAIL,
        "CHUNK": CHUNK,
    }
