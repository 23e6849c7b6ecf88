"""Tensors of other libraries' classes that wrap a tensor and show its numbers.

torchao's float8 training and TransformerEngine wrap weights in classes that say they are bf16 and
have no memory: their address is 0, and a kernel that wrote there would end the process.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

__all__ = ["PLAIN", "candidates", "inner_of", "missing_memory"]

PLAIN = (Tensor, nn.Parameter)
"""The classes of tensors that are memory themselves."""

# Asked once per class: torchao's __tensor_flatten__ waits for the device.
_names: WeakKeyDictionary[type, str] = WeakKeyDictionary()


def inner_of(tensor: Tensor) -> Tensor | None:
    """The tensor whose numbers a wrapper shows; None if this is no wrapper, or it is not clear."""
    kind = type(tensor)
    if kind not in _names:
        names = candidates(tensor)
        if names is None or len(names) != 1:
            return None
        _names[kind] = names[0]
    inner = getattr(tensor, _names[kind], None)
    return inner if _looks_like(inner, tensor) else None


def candidates(tensor: Any) -> list[str] | None:
    """The names of the inner tensors that a wrapper may show; None if it is not a wrapper.

    They have its dtype, shape, strides and device.
    """
    # A tensor with wait() is one that a collective still fills; it is waited for before a read.
    if not hasattr(tensor, "__tensor_flatten__") or hasattr(tensor, "wait"):
        return None
    names, _ = tensor.__tensor_flatten__()
    return [name for name in names if _looks_like(getattr(tensor, name), tensor)]


def missing_memory(tensor: Tensor) -> str | None:
    """Why a tensor has no address for kernels, or None if it has one; begins with "a".

    Args:
        tensor: the tensor; for a DTensor, this rank's part is checked. Sparse ones have addresses.
    """
    tensor = getattr(tensor, "_local_tensor", tensor)
    found, kind = candidates(tensor), type(tensor)
    if found is not None and len(found) == 1:
        return missing_memory(getattr(tensor, found[0]))
    called = f"a {kind.__module__}.{kind.__qualname__}"
    if found is not None:
        names, _ = tensor.__tensor_flatten__()  # pyright: ignore[reportAttributeAccessIssue]
        held = ", ".join(_describe(name, getattr(tensor, name)) for name in names)
        return (
            f"{called}, which says that it is {tensor.dtype} and holds {held}: "
            f"{len(found) or 'none'} of these have its dtype, shape and strides, and the numbers "
            "of one that has are what could be trained"
        )
    # A fake tensor, or one that a collective still fills, has no address and needs none yet.
    if tensor.is_meta or hasattr(tensor, "fake_mode") or hasattr(tensor, "wait"):
        return None
    if tensor.layout == torch.strided and tensor.numel() and not tensor.data_ptr():
        return f"{called} without memory: it was freed, or the class does not say what it holds"
    return None


def _looks_like(inner: Any, wrapper: Tensor) -> bool:
    return (
        isinstance(inner, Tensor)
        and (inner.dtype, inner.shape, inner.device)
        == (wrapper.dtype, wrapper.shape, wrapper.device)
        and inner.layout == wrapper.layout == torch.strided
        and inner.stride() == wrapper.stride()
    )


def _describe(name: str, held: Any) -> str:
    if not isinstance(held, Tensor):
        return f"{name} ({type(held).__name__})"
    return f"{name} ({held.dtype}, shape {tuple(held.shape)})"
