"""Orthogonalisation by Newton-Schulz iterations, of one matrix or of many of one shape."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["SMALL", "orthogonalise", "orthogonalise_each"]

SMALL = 2**16
"""Elements of a matrix up to which products of many at a time take less time than one by one."""


def orthogonalise(matrix: Tensor, coefficients: Sequence[float], steps: int, eps: float) -> Tensor:
    """The nearest semi-orthogonal matrix, roughly: singular values between about 0.7 and 1.2.

    A Newton-Schulz iteration in bf16 of ``x <- a x + (b A + c A^2) x`` with ``A = x x^T``, on the
    matrix over its Frobenius norm (K. Jordan, "Muon", 2024).

    Args:
        matrix: two dimensions, floating-point.
        coefficients: ``a, b, c``.
        steps: iterations.
        eps: least norm to divide by.

    Returns:
        bf16, the shape of ``matrix``.
    """
    x, tall = _scale(matrix, eps)
    for _ in range(steps):
        x = _iterate(x, coefficients)
    return x.T if tall else x


def orthogonalise_each(
    matrices: Sequence[Tensor], coefficients: Sequence[float], steps: int, eps: float
) -> list[Tensor]:
    """:func:`orthogonalise` of each, with the same bits; small matrices share their products.

    Args:
        matrices: of one shape and device.
        coefficients: as there, like all that follows.
    """
    (rows, columns), device = matrices[0].shape, matrices[0].device
    small = 0 < matrices[0].numel() <= SMALL
    if len(matrices) == 1 or not small or not _same_bits(len(matrices), rows, columns, device):
        return [orthogonalise(each, coefficients, steps, eps) for each in matrices]
    scaled = [_scale(each, eps) for each in matrices]
    tall = scaled[0][1]
    x = _stack([each for each, _ in scaled], tall)
    for _ in range(steps):
        x = _iterate(x, coefficients)
    return [*(x.mT if tall else x)]


def _scale(matrix: Tensor, eps: float) -> tuple[Tensor, bool]:
    """A matrix over its norm, in bf16, with no more rows than columns; whether it was turned."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.bfloat16()
    x = x.T if tall else x
    return x / x.norm().clamp(min=eps), tall


def _iterate(x: Tensor, coefficients: Sequence[float]) -> Tensor:
    a, b, c = coefficients
    add = torch.addmm if x.ndim == 2 else torch.baddbmm
    gram = x @ x.mT
    polynomial = add(gram, gram, gram, beta=b, alpha=c)
    return add(x, polynomial, x, beta=a)


def _stack(matrices: Sequence[Tensor], tall: bool) -> Tensor:
    """Matrices in one tensor, with the strides of each."""
    return torch.stack([each.mT for each in matrices]).mT if tall else torch.stack([*matrices])


@functools.lru_cache(maxsize=1024)
def _same_bits(count: int, rows: int, columns: int, device: torch.device) -> bool:
    """Whether so many matrices come out of shared products with the bits of one by one.

    Which ones are together depends on how many ranks there are, and bits must not. It is tried,
    because libraries choose kernels by shapes and processors; the numbers do not matter to them.
    """
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn((count, rows, columns), generator=generator, device="cpu").to(device)
    scaled = [_scale(each, 0.0) for each in drawn]
    x = _stack([each for each, _ in scaled], rows > columns)
    coefficients = 3.4445, -4.7750, 2.0315
    one_by_one = [_iterate(each, coefficients) for each, _ in scaled]
    together = _iterate(x, coefficients)
    return all(map(torch.equal, one_by_one, together))
