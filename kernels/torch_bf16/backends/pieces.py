"""Tensors cut into pieces, one for each turn of a kernel."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from torch_bf16.memory import without_gaps

__all__ = ["READ_DTYPES", "addresses_and_sizes", "cut"]

READ_DTYPES = (torch.bfloat16, torch.float32)


def cut(numels: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """For each piece, the number of its tensor and of its first element there, both int64.

    Args:
        numels: number of elements of each tensor.
        size: elements per piece, except for the last piece of a tensor.
    """
    counts = -(-numels // size)
    tensors = np.repeat(np.arange(len(numels)), counts)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    return tensors, (np.arange(len(tensors)) - first) * size


def addresses_and_sizes(tensors: Sequence[Tensor]) -> np.ndarray | None:
    """Address and number of elements of each tensor, int64 ``[n, 2]``.

    Args:
        tensors: of one dtype, on one device.

    Returns:
        The array, or None if a tensor is neither bf16 nor fp32, has gaps in memory or elements in
        one place, or has no memory of its own.
    """
    plain = {*map(type, tensors)} <= {Tensor, torch.nn.Parameter}
    if not plain or tensors[0].dtype not in READ_DTYPES:
        return None
    if not all(map(without_gaps, tensors)):
        return None
    rows = np.array([*map(Tensor.data_ptr, tensors), *map(Tensor.numel, tensors)], np.int64)
    addresses, numels = rows = rows.reshape(2, -1)
    return None if numels[addresses == 0].any() else np.ascontiguousarray(rows.T)
