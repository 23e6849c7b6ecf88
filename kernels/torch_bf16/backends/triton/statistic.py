"""Sums of a rule's statistic: one launch over all chunks of a bucket, before that of the step.

``launch.py`` describes the tables; columns ``TOTALS`` and ``TOTALS + 1`` of ``tensors`` have the
address of each tensor's sum and the number of elements of the whole tensor. Programs add integers
to the sums, so their order does not matter.
"""

# Device code is Triton's language, which a type checker takes for Python.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import functools
from typing import Any

import triton
import triton.language as tl

from torch_bf16.backends.bucket import Variant
from torch_bf16.rules import LARGEST_STATISTIC, STATISTIC_UNIT

from .arithmetic import lift_statistic
from .chunks import find_chunk, load_numbers
from .ieee import together
from .kernel import constants

__all__ = ["measure", "measure_constants"]

UNIT, LARGEST = tl.constexpr(STATISTIC_UNIT), tl.constexpr(LARGEST_STATISTIC)


@triton.jit
def _block(
    addresses,
    scalars,
    start,
    stop,
    STATISTIC: tl.constexpr,
    FORMATS: tl.constexpr,
    SIZES: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
    FULL: tl.constexpr,
):
    """Sum the statistic over a block of a chunk, int64; arguments as for the step's ``_block``."""
    numbers = load_numbers(addresses, start, stop, FORMATS, SIZES, SHARED, BLOCK, FULL)
    found = STATISTIC(numbers[1], numbers[0], numbers[2:], scalars)
    # A NaN is not below LARGEST, so it becomes LARGEST.
    bounded = tl.where(found < LARGEST, found, LARGEST)
    units = (bounded * UNIT).to(tl.int32).to(tl.int64)
    if not FULL:
        units = tl.where(start + tl.arange(0, BLOCK) < stop, units, 0)
    return tl.sum(units)


@triton.jit(do_not_specialize=["chunks_ptr", "tensors_ptr", "gradients_ptr", "table_ptr"])
def measure(
    chunks_ptr,
    tensors_ptr,
    gradients_ptr,
    table_ptr,
    STATISTIC: tl.constexpr,
    FORMATS: tl.constexpr,
    SIZES: tl.constexpr,
    SHARED: tl.constexpr,
    DRAWS: tl.constexpr,
    N_SCALARS: tl.constexpr,
    N_COLUMNS: tl.constexpr,
    TOTALS: tl.constexpr,
    BLOCK: tl.constexpr,
    TAIL: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Add the statistic of every chunk of a bucket to its tensor's sum.

    Reads: the tables, and each plane of each number that the statistic depends on, once.
    Writes: an atomic addition to the tensor's sum, int64.
    Numerics: fp32, nothing fused; each element is rounded down to a whole number of units.
    Launch: one program per chunk, in one dimension; no number among the arguments.
    """
    row, _, scalars, _, addresses, address_bits, n_elements = find_chunk(
        chunks_ptr, tensors_ptr, gradients_ptr, table_ptr, SIZES, SHARED, DRAWS, N_SCALARS,
        N_COLUMNS, CHUNK,
    )  # fmt: skip
    n_whole = tl.where((address_bits & 15) == 0, n_elements // BLOCK, 0)
    total = tl.full((), 0, tl.int64)
    # `while`, because Triton 3.6's interpreter takes no `range` whose end is a tensor.
    turn = 0
    while turn < n_whole:
        total += _block(
            addresses, scalars, turn * BLOCK, n_elements, STATISTIC, FORMATS, SIZES, SHARED,
            BLOCK, True,
        )  # fmt: skip
        turn += 1
    start = n_whole * BLOCK
    while start < n_elements:
        total += _block(
            addresses, scalars, start, n_elements, STATISTIC, FORMATS, SIZES, SHARED, TAIL, False
        )
        start += TAIL
    if n_elements > 0:
        sum_ptr = tl.load(row + TOTALS).to(tl.pointer_type(tl.int64))
        tl.atomic_add(sum_ptr, total, sem="relaxed")


@functools.cache
def measure_constants(variant: Variant, n_scalars: int, architecture: int | str) -> dict[str, Any]:
    """The compile-time arguments of ``measure``, those in capitals.

    ``n_scalars`` is the number that the statistic takes; the other arguments are as for the step.
    """
    of_step = constants(variant, n_scalars + 1, architecture)
    shared = "FORMATS", "SIZES", "SHARED", "DRAWS", "N_SCALARS", "N_COLUMNS", "TOTALS"
    chosen = {name: of_step[name] for name in (*shared, "BLOCK", "TAIL", "CHUNK")}
    return {"STATISTIC": lift_statistic(variant.rule, together(architecture)), **chosen}
