"""Averages of other libraries, which ``lerp_`` moves towards the weights of a cast model.

timm's ``ModelEmaV3`` and ultralytics' ``ModelEMA`` call ``torch._foreach_lerp_`` on copies of the
weights, ema-pytorch's ``EMA`` calls ``Tensor.lerp_`` on one after the other. Both take one dtype
only, so an fp32 average could not follow bf16 weights; a bf16 one hardly moves.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torch_bf16.sharding import local
from torch_bf16.torch_patches import Replacement, at_restore

from .cast_modules import bf16_weights, trained_weights

__all__ = ["forget_warning", "has_address", "is_named", "watch_lerps"]

_functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]

_named: set[int] = set()
"""Addresses of averages that a warning has named."""

# A bf16 tensor may be anything, such as a moment that AdamW moves; after so many lookups, which go
# through all weights of cast models, nothing is looked up any more.
_LOOKUPS = 100
_lookups = _LOOKUPS
# As of the latest lookup, by address: the trained bf16 weights, and all those of cast models.
_names: dict[int, str] = {}
_inside: set[int] = set()
# Averages of these that are moved one by one; the warning has named the first.
_followed: set[int] = set()


def watch_lerps() -> None:
    """Let both functions move each tensor in its own dtype, and warn of bf16 averages.

    For the whole process.
    """
    _forget_lookups()
    _FOREACH_LERP.apply()
    _TENSOR_LERP.apply()


def forget_warning(average: Tensor) -> None:
    """Do not warn about an average that another warning has named."""
    _named.add(local(average).data_ptr())


def is_named(average: Tensor) -> bool:
    """Whether a warning has named an average, or must not."""
    address = local(average).data_ptr()
    return address in _named or address in _followed


def _moving_many(original: Any) -> Any:
    def foreach_lerp_(self: Any, tensors1: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or len(self) != len(tensors1):
            return original(self, tensors1, *args, **kwargs)
        pairs = list(zip(self, tensors1, strict=True))
        if any(average.dtype != value.dtype for average, value in pairs):
            tensors1 = [value.to(average.dtype) for average, value in pairs]
        weight = kwargs.get("weight", args[0] if args else None)
        if _lookups > 0 and isinstance(weight, float) and 0 < weight < 1:
            _warn_of_bf16(pairs)
        return original(self, tensors1, *args, **kwargs)

    return foreach_lerp_


def _moving_one(original: Any) -> Any:
    def lerp_(self: Any, end: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not isinstance(end, Tensor):
            return original(self, end, *args, **kwargs)
        if (self.dtype, end.dtype) == (torch.float32, torch.bfloat16):
            end = end.float()
        weight = kwargs.get("weight", args[0] if args else None)
        if self.dtype == torch.bfloat16 and isinstance(weight, float) and 0 < weight < 1:
            _warn_of_one(self, end)
        return original(self, end, *args, **kwargs)

    return lerp_


_FOREACH_LERP = Replacement("foreach_lerp", torch, "_foreach_lerp_", _moving_many)
_TENSOR_LERP = Replacement("tensor_lerp", Tensor, "lerp_", _moving_one)


def _warn_of_one(average: Tensor, value: Tensor) -> None:
    """Warn of the first of the averages that are moved one by one, and note the others."""
    if not has_address(average) or not has_address(value):
        return
    address, source = average.data_ptr(), value.data_ptr()
    if address in _followed:
        return
    if source not in _names:
        found = _look_up()
        if source not in found:
            return
        _names.update(found)
        _inside.update(local(p).data_ptr() for _, _, _, p in bf16_weights())
    # A target network inside the model is watched by blended_weights, which knows what helps.
    if address in _inside:
        return
    is_first = not _followed
    _followed.add(address)
    if is_first:
        _warn(_names[source], "Tensor.lerp_", stacklevel=5)


def _forget_lookups() -> None:
    global _lookups
    _lookups = _LOOKUPS
    for each in (_names, _inside, _followed):
        each.clear()


def has_address(tensor: Tensor) -> bool:
    """Whether it is plain memory: sparse tensors and those of torch.func have no address."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
    return plain and not _functorch.is_functorch_wrapped_tensor(tensor)


def _look_up() -> dict[int, str]:
    """The names of the trained bf16 weights, by address; empty after too many lookups."""
    global _lookups
    if _lookups == 0:
        return {}
    _lookups -= 1
    # By address, because values from a state dict are views of the weights.
    return {local(p).data_ptr(): name for name, p in trained_weights()}


def _warn_of_bf16(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    narrow = [
        (local(average).data_ptr(), local(value).data_ptr())
        for average, value in pairs
        if average.dtype == value.dtype == torch.bfloat16
    ]
    if not narrow or not _named.isdisjoint(average for average, _ in narrow):
        return
    names = _look_up()
    for _, value in narrow:
        if name := names.get(value):
            _named.update(average for average, _ in narrow)
            _warn(name, "torch._foreach_lerp_", stacklevel=5)
            return


def _warn(name: str, function: str, stacklevel: int) -> None:
    warnings.warn(
        f"an average of {name!r} is bfloat16, as in the cast model that it copied, and "
        f"{function} rounds it to nearest: an update that moves it by less than half a bf16 "
        "spacing (0.2 to 0.4 %) is lost, at decays above 0.99 most of them. "
        "What works: make the average before the model is cast, or call float() on its "
        "module once it is made; it then follows the bf16 weights in fp32",
        stacklevel=stacklevel,
    )


def _forget() -> None:
    _named.clear()
    _forget_lookups()


at_restore(_forget)
