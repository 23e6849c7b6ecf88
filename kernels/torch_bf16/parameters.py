"""The parameters of an optimizer, one of a module, and those over the same memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from torch import Tensor, nn

__all__ = ["over_same_memory", "own_parameter", "parameters_of"]

_T = TypeVar("_T")


def parameters_of(optimizer: Any) -> list[Tensor]:
    """The parameters of all groups of an optimizer, in their order.

    Args:
        optimizer: an optimizer of any class; what stands in for one and has no groups has none.

    Example:
        >>> len(parameters_of(torch.optim.SGD(torch.nn.Linear(4, 4).parameters())))
        2
    """
    return [p for group in getattr(optimizer, "param_groups", ()) for p in group["params"]]


def own_parameter(module: nn.Module, name: str) -> Tensor | None:
    """A parameter of a module itself, by its name there; None if there is none.

    No property is run, as parametrizations are. The dictionary of a scripted module has no ``get``.
    """
    return dict(module._parameters.items()).get(name)


def over_same_memory(tensors: Iterable[tuple[_T, Tensor]]) -> Iterator[tuple[_T, _T]]:
    """The pairs of tensors that begin at the same address, or overlap and are contiguous.

    Others may lie between each other. The pairs are of neighbours in memory.

    Args:
        tensors: what is returned for each tensor, and the tensor.

    Example:
        >>> weight = torch.zeros(2, 3)
        >>> list(over_same_memory([("encoder", weight), ("decoder", weight.t())]))
        [('encoder', 'decoder')]
    """
    spans = []
    for key, each in tensors:
        if each.data_ptr() and each.numel():
            reach = each.nbytes if each.is_contiguous() else 1
            spans.append((str(each.device), each.data_ptr(), reach, key))
    spans.sort(key=lambda span: span[:2])
    for (device, start, reach, one), (other_device, begin, _, other) in itertools.pairwise(spans):
        if device == other_device and begin < start + reach:
            yield one, other
