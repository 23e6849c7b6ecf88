"""bf16 averages that belong to no module, such as those in a list or a dict."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from torch_bf16.living import instances_of, referrers_of

from .cast_modules import bf16_weights
from .watched_weight import WatchedWeight, bits_of, is_plain, is_readable

__all__ = ["loose_averages"]

# An average is closer to its weight than this part of the weight's mean magnitude; weights that
# have nothing to do with each other differ by more than all of it.
_CLOSE = 0.5
# How many tensors with the shape of a weight are compared, and about how many numbers of each.
_COMPARED_TENSORS, _NUMBERS_OF_EACH = 8192, 256


def loose_averages(
    trained: Collection[Tensor], optimizers: Collection[Any], most: int
) -> list[WatchedWeight]:
    """Search all objects of the process for tensors that are close to a trained weight.

    That takes a tenth of a second per million objects. Waits for the device.

    Args:
        trained: the weights that optimizers train.
        optimizers: these optimizers, whose tensors are none.
        most: how many are found at most.
    """
    names = {id(weight): name for name, _, _, weight in bf16_weights()}
    weights = [each for each in trained if id(each) in names and is_readable(each)]
    close = [*islice(_close(weights, optimizers), most)]
    getters = _getters([tensor for tensor, _ in close])
    return [
        WatchedWeight.of(tensor, names[id(weight)], "loose", get, weakref.ref(weight))
        for (tensor, weight), get in zip(close, getters, strict=True)
    ]


def _close(
    weights: Collection[Tensor], optimizers: Collection[Any]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Tensors that are close to one of these weights, each with the closest."""
    alike: dict[tuple[torch.Size, torch.device], list[Tensor]] = {}
    for each in weights:
        alike.setdefault((each.shape, each.device), []).append(each)
    if not alike:
        return
    taken = {each.data_ptr() for each in _tensors_of(optimizers)}
    tensors = instances_of(Tensor, or_of_subclasses=False)
    found: dict[tuple[torch.Size, torch.device], list[Tensor]] = {}
    for each in filter(is_readable, tensors):
        place = each.shape, each.device
        # A weight that is computed from a trained one, such as a pruned one, is no average.
        computed = each.grad_fn is not None
        if place in alike and not computed and each.data_ptr() not in taken:
            found.setdefault(place, []).append(each)
    for place, some in found.items():
        compared = some[:_COMPARED_TENSORS]
        for tensor, number in zip(compared, _closest(compared, alike[place]), strict=True):
            if number is not None:
                yield tensor, alike[place][number]


def _getters(tensors: Sequence[Tensor]) -> list[Callable[[], Tensor | None]]:
    """For each tensor a function for what is in its place in a list or a dict, or else for it.

    ``average[name] = 0.99 * average[name] + 0.01 * weight`` makes a new tensor each time. The list
    or dict is kept alive as long as it is watched.
    """
    numbers = {*map(id, tensors)}
    getters: dict[int, Callable[[], Tensor | None]] = {}
    # One call for all of them: each looks through all objects.
    for holder in referrers_of(*tensors) if tensors else ():
        if holder is tensors or not issubclass(type(holder), (list, dict)):
            continue
        is_list = issubclass(type(holder), list)
        for key, each in enumerate(holder) if is_list else list(dict.items(holder)):
            if id(each) in numbers:
                getters.setdefault(id(each), functools.partial(_held, holder, key))
    return [getters.get(id(each)) or weakref.ref(each) for each in tensors]


def _held(holder: Any, key: Any) -> Tensor | None:
    try:
        # Not holder[key] of a dict: a defaultdict would make an entry.
        held = dict.get(holder, key) if issubclass(type(holder), dict) else holder[key]
    except LookupError:
        return None
    return held if type(held) is Tensor else None


def _tensors_of(optimizers: Collection[Any]) -> Iterator[Tensor]:
    """What moves like a weight, and is not an average: weights, their gradients and states."""
    for optimizer in optimizers:
        # Lists, because another thread may step one of them meanwhile.
        for parameter, states in list(dict.items(optimizer.state)):
            # Optimizers of other libraries also keep single values, under keys of their own.
            values = list(states.values()) if isinstance(states, dict) else [states]
            for each in (parameter, getattr(parameter, "grad", None), *values):
                if isinstance(each, Tensor) and is_plain(each):
                    yield each


def _closest(tensors: Sequence[Tensor], weights: Sequence[Tensor]) -> list[int | None]:
    """For each tensor which weight is closest; None if none is close."""
    numbers, of_weights = (torch.stack([*map(_some_numbers, some)]) for some in (tensors, weights))
    distances = torch.cdist(numbers, of_weights, p=1) / numbers.shape[1]
    # Nothing is close to a weight that is zero here.
    ratios = (distances / of_weights.abs().mean(1)).nan_to_num(math.inf)
    smallest, places = ratios.min(1)
    pairs = zip(smallest.tolist(), places.tolist(), strict=True)
    return [place if ratio < _CLOSE else None for ratio, place in pairs]


def _some_numbers(tensor: Tensor) -> Tensor:
    bits = bits_of(tensor)
    return bits.view(torch.bfloat16)[:: max(1, len(bits) // _NUMBERS_OF_EACH)].float()
