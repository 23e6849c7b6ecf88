"""Global indices that are not consecutive; ``backends/bucket.py`` says how they follow.

With ``OF_EIGHT``, a run, or a row of a matrix, has at least eight elements: among eight neighbours
at most one is the first of another, so that one division serves all of them.
"""

# Device code is Triton's language, which a type checker takes for Python.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from .ieee import div

__all__ = ["matrix_at", "strided_indices", "transposed_indices"]


@triton.jit
def strided_indices(start, run, index, BLOCK: tl.constexpr, OF_EIGHT: tl.constexpr):
    """The indices of ``BLOCK`` elements in runs, of which ``index`` is that of a run's start.

    ``run`` is (elements of that run that lie before element 0, elements per run, indices from one
    run to the next). With ``OF_EIGHT``, only the lower halves.
    """
    behind, width, pitch = run
    if OF_EIGHT:
        elements = behind + start + 8 * tl.arange(0, BLOCK // 8)
        runs = elements // width
        place = elements - runs * width
        near = index.to(tl.uint32) + runs.to(tl.uint32) * pitch.to(tl.uint32)
        near += place.to(tl.uint32)
        beyond = near + (pitch - width).to(tl.uint32)
        each = tl.arange(0, 8)[None, :]
        eights = tl.where(place[:, None] + each < width, near[:, None], beyond[:, None])
        return (eights + each.to(tl.uint32)).reshape(BLOCK)
    else:
        elements = behind + start + tl.arange(0, BLOCK)
        runs = elements // width
        return index + runs.to(tl.int64) * pitch + (elements - runs * width)


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
def transposed_indices(start, shape, BLOCK: tl.constexpr, OF_EIGHT: tl.constexpr):
    """The lower halves of the indices of ``BLOCK`` elements, from the place of ``shape`` on."""
    first, row, column, rows, columns, of_rows, of_columns = shape
    if OF_EIGHT:
        column += start + 8 * tl.arange(0, BLOCK // 8)
    else:
        column += start + tl.arange(0, BLOCK)
    down = _divided(column, of_columns)
    column -= down * columns
    row += down
    matrices = _divided(row, of_rows)
    row -= matrices * rows
    first += (matrices * (rows * columns)).to(tl.uint32)
    index = first + (column * rows + row).to(tl.uint32)
    if OF_EIGHT:
        # What follows a matrix's last row is the next matrix.
        below = tl.where(row + 1 < rows, row + 1, rows * columns)
        beyond = first + ((column - columns) * rows + below).to(tl.uint32)
        each = tl.arange(0, 8)[None, :]
        index = tl.where((column[:, None] + each) < columns, index[:, None], beyond[:, None])
        index = (index + (each * rows).to(tl.uint32)).reshape(BLOCK)
    return index
