"""bf16 weights that no optimizer trains and that a program blends with trained ones itself.

A target network (BYOL, DINO, SAC) or a plain average does ``target.mul_(0.996).add_(weight,
alpha=0.004)``. In bf16 each such write is rounded to nearest, and most numbers never move. No
function of torch that could be replaced stands in between, so within a few windows of steps the
optimizers compare some of these weights with what they were before. A warning names one that is
written again and again while only a few of its numbers change. Averages in lists and dicts, which
belong to no module, are found among all objects of the process.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Container, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from torch_bf16.living import LivingSet
from torch_bf16.parameters import own_parameter
from torch_bf16.torch_patches import Replacement, at_restore

from .cast_modules import bf16_weights, cast_models
from .loose_averages import loose_averages
from .unconverted import note_copy
from .watched_weight import WatchedWeight, is_comparable, is_plain

__all__ = ["exempt", "leave_copies", "warn_if_blended", "watch_blends"]

# Steps since a model was cast or copied, and from there until weights that were not written are
# left out, and until the window ends. The first comes soon; averages may still be so close to their
# weights that nothing at all changes, or begin much later, so there are others. Those of GANs,
# whose optimizers take turns, are often moved after every tenth turn only.
_WINDOWS = {8: (16, 64), 1000: (32, 128), 10_000: (32, 128), 100_000: (32, 128)}
# Weights that are watched at a time, once it is known which are written, and searches for loose
# averages after a cast.
_SAMPLED, _SEARCHES = 4, 2

# Threads may train models of their own.
_lock = threading.RLock()
_steps = 0
# The step with which the present window begins, or the next one; None after the last.
_begin: int | None = None
_warned = False
_searches = 0
_optimizers: LivingSet[Any] = LivingSet()
# Copies of parameters, each with the id of what it copied.
_copies: WeakIdKeyDictionary = WeakIdKeyDictionary()
_weights: list[WatchedWeight] = []


def watch_blends() -> None:
    """Watch what is cast from now on, and copies of it; see :func:`warn_if_blended`."""
    global _warned, _searches
    with _lock:
        _warned, _searches = False, _SEARCHES
        _begin_anew()
    _DEEPCOPY.apply()


def warn_if_blended(optimizer: torch.optim.Optimizer) -> None:
    """Warn of a weight that is blended in bf16, if the present step is in one of the windows.

    Called at the start of each step, when trained weights are still those that a program may just
    have copied. Waits for the device once in each window, and more often only if such a weight was
    written.

    Args:
        optimizer: the one that steps. If it releases gradients, its weights have moved already, so
            only that it trains them is noted.
    """
    if _begin is None:
        return
    with _lock:
        lossy = _find_lossy(optimizer)
    if lossy is not None:
        lossy.warn()


def _find_lossy(optimizer: torch.optim.Optimizer) -> WatchedWeight | None:
    """Count a step, and do what is to be done at it: the weight to warn of, if one was found."""
    global _steps, _begin, _warned
    if _begin is None:
        return None
    # Before a window begins, too: what another optimizer trains is not an average.
    _optimizers.add(optimizer)
    if optimizer._engine.release is not None:  # pyright: ignore[reportAttributeAccessIssue]
        return None
    _steps += 1
    if _steps < _begin:
        return None
    written_within, length = _WINDOWS[_begin]
    if _steps == _begin:
        _gather()
    elif _steps == _begin + written_within:
        _keep_written()
    elif _steps > _begin + written_within:
        for each in _weights[:_SAMPLED]:
            if each.loses_writes(_trained):
                _end()
                _warned = True
                return each
        _weights[:] = [each for each in _weights if not each.is_harmless]
    if _steps == _begin + length:
        _weights.clear()
        _begin = next((each for each in _WINDOWS if each > _steps), None)
        if _begin is None:
            _end()
    return None


def _gather() -> None:
    """Watch all weights that may be blended: a window begins."""
    global _searches
    _weights.extend(_untrained())
    if _searches > 0 and not _swaps():
        _searches -= 1
        _weights.extend(loose_averages([*_trained()], [*_optimizers], _SAMPLED))


def _keep_written() -> None:
    """Watch only weights that were written since the window began, and not by an optimizer."""
    # By now every optimizer that takes turns with others is known.
    trained = [*_trained()]
    # By address, because views of a weight move with it.
    moved = {each.data_ptr() for each in trained if is_plain(each)}
    written = [each for each in _weights if each.is_written() and each.address not in moved]
    _weights[:] = written
    alone = dict(_never_trained({*map(id, trained)}))
    for each in written:
        if each.kind == "in the model" and id(each.get()) in alone:
            each.kind, each.model = "in a model of its own", alone[id(each.get())]
    modules = sorted({each.module for each in written if each.kind == "in the model"})
    for each in written:
        each.bits, each.modules = None, modules


def exempt(module: nn.Module) -> None:
    """Do not watch a module: an average that rounds stochastically or has a warning of its own."""
    if not (_copies or _weights):
        return
    parameters = [*module.parameters()]
    exempted = {*map(id, parameters)}
    # What rounds it holds tensors of its own over the same memory, in no module.
    memory = {each.data_ptr() for each in parameters if is_plain(each)}
    with _lock:
        for each in parameters:
            _copies.pop(each, None)
        _weights[:] = [
            each
            for each in _weights
            if id(each.get()) not in exempted and each.address not in memory
        ]


def leave_copies() -> None:
    """Watch only what is in cast models: another warning has named an average of one."""
    global _warned, _searches
    with _lock:
        _warned, _searches = True, 0
        _copies.clear()
        _weights[:] = [each for each in _weights if each.kind not in ("copy", "loose")]


def _begin_anew() -> None:
    global _steps, _begin
    _steps, _begin = 0, min(_WINDOWS)
    _weights.clear()


def _end() -> None:
    global _begin
    with _lock:
        _begin = None
        _weights.clear()
        _copies.clear()


def _noting(original: Any) -> Any:
    def deepcopy(self: nn.Parameter, memo: dict[int, Any]) -> Any:
        is_new = id(self) not in memo
        copy = original(self, memo)
        if is_new and not _swaps() and is_comparable(copy):
            note_copy(copy, self)
            if not _warned:
                with _lock:
                    _copies[copy] = id(self)
                    _begin_anew()
        return copy

    return deepcopy


_DEEPCOPY = Replacement("parameter_deepcopy", nn.Parameter, "__deepcopy__", _noting)
at_restore(_end)


def _swaps() -> bool:
    """Whether float() calls swap_tensors, which refuses a tensor with weak references."""
    return torch.__future__.get_swap_module_params_on_conversion()


def _untrained() -> Iterator[WatchedWeight]:
    """The bf16 matrices of cast models and of their copies that no optimizer of ours trains."""
    trained, named = {id(each) for each in _trained()}, {}
    for name, owner, own_name, weight in bf16_weights():
        named[id(weight)] = name, weakref.ref(weight)
        if id(weight) not in trained and is_comparable(weight):
            get = functools.partial(_parameter_of, weakref.ref(owner), own_name, id(weight))
            yield WatchedWeight.of(weight, name, "in the model", get)
    for copy, source in list(_copies.items()):
        if source in named and id(copy) not in trained and is_comparable(copy):
            name, followed = named[source]
            yield WatchedWeight.of(copy, name, "copy", weakref.ref(copy), followed)


def _never_trained(trained: Container[int]) -> Iterator[tuple[int, str]]:
    """The weights of cast models in which nothing is trained: ids, and their model's class."""
    for model in cast_models():
        numbers = [id(each) for each in model.parameters()]
        if not any(each in trained for each in numbers):
            yield from ((each, type(model).__name__) for each in numbers)


def _trained() -> Iterator[Tensor]:
    """The parameters that optimizers of ours have stepped; a target may be in their groups, too."""
    optimizers = [*_optimizers]
    # Lists, because another thread may step one of them meanwhile.
    keys = chain.from_iterable(list(dict.keys(each.state)) for each in optimizers)
    yield from (each for each in keys if isinstance(each, Tensor))
    # What another rank steps arrives here by a broadcast.
    zeros = [each._engine.names.zero for each in optimizers]
    yield from chain.from_iterable(each.parameters for each in zeros if each is not None)


def _parameter_of(
    owner_of: Callable[[], nn.Module | None], name: str, number: int
) -> Tensor | None:
    owner = owner_of()
    weight = None if owner is None else own_parameter(owner, name)
    return weight if id(weight) == number else None
