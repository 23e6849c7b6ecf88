"""Averages of other libraries, which ``torch._foreach_lerp_`` moves towards a cast model.

timm's ``ModelEmaV3`` and ultralytics' ``ModelEMA`` call it, on copies of the weights. It takes one
dtype only, so an fp32 average could not follow bf16 weights; a bf16 one hardly moves.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_bf16.sharding import local
from torch_bf16.torch_patches import is_enabled

from .cast_modules import trained_weights

__all__ = ["forget_warning", "is_named", "restore", "watch_lerps"]

_torch: Any = torch  # whose private names a type checker does not know

_original: Any = _torch._foreach_lerp_

_named: set[int] = set()
"""Addresses of averages that a warning has named."""


def watch_lerps() -> None:
    """Let ``torch._foreach_lerp_`` move each tensor in its own dtype, and warn of bf16 averages.

    For the whole process, until :func:`restore`.
    """
    if _torch._foreach_lerp_ is _original and is_enabled("foreach_lerp"):
        _torch._foreach_lerp_ = functools.wraps(_original)(_foreach_lerp_)


def restore() -> None:
    """Restore ``torch._foreach_lerp_``, until the next :func:`cast_model`."""
    _torch._foreach_lerp_ = _original
    _named.clear()


def forget_warning(average: Tensor) -> None:
    """Do not warn about an average that another warning has named."""
    _named.add(local(average).data_ptr())


def is_named(average: Tensor) -> bool:
    """Whether a warning has named an average, or must not."""
    return local(average).data_ptr() in _named


def _foreach_lerp_(self: Any, tensors1: Any, *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling() or len(self) != len(tensors1):
        return _original(self, tensors1, *args, **kwargs)
    pairs = list(zip(self, tensors1, strict=True))
    if any(average.dtype != value.dtype for average, value in pairs):
        tensors1 = [value.to(average.dtype) for average, value in pairs]
    weight = kwargs.get("weight", args[0] if args else None)
    if isinstance(weight, float) and 0 < weight < 1:
        _warn_of_bf16(pairs)
    return _original(self, tensors1, *args, **kwargs)


def _warn_of_bf16(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    narrow = [
        (local(average).data_ptr(), local(value).data_ptr())
        for average, value in pairs
        if average.dtype == value.dtype == torch.bfloat16
    ]
    if not narrow or not _named.isdisjoint(average for average, _ in narrow):
        return
    # By address, because values from a state dict are views of the weights.
    names = {local(p).data_ptr(): name for name, p in trained_weights()}
    for _, value in narrow:
        if name := names.get(value):
            _named.update(average for average, _ in narrow)
            warnings.warn(
                f"an average of {name!r} is bfloat16, as in the cast model that it copied, and "
                "torch._foreach_lerp_ rounds it to nearest: an update that moves it by less than "
                "half a bf16 spacing (0.2 to 0.4 %) is lost, at decays above 0.99 most of them. "
                "What works: make the average before the model is cast, or call float() on its "
                "module once it is made; it then follows the bf16 weights in fp32",
                stacklevel=3,
            )
            return
