"""Classes of tensors that say what they are and have no memory of their own."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

_KEEPING = {
    torch.ops.aten.detach.default,
    torch.ops.aten._to_copy.default,
    torch.ops.aten.clone.default,
    torch.ops.aten.copy_.default,
    torch.ops.aten.mul_.Tensor,
}


class Shown(Tensor):
    """Shows the numbers of the one tensor that it holds, as torchao's float8 weights do."""

    @staticmethod
    def __new__(cls, held: Tensor, **others: Tensor) -> Shown:
        return Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), dtype=held.dtype, device=held.device
        )

    def __init__(self, held: Tensor, **others: Tensor) -> None:
        self.held, self.others = held, tuple(others)
        for name, each in others.items():
            setattr(self, name, each)

    def __tensor_flatten__(self):
        return ["held", *self.others], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Shown(**inner)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        first = next(each for each in args if isinstance(each, Shown))
        args, kwargs = tree_map_only(Shown, lambda each: each.held, (args, kwargs or {}))
        found = function(*args, **kwargs)
        if function not in _KEEPING:
            return found
        if function._schema.is_mutable:
            return first
        return type(first)(found, **{name: getattr(first, name) for name in first.others})


class Quantised(Shown):
    """Says that it is bf16 and holds bytes and a scale, as TransformerEngine's weights do."""

    @staticmethod
    def __new__(cls, held: Tensor, scale: Tensor) -> Quantised:
        return Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), dtype=torch.bfloat16, device=held.device
        )

    def __init__(self, held: Tensor, scale: Tensor) -> None:
        super().__init__(held, scale=scale)


class Silent(Shown):
    """Does not say what it holds."""

    __tensor_flatten__ = property()
