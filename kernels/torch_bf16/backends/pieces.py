"""Tensors cut into pieces, each of which one turn of a kernel takes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

__all__ = ["READ_DTYPES", "cut", "places"]

READ_DTYPES = (torch.bfloat16, torch.float32)


def cut(numels: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Of each piece: its tensor, and the number of its first element there, int64 both.

    Args:
        numels: of each tensor.
        size: elements of a piece, but for the last one of a tensor.
    """
    counts = -(-numels // size)
    tensors = np.repeat(np.arange(len(numels)), counts)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    return tensors, (np.arange(len(tensors)) - first) * size


def places(tensors: Sequence[Tensor]) -> np.ndarray | None:
    """Address and number of elements of each tensor, int64 ``[n, 2]``.

    Args:
        tensors: of one dtype, on one device.

    Returns:
        None where one of them is neither bf16 nor fp32, not contiguous, or has no memory of its
        own.
    """
    plain = {*map(type, tensors)} <= {Tensor, torch.nn.Parameter}
    if (
        not plain
        or tensors[0].dtype not in READ_DTYPES
        or not all(map(Tensor.is_contiguous, tensors))
    ):
        return None
    found = np.array([*map(Tensor.data_ptr, tensors), *map(Tensor.numel, tensors)], np.int64)
    addresses, numels = found = found.reshape(2, -1)
    return None if numels[addresses == 0].any() else np.ascontiguousarray(found.T)
