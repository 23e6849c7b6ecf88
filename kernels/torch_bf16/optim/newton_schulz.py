"""Newton-Schulz iterations, which orthogonalise one matrix, or many of one shape."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["SMALL", "orthogonalise", "orthogonalise_each"]

SMALL = 2**16
"""Elements of the largest matrix for which batched products are faster than single ones."""


def orthogonalise(matrix: Tensor, coefficients: Sequence[float], steps: int, eps: float) -> Tensor:
    """The nearest semi-orthogonal matrix, roughly: singular values between about 0.7 and 1.2.

    A Newton-Schulz iteration in bf16 of ``x <- a x + (b A + c A^2) x`` with ``A = x x^T``, on the
    matrix over its Frobenius norm (K. Jordan, "Muon", 2024).

    Args:
        matrix: two dimensions, floating-point.
        coefficients: ``a, b, c``.
        steps: iterations.
        eps: lower bound of the norm to divide by.

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
    """:func:`orthogonalise` each matrix, to the same bits, with batched products if they are small.

    An autocast around the step has no effect, in which products would have other bits.

    Args:
        matrices: matrices of one shape on one device.
        coefficients: as for :func:`orthogonalise`, like the other arguments.
    """
    with torch.autocast(matrices[0].device.type, enabled=False):
        return _orthogonalise_each(matrices, coefficients, steps, eps)


def _orthogonalise_each(
    matrices: Sequence[Tensor], coefficients: Sequence[float], steps: int, eps: float
) -> list[Tensor]:
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
    """Divide a matrix by its norm, in bf16, and transpose it if it has more rows than columns.

    Returns:
        The matrix, and whether it was transposed.
    """
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
    """Stack matrices into one tensor, and keep their strides."""
    return torch.stack([each.mT for each in matrices]).mT if tall else torch.stack([*matrices])


@functools.lru_cache(maxsize=1024)
def _same_bits(count: int, rows: int, columns: int, device: torch.device) -> bool:
    """Try whether batched products of this many matrices have the bits of single products.

    Which matrices are batched depends on the number of ranks, on which no bit may depend. Libraries
    choose kernels by shape and processor but not by values, so that one trial is enough.
    """
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn((count, rows, columns), generator=generator, device="cpu").to(device)
    scaled = [_scale(each, 0.0) for each in drawn]
    x = _stack([each for each, _ in scaled], rows > columns)
    coefficients = 3.4445, -4.7750, 2.0315
    one_by_one = [_iterate(each, coefficients) for each, _ in scaled]
    together = _iterate(x, coefficients)
    return all(map(torch.equal, one_by_one, together))
