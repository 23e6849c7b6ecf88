"""Sums of squares, one launch for all tensors of a list.

A program sums a piece of one tensor in fp32, in an order that is fixed when the kernel is compiled,
and writes fp64. Squares of numbers near the ends of fp32's range are outside it: a piece whose
largest number is that large or small is read a second time, scaled by a power of two.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_bf16.backends.pieces import addresses_and_sizes, cut

from .launcher import launcher
from .tables import on, upload

__all__ = ["OPTIONS", "squares", "squares_constants", "squares_of_pieces"]

# Elements per turn of a program: sixteen for each of 128 threads.
BLOCK = 2048
# Elements per program: 2^16 squares below 2^108 are in fp32's range.
PIECE = 32 * BLOCK

OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}
"""How the kernel is compiled, for every device."""


@triton.jit
def _block(address, start, n, scale, SIZE: tl.constexpr, BLOCK: tl.constexpr, FULL: tl.constexpr):
    elements = start + tl.arange(0, BLOCK)
    if SIZE == 4:
        pointer = address.to(tl.pointer_type(tl.float32))
    else:
        pointer = address.to(tl.pointer_type(tl.uint16))
    if FULL:
        # After the cast: a hint on the integer is lost, and accesses are as narrow as an element.
        plane = tl.load(tl.multiple_of(pointer, 16) + elements)
    else:
        plane = tl.load(pointer + elements, mask=elements < n, other=0)
    if SIZE == 2:
        plane = (plane.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return plane * scale


@triton.jit
def _piece(address, n, scale, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Scale a piece; return the sum of the squares and the largest magnitude."""
    total = tl.zeros((BLOCK,), tl.float32)
    largest = tl.zeros((BLOCK,), tl.float32)
    n_whole = tl.where((address & 15) == 0, n // BLOCK * BLOCK, 0)
    # `while`, because Triton 3.6's interpreter takes no `range` whose end is a tensor.
    start = 0
    while start < n_whole:
        x = _block(address, start, n, scale, SIZE, BLOCK, True)
        total += x * x
        largest = tl.maximum(largest, tl.abs(x))
        start += BLOCK
    while start < n:
        x = _block(address, start, n, scale, SIZE, BLOCK, False)
        total += x * x
        largest = tl.maximum(largest, tl.abs(x))
        start += BLOCK
    return tl.sum(total), tl.max(largest)


@triton.jit(do_not_specialize=["pieces_ptr", "tensors_ptr", "sums_ptr"])
def squares_of_pieces(
    pieces_ptr,
    tensors_ptr,
    sums_ptr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Sum the squares of each piece.

    Reads: ``pieces``, int32 ``[n, 2]``, the tensor of each piece and the piece's number in it;
        ``tensors``, int64, address and number of elements of each tensor.
    Writes: ``sums``, fp64 ``[n]``.
    Launch: one program per piece.
    """
    piece = tl.program_id(0).to(tl.int64)
    row = tensors_ptr + 2 * tl.load(pieces_ptr + 2 * piece).to(tl.int64)
    start = tl.load(pieces_ptr + 2 * piece + 1).to(tl.int64) * PIECE
    address = tl.load(row) + start * SIZE
    n = tl.minimum(tl.load(row + 1) - start, PIECE).to(tl.int32)
    total, largest = _piece(address, n, 1.0, SIZE, BLOCK)
    found = total.to(tl.float64)
    # 2^54 and 2^-44; an infinity stays one, whatever the scale.
    large = (largest >= 1.8014398509481984e16) & (largest <= 3.4028234663852886e38)
    if large:
        total, largest = _piece(address, n, 8.271806125530277e-25, SIZE, BLOCK)  # 2^-80
        found = total.to(tl.float64) * 1.461501637330903e48  # 2^160
    elif (largest > 0.0) & (largest < 5.684341886080802e-14):
        total, largest = _piece(address, n, 7.922816251426434e28, SIZE, BLOCK)  # 2^96
        found = total.to(tl.float64) * 1.5930919111324523e-58  # 2^-192
    tl.store(sums_ptr + piece, found)


def squares(tensors: Sequence[Tensor]) -> Tensor | None:
    """See :meth:`torch_bf16.backends.Backend.squares`. Does not wait for the device."""
    table = addresses_and_sizes(tensors)
    if table is None:
        return None
    dtype, device = tensors[0].dtype, tensors[0].device
    with on(device):
        pieces, launch = _of_sizes(tuple(table[:, 1].tolist()), dtype, device, _stream(device))
        sums = torch.empty(len(pieces), dtype=torch.float64, device=device)
        if len(pieces):
            launch(pieces, upload(table, device), sums)
    return sums.sum()


def squares_constants(dtype: torch.dtype) -> dict[str, Any]:
    """The compile-time arguments of ``squares_of_pieces``, those in capitals."""
    return {"SIZE": dtype.itemsize, "BLOCK": BLOCK, "PIECE": PIECE}


# Only addresses change from one clipping to the next. With released gradients there are as many
# lists of tensors as parameters, but only a few different sizes.
@functools.lru_cache(maxsize=64)
def _of_sizes(
    numels: tuple[int, ...], dtype: torch.dtype, device: torch.device, stream: int
) -> tuple[Tensor, Callable[..., None]]:
    """The table of pieces for tensors of these sizes, on the device, and the kernel's launcher.

    One table per stream, so that no stream reads it before it is copied, or after it is freed.
    """
    tensors, starts = cut(np.array(numels, np.int64), PIECE)
    pieces = np.stack([tensors, starts // PIECE], axis=1).astype(np.int32)
    tables = torch.int32, torch.int64, torch.float64
    kernel, programs = squares_of_pieces, max(1, len(pieces))
    launch = launcher(kernel, tables, programs, squares_constants(dtype), OPTIONS, device)
    return upload(pieces, device), launch


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
