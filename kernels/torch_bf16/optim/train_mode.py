"""Optimizers with modes of their own, switched by a block of code or by the model's modes."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from torch_bf16.argument_checks import check_module

__all__ = ["averaged", "follow"]


@contextmanager
def averaged(*optimizers: Any) -> Iterator[None]:
    """Within the context, weights of schedule-free optimizers are the averages.

    Those in train mode are put into eval mode and back; all others are left as they are.

    Args:
        optimizers: any; those with ``train()``, ``eval()`` and a mode in their groups are switched.

    Example:
        >>> with torch_bf16.averaged(optimizer):
        ...     weights = torch_bf16.fp32_state_dict(model, optimizer)
    """
    switched = [each for each in optimizers if _trains(each)]
    try:
        for each in switched:
            each.eval()
        yield
    finally:
        for each in switched:
            each.train()


def _trains(optimizer: Any) -> bool:
    return callable(getattr(optimizer, "eval", None)) and any(
        group.get("train_mode") for group in optimizer.param_groups
    )


def follow(model: nn.Module, *optimizers: Any) -> None:
    """Let schedule-free optimizers follow ``model.train()`` and ``model.eval()``.

    From then on ``model.eval()`` makes the weights the averages and ``model.train()`` those that
    are trained, whatever wraps the model. Modes of parts of the model switch nothing. Optimizers
    without modes are left out. A copy of the model follows none.

    Args:
        model: the module as it is called, or the one that a wrapper will hold; its attribute
            ``train`` is set.
        optimizers: which follow from now on, beside those that do already.

    Raises:
        ValueError: ``model`` is no module.

    Example:
        >>> torch_bf16.follow(model, optimizer)
        >>> model = model.eval()
    """
    check_module("follow", model)
    found = [each for each in optimizers if callable(getattr(each, "eval", None))]
    known = model.__dict__.get("train")
    if not isinstance(known, _Train):
        if not found:
            return
        known = model.__dict__["train"] = _Train(model)
    known.optimizers.update(found)


class _Train:
    """``train`` of one module, as an attribute of the instance; what it followed is not copied."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()

    def __call__(self, mode: bool = True) -> nn.Module:
        model: Any = self._model()
        type(model).train(model, mode)
        for optimizer in self.optimizers:
            optimizer.train() if mode else optimizer.eval()
        return model

    def __reduce__(self) -> Any:
        return _Train, (self._model(),)
