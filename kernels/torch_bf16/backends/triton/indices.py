"""Global indices of elements in transposed order; ``backends/bucket.py`` says what these are."""

# Device code is Triton's language, which a type checker takes for Python.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from .ieee import div

__all__ = ["matrix_at", "transposed_indices"]


@triton.jit
def matrix_at(place, columns, rows):
    """What :func:`transposed_indices` takes for elements from a place in memory on.

    Returns the lower half of the index of the first element of the matrix there, the row and the
    column of the place, rows and columns, and one divided by each.
    """
    row, one = place // columns, tl.full([], 1.0, tl.float32)
    matrix = row // rows
    return (
        (matrix * rows * columns).to(tl.uint32),
        (row - matrix * rows).to(tl.int32),
        (place - row * columns).to(tl.int32),
        rows.to(tl.int32),
        columns.to(tl.int32),
        div(one, rows.to(tl.float32), False),
        div(one, columns.to(tl.float32), False),
    )


@triton.jit
def _divided(x, inverse):
    # x // n for the inverse of n: exact below 2**20, in fewer instructions than a division.
    return ((x.to(tl.float32) + 0.5) * inverse).to(tl.int32)


@triton.jit
def transposed_indices(elements, shape):
    """The lower halves of the indices of elements that are counted from the place of ``shape``."""
    first, row, column, rows, columns, of_rows, of_columns = shape
    column += elements
    down = _divided(column, of_columns)
    column -= down * columns
    row += down
    matrices = _divided(row, of_rows)
    row -= matrices * rows
    return first + (matrices * (rows * columns) + column * rows + row).to(tl.uint32)
