"""Pickles in which a tensor is its bytes: torch's own way takes a millisecond for each tensor."""

from __future__ import annotations

import io
import pickle
from typing import Any

__all__ = ["dumps", "loads"]

loads = pickle.loads


def dumps(value: Any) -> bytes:
    """What :func:`loads` makes equal values of; views are saved as torch does."""
    file = io.BytesIO()
    _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        import torch  # not by the conftest.py that sets the number of its threads

        if type(value) is not torch.Tensor or not _is_all_of_its_memory(value):
            return NotImplemented
        memory = value.reshape(-1).view(torch.uint8).numpy().tobytes()
        return _tensor, (value.dtype, tuple(value.shape), memory)


def _is_all_of_its_memory(tensor: Any) -> bool:
    import torch

    strided = tensor.is_cpu and tensor.layout == torch.strided and tensor.is_contiguous()
    lazy = tensor.requires_grad or tensor.is_conj() or tensor.is_neg()
    return strided and not lazy and 0 < tensor.nbytes == tensor.untyped_storage().nbytes()


def _tensor(dtype: Any, shape: tuple[int, ...], memory: bytes) -> Any:
    import torch

    return torch.frombuffer(bytearray(memory), dtype=dtype).reshape(shape)
