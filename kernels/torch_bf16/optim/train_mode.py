"""Switches schedule-free optimizers between train and eval mode, in a context or with a model."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from torch_bf16.argument_checks import check_module
from torch_bf16.living import LivingSet

__all__ = ["averaged", "follow"]


@contextmanager
def averaged(*optimizers: Any) -> Iterator[list[Any]]:
    """Within the context, the weights of schedule-free optimizers are the averages.

    Optimizers in train mode are put into eval mode and back; all others are left as they are.

    Args:
        optimizers: optimizers, and modules, which stand for the optimizers that :func:`follow`
            them; anything else is ignored.

    Yields:
        The optimizers that were in train mode.

    Example:
        >>> with torch_bf16.averaged(optimizer):
        ...     weights = torch_bf16.fp32_state_dict(model, optimizer)
    """
    every = {
        id(o): o
        for each in optimizers
        for o in (_followers(each) if isinstance(each, nn.Module) else [each])
    }
    switched = [each for each in every.values() if _trains(each)]
    with ExitStack() as stack:
        for each in switched:
            # One that cannot be switched back keeps no other from it.
            stack.callback(each.train)
            each.eval()
        yield switched


def follow(model: nn.Module, *optimizers: Any) -> None:
    """Let schedule-free optimizers follow ``model.train()`` and ``model.eval()``.

    From now on ``model.eval()`` sets the weights to the averages, and ``model.train()`` to those
    that are trained, whatever wraps the model. Calling either on a part of the model switches
    nothing. Optimizers without modes are ignored. Copies of the model are not followed. A ``train``
    that the model has as an attribute is still called.

    Args:
        model: the module that is called, or the one in a wrapper; its attribute ``train`` is set.
        optimizers: optimizers to add to those that already follow the model; all of them are
            put into its mode now.

    Raises:
        ValueError: ``model`` is not a module.

    Example:
        >>> torch_bf16.follow(model, optimizer)
        >>> model = model.eval()
    """
    check_module("follow", model)
    train = model.__dict__.get("train")
    switchable = [each for each in optimizers if callable(getattr(each, "eval", None))]
    if switchable and not isinstance(train, _Train):
        train = model.__dict__["train"] = _Train(model, train)
    if isinstance(train, _Train):
        for each in switchable:
            train.optimizers.add(each)
        train.switch(model.training)


class _Train:
    """Replaces the method ``train`` of one module, as an attribute of the instance."""

    def __init__(self, model: nn.Module, own: Any) -> None:
        self._model, self._own = weakref.ref(model), own
        self.optimizers: LivingSet[Any] = LivingSet()

    def __call__(self, mode: bool = True) -> nn.Module:
        model: Any = self._model()
        if self._own is None:
            type(model).train(model, mode)
        else:
            self._own(mode)
        # Its own method may have left it as it was.
        self.switch(model.training)
        return model

    def switch(self, mode: bool) -> None:
        for each in self.optimizers:
            each.train() if mode else each.eval()

    def __reduce__(self) -> Any:
        return _Train, (self._model(), self._own)


def _followers(model: nn.Module) -> list[Any]:
    methods = (each.__dict__.get("train") for each in model.modules())
    return [o for each in methods if isinstance(each, _Train) for o in each.optimizers]


def _trains(optimizer: Any) -> bool:
    groups = getattr(optimizer, "param_groups", ())
    return callable(getattr(optimizer, "eval", None)) and any(g.get("train_mode") for g in groups)
