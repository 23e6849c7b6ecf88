"""The parameters of an optimizer, of a module, and one of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

__all__ = ["own_parameter", "parameters_in", "parameters_of"]


def parameters_of(optimizer: Any) -> list[Tensor]:
    """The parameters of all groups of an optimizer, in their order.

    Args:
        optimizer: an optimizer of any class; what stands in for one and has no groups has none,
            nor has None, in place of one that is gone.

    Example:
        >>> len(parameters_of(torch.optim.SGD(torch.nn.Linear(4, 4).parameters())))
        2
    """
    return [p for group in getattr(optimizer, "param_groups", ()) for p in group["params"]]


def parameters_in(module: nn.Module) -> Iterator[nn.Parameter]:
    """All parameters of a module, as a cast sees them, whatever its class lists itself.

    The ``parameters`` of some classes leave out what another optimizer trains, such as the
    discriminator of a tokenizer.

    Example:
        >>> len([*parameters_in(torch.nn.Linear(4, 4))])
        2
    """
    return nn.Module.parameters(module)


def own_parameter(module: nn.Module, name: str) -> Tensor | None:
    """A parameter of a module itself, by its name there; None if there is none.

    No property is run, as parametrizations are. The dictionary of a scripted module has no ``get``.
    """
    return dict(module._parameters.items()).get(name)
