"""Tensors over the memory of weights, which a cast would leave with the old numbers.

A program that reads weights without a gradient may keep ``weight.data`` as a buffer, as TD-MPC2
does for the Q functions that its policy learns from. The weight moves the buffer with it, as long
as both have the same memory; a change of dtype gives the weight another. So does a frozen parameter
(``teacher.weight.data = student.weight.data``). Two trained ones are tied that way, often one as
the transpose of the other.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection
from typing import NamedTuple

from torch import Tensor, nn

from torch_bf16.errors import warn
from torch_bf16.memory import over_same_memory, span

from .watched_weight import is_plain

__all__ = ["Alias", "refuse_tied"]


def refuse_tied(model: nn.Module, changed: Collection[Tensor]) -> None:
    """Refuse trained parameters that are tied by their memory, which the cast would untie.

    Raises:
        ValueError: two of them lie over the same memory.
    """
    numbers = {id(p) for p in changed if p.requires_grad and is_plain(p)}
    named = [each for each in model.named_parameters() if id(each[1]) in numbers]
    for one, other in over_same_memory(named):
        raise ValueError(
            f"parameters {one!r} and {other!r} lie over the same memory, which ties them; the cast "
            "gives each memory of its own, and they would be trained apart. Tie them by giving "
            "both modules one parameter, one.weight = other.weight, or, transposed, compute with "
            "other.weight.t() in forward(); or, for evaluation alone, call model.requires_grad_("
            "False) first. Nothing was changed"
        )


class Alias(NamedTuple):
    """A tensor that was all of a weight's memory before the weight's dtype changed.

    Attributes:
        tensor: a buffer or a frozen parameter.
        weight: the weight that moves it.
    """

    tensor: Tensor
    weight: Tensor

    @classmethod
    def of(cls, model: nn.Module, changed: Collection[Tensor]) -> list[Alias]:
        """The buffers and frozen parameters that are to share memory with a weight again.

        Warns of one that shares only a part, such as a row in which many weights lie.
        """
        weights = sorted((span(p), id(p), p) for p in changed if is_plain(p) and p.numel() > 0)
        starts = [start for (start, _), _, _ in weights]
        numbers = {number for _, number, _ in weights}
        frozen = [
            (f"parameter {name!r}", p)
            for name, p in model.named_parameters()
            if id(p) in numbers and not p.requires_grad
        ]
        buffers = [(f"buffer {name!r}", each) for name, each in model.named_buffers()]
        shared, partly = [], []
        for name, each in (*buffers, *frozen) if weights else ():
            if not is_plain(each) or each.numel() == 0:
                continue
            start, end = span(each)
            found = weights[max(bisect_left(starts, start) - 1, 0) : bisect_left(starts, end)]
            for (_, weight_end), _, weight in found:
                if id(each) in numbers and not weight.requires_grad:
                    continue
                if _layout(weight) == _layout(each):
                    shared.append(cls(each, weight))
                    break
                if weight_end > start:
                    partly.append(name)
                    break
        if partly:
            warn(
                f"{partly[0]} ({len(partly)} in all) shares memory with weights, which the cast "
                "gives memory of their own: it keeps the numbers of before, and does not follow "
                "them any more. Make it after the model is cast, or prepare()d",
            )
        return shared

    def restore(self) -> None:
        """Let it be the weight's memory again."""
        if self.tensor.data_ptr() != self.weight.data_ptr():
            self.tensor.data = self.weight.data


def _layout(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
