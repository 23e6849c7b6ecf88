"""bf16 averages that belong to no module, such as those in a list or a dict."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor

from .cast_modules import bf16_weights
from .lerped_averages import is_named
from .watched_weight import WatchedWeight, bits_of, is_plain, is_readable

__all__ = ["loose_averages"]

# An average is closer to its weight than this part of the weight's mean magnitude; weights that
# have nothing to do with each other differ by more than all of it.
_CLOSE = 0.5
# How many tensors with the shape of a weight are compared.
_COMPARED = 64


def loose_averages(
    trained: Collection[Tensor], optimizers: Collection[Any]
) -> Iterator[WatchedWeight]:
    """Search all objects of the process for tensors that are close to a trained weight.

    That takes a tenth of a second per million objects. Waits for the device.

    Args:
        trained: the weights that optimizers train.
        optimizers: these optimizers, whose tensors are none.
    """
    names = {id(weight): name for name, _, _, weight in bf16_weights()}
    alike: dict[torch.Size, list[Tensor]] = {}
    for each in trained:
        if id(each) in names and is_readable(each):
            alike.setdefault(each.shape, []).append(each)
    if not alike:
        return
    taken = {each.data_ptr() for each in _tensors_of(optimizers)}
    tensors: list[Any] = [each for each in gc.get_objects() if type(each) is Tensor]
    compared = 0
    for tensor in tensors:
        if not (tensor.dtype == torch.bfloat16 and is_plain(tensor) and tensor.shape in alike):
            continue
        if not is_readable(tensor) or tensor.data_ptr() in taken or is_named(tensor):
            continue
        weights = [each for each in alike[tensor.shape] if each.device == tensor.device]
        if weights and compared < _COMPARED:
            compared += 1
            closest = _closest(tensor, weights)
            if closest is not None:
                refs = weakref.ref(tensor), weakref.ref(closest)
                yield WatchedWeight.of(tensor, names[id(closest)], "loose", *refs)


def _tensors_of(optimizers: Collection[Any]) -> Iterator[Tensor]:
    """What moves like a weight, and is no average: weights, their gradients and states."""
    for optimizer in optimizers:
        for parameter, states in dict.items(optimizer.state):
            # Optimizers of other libraries also keep single values, under keys of their own.
            values = states.values() if isinstance(states, dict) else (states,)
            for each in (parameter, getattr(parameter, "grad", None), *values):
                if isinstance(each, Tensor) and is_plain(each):
                    yield each


def _closest(tensor: Tensor, weights: list[Tensor]) -> Tensor | None:
    """The weight whose first elements are closest, if they are close at all."""
    numbers = torch.stack([bits_of(each).view(torch.bfloat16).float() for each in weights])
    distances = (numbers - bits_of(tensor).view(torch.bfloat16).float()).abs().mean(1)
    ratios = distances / numbers.abs().mean(1)
    ratio, place = min((ratio, n) for n, ratio in enumerate(ratios.tolist()))
    return weights[place] if ratio < _CLOSE else None
