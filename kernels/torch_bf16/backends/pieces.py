"""Tensors cut into pieces of memory, as kernels that only read them take them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

__all__ = ["READ_DTYPES", "pieces"]

READ_DTYPES = (torch.bfloat16, torch.float32)


def pieces(tensors: Sequence[Tensor], size: int) -> np.ndarray | None:
    """Address and number of elements of each piece, int64 ``[n, 2]``, tensor after tensor.

    Args:
        tensors: of one dtype, on one device.
        size: elements of a piece, but for the last one of a tensor.

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
    addresses = np.array([*map(Tensor.data_ptr, tensors)], np.int64)
    numels = np.array([*map(Tensor.numel, tensors)], np.int64)
    if numels[addresses == 0].any():
        return None
    counts = -(-numels // size)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    starts = (np.arange(len(first)) - first) * size
    left = np.repeat(numels, counts) - starts
    places = np.repeat(addresses, counts) + starts * tensors[0].itemsize
    return np.stack([places, np.minimum(left, size)], axis=1)
