"""Which elements a kernel updates at once, and the global indices that key their noise.

``reach(runs, tensor, start, stop)`` returns a number that stands for element ``start`` of a tensor
and how many elements, not beyond ``stop``, make a slice with it. The number is the global index
or, in transposed order, the place in memory; a slice lies in one block of 2**32 of either.
``shape(runs, tensor, number)`` returns what the indices of the slice depend on besides.
"""

# Numba compiles what a type checker takes for Python.
# pyright: reportCallIssue=false

from __future__ import annotations

import numpy as np

from .bits import add32, inlined, low32, mul32, no_values, sub32

__all__ = ["PARTS", "transposed_indices"]

_ONE, _HALF, _UNIT = np.uint32(1), np.float32(0.5), np.float32(1)


@inlined
def _reach_of_run(runs, tensor, start, stop):
    offset, width, pitch = runs[tensor, 0], runs[tensor, 1], runs[tensor, 2]
    run = start // width
    index = offset + run * pitch + start - run * width
    # Consecutive indices in one block of 2**17, as `word_pair` needs.
    n = min(stop, (run + 1) * width) - start
    return index, min(n, 131072 - (index & 131071))


@inlined
def _reach_in_memory(runs, tensor, start, stop):
    return runs[tensor, 0] + start, stop - start


@inlined
def _matrix(runs, tensor, number):
    """(index of a matrix's first element, row, column, rows, columns, 1 / rows, 1 / columns)."""
    columns, rows = runs[tensor, 1], runs[tensor, 2]
    row = number // columns
    matrix = row // rows
    return (
        low32(matrix * rows * columns),
        low32(row - matrix * rows),
        low32(number - row * columns),
        low32(rows),
        low32(columns),
        _UNIT / np.float32(rows),
        _UNIT / np.float32(columns),
    )


@inlined
def _divided(x, inverse):
    """``x // n`` for the ``inverse`` of ``n``: exact below 2**20, and vectorised, unlike that."""
    return np.uint32(np.int32((np.float32(np.int32(x)) + _HALF) * inverse))


@inlined
def transposed_indices(number, start, shape):
    """The indices of elements ``number`` and ``number + 1`` of a slice that begins at ``start``."""
    first, row, column, rows, columns, of_rows, of_columns = shape
    column = add32(column, sub32(number, start))
    down = _divided(column, of_columns)
    column = sub32(column, mul32(down, columns))
    row = add32(row, down)
    matrices = _divided(row, of_rows)
    row = sub32(row, mul32(matrices, rows))
    first = add32(first, mul32(matrices, mul32(rows, columns)))
    index = add32(first, add32(mul32(column, rows), row))
    # The next element is in the next column, or the first one of the next row, or matrix.
    last = sub32(columns, _ONE)
    below = sub32(add32(index, _ONE), mul32(last, rows))
    following = below if add32(row, _ONE) != rows else add32(index, _ONE)
    return index, add32(index, rows) if column != last else following


PARTS = {
    # A tensor that is whole is one run.
    "consecutive": (_reach_of_run, no_values),
    "transposed": (_reach_in_memory, _matrix),
}
"""``reach`` and ``shape`` for indices in order, in one run or several, and for transposed ones."""
