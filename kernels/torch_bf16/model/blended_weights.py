"""bf16 weights that no optimizer trains and that a program blends with trained ones itself.

A target network (BYOL, DINO, SAC) or a plain average does ``target.mul_(0.996).add_(weight,
alpha=0.004)``. In bf16 each such write is rounded to nearest, and most numbers never move. No
function of torch that could be replaced stands in between, so within a few windows of steps the
optimizers compare some of these weights with what they were before. A warning names one that is
written again and again while only a few of its numbers change. Averages in lists and dicts, which
belong to no module, are found among the objects of the garbage collector.
"""

from __future__ import annotations

import functools
import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from torch_bf16.torch_patches import is_enabled

from .cast_modules import bf16_weights
from .lerped_averages import is_named

__all__ = ["exempt", "look", "restore", "watch_blends"]

# Steps since a model was cast or copied. The first window comes soon; averages may still be so
# close to their weights that nothing at all changes, so there is a later one.
_WINDOWS = (8, 1000)
# Steps until weights that were not written are left out, and until a window ends.
_WRITTEN_WITHIN, _LENGTH = 16, 64
_SAMPLED, _ELEMENTS = 4, 4096
# If updates are lost, most numbers stay, and the others move by a few bf16 spacings, by more near
# zero. A memory bank or a pruning mask replaces numbers by unrelated ones.
_LOSSY_WRITES, _SMALL_MOVE = 2, 16
# An average is closer to its weight than this part of the weight's mean magnitude; weights that
# have nothing to do with each other differ by more than all of it.
_CLOSE = 0.5
# How often all objects are searched after a cast, which takes a tenth of a second per million, and
# how many tensors with the shape of a weight are compared each time.
_SEARCHES, _COMPARED = 2, 64

_original: Any = nn.Parameter.__deepcopy__
_functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]


@dataclass(eq=False)
class _Weight:
    """A bf16 weight that no optimizer trains.

    Attributes:
        name: its name in the model that was cast, or that it was copied from.
        is_copy: whether ``copy.deepcopy`` of a cast model made it.
        is_loose: whether it is a tensor of no module that is close to the weight of this name.
        get: returns the weight, or None if it is gone.
        place: its address and version when the window began.
        bits: the bits of its first elements then, or when they were last compared.
        changed: how many of these elements the last write changed.
        lossy: how many writes changed only a few of them.
    """

    name: str
    is_copy: bool
    get: Callable[[], Tensor | None]
    place: tuple[int, int]
    bits: Tensor | None = None
    changed: int = 0
    lossy: int = 0
    is_loose: bool = False

    def is_written(self) -> bool:
        """Whether it was written since the window began."""
        weight = self.get()
        if weight is None or not _is_readable(weight):
            return False
        # A write through weight.data changes neither its address nor its version.
        written = self.place != _place(weight)
        return written or not (self.bits is None or torch.equal(self.bits, _bits(weight)))


_steps = 0
# The step with which the present window begins, or the next one; None after the last.
_begin: int | None = None
_warned = False
_searches = 0
_optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
# Copies of parameters, each with the id of what it copied.
_copies: WeakIdKeyDictionary = WeakIdKeyDictionary()
_weights: list[_Weight] = []


def watch_blends() -> None:
    """Watch what is cast from now on, and copies of it; see :func:`look`."""
    global _warned, _searches
    _warned, _searches = False, _SEARCHES
    _begin_anew()
    if nn.Parameter.__deepcopy__ is _original and is_enabled("parameter_deepcopy"):
        nn.Parameter.__deepcopy__ = functools.wraps(_original)(_deepcopy)


def restore() -> None:
    """Restore ``Parameter.__deepcopy__``, and watch nothing until the next :func:`cast_model`."""
    nn.Parameter.__deepcopy__ = _original
    _end()


def look(optimizer: torch.optim.Optimizer) -> None:
    """Warn of a weight that is blended in bf16, if the present step is in one of the windows.

    Called at the start of each step, when trained weights are still those that a program may just
    have copied. Waits for the device once in each window, and more often only if such a weight was
    written.

    Args:
        optimizer: the one that steps. If it releases gradients, its weights have moved already, so
            only that it trains them is noted.
    """
    global _steps, _begin, _warned, _searches
    if _begin is None:
        return
    if optimizer._engine.release is not None:  # pyright: ignore[reportAttributeAccessIssue]
        _optimizers.add(optimizer)
        return
    _steps += 1
    if _steps < _begin:
        return
    _optimizers.add(optimizer)
    if _steps == _begin:
        _weights.extend(_untrained())
        if _searches > 0:
            _searches -= 1
            _weights.extend(islice(_loose(), _SAMPLED))
    elif _steps == _begin + _WRITTEN_WITHIN:
        # By now every optimizer that takes turns with others is known.
        trained = {id(each) for each in _trained()}
        written = [each for each in _weights if each.is_written() and id(each.get()) not in trained]
        _weights[:] = written[:_SAMPLED]
        for each in _weights:
            each.bits = None
    elif _steps > _begin + _WRITTEN_WITHIN:
        for each in list(_weights):
            if _loses_writes(each):
                _end()
                _warned = True
                _warn(each)
                return
    if _steps == _begin + _LENGTH:
        _weights.clear()
        _begin = next((each for each in _WINDOWS if each > _steps), None)
        if _begin is None:
            _end()


def exempt(module: nn.Module) -> None:
    """Do not watch a module: an average that rounds stochastically or has a warning of its own."""
    if _copies or _weights:
        parameters = [*module.parameters()]
        for each in parameters:
            _copies.pop(each, None)
        exempted = {*map(id, parameters)}
        _weights[:] = [each for each in _weights if id(each.get()) not in exempted]


def _begin_anew() -> None:
    global _steps, _begin
    _steps, _begin = 0, _WINDOWS[0]
    _weights.clear()


def _end() -> None:
    global _begin
    _begin = None
    _weights.clear()
    _copies.clear()


def _deepcopy(self: nn.Parameter, memo: dict[int, Any]) -> Any:
    is_new = id(self) not in memo
    copy = _original(self, memo)
    # swap_tensors, which float() may be told to use, refuses a tensor with weak references.
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    if is_new and not (swaps or _warned) and _is_comparable(copy):
        _copies[copy] = id(self)
        _begin_anew()
    return copy


def _untrained() -> Iterator[_Weight]:
    """The bf16 matrices of cast models and of their copies that no optimizer of ours trains."""
    trained, names = {id(each) for each in _trained()}, {}
    for name, owner, own_name, weight in bf16_weights():
        names[id(weight)] = name
        if id(weight) not in trained and _is_comparable(weight):
            get = functools.partial(_parameter_of, weakref.ref(owner), own_name, id(weight))
            yield _Weight(name, False, get, _place(weight), _bits_if_readable(weight))
    for copy, source in list(_copies.items()):
        if source in names and id(copy) not in trained and _is_comparable(copy):
            source_name, bits = names[source], _bits_if_readable(copy)
            yield _Weight(source_name, True, weakref.ref(copy), _place(copy), bits)


def _loose() -> Iterator[_Weight]:
    """bf16 tensors of no module that are close to a trained weight, such as averages in a list."""
    names = {id(weight): name for name, _, _, weight in bf16_weights()}
    alike: dict[torch.Size, list[Tensor]] = {}
    taken = {each.data_ptr() for each in _tensors_of_optimizers()}
    for each in _trained():
        if id(each) in names and _is_readable(each):
            alike.setdefault(each.shape, []).append(each)
    found: list[Any] = [each for each in gc.get_objects() if type(each) is Tensor] if alike else []
    compared = 0
    for tensor in found:
        if not (tensor.dtype == torch.bfloat16 and _is_plain(tensor) and tensor.shape in alike):
            continue
        if not _is_readable(tensor) or tensor.data_ptr() in taken or is_named(tensor):
            continue
        weights = [each for each in alike[tensor.shape] if each.device == tensor.device]
        if weights and compared < _COMPARED:
            compared += 1
            closest = _closest(tensor, weights)
            if closest is not None:
                name, get = names[id(closest)], weakref.ref(tensor)
                yield _Weight(name, False, get, _place(tensor), _bits(tensor), is_loose=True)


def _tensors_of_optimizers() -> Iterator[Tensor]:
    """What moves like a weight, and is no average: weights, their gradients and states."""
    for optimizer in _optimizers:
        for parameter, states in dict.items(optimizer.state):
            # Optimizers of other libraries also keep single values, under keys of their own.
            values = states.values() if isinstance(states, dict) else (states,)
            for each in (parameter, getattr(parameter, "grad", None), *values):
                if isinstance(each, Tensor) and _is_plain(each):
                    yield each


def _closest(tensor: Tensor, weights: list[Tensor]) -> Tensor | None:
    numbers = torch.stack([_bits(each).view(torch.bfloat16).float() for each in weights])
    distances = (numbers - _bits(tensor).view(torch.bfloat16).float()).abs().mean(1)
    ratios = distances / numbers.abs().mean(1)
    ratio, place = min((ratio, n) for n, ratio in enumerate(ratios.tolist()))
    return weights[place] if ratio < _CLOSE else None


def _trained() -> Iterator[Tensor]:
    """The parameters that optimizers of ours have stepped; a target may be in their groups, too."""
    keys = chain.from_iterable(dict.keys(each.state) for each in _optimizers)
    return (each for each in keys if isinstance(each, Tensor))


def _is_comparable(weight: Tensor) -> bool:
    # Numbers of vectors are often alike: all scales of a norm begin as 1.
    return (
        _is_plain(weight)
        and weight.data_ptr() != 0
        and weight.dtype == torch.bfloat16
        and weight.dim() > 1
        and weight.numel() > 0
    )


def _is_plain(tensor: Tensor) -> bool:
    """Whether it has an address: sparse tensors and those of torch.func have none."""
    return (
        type(tensor) in (nn.Parameter, Tensor)
        and not _functorch.is_functorch_wrapped_tensor(tensor)
        and not (tensor.is_meta or tensor.is_inference() or tensor.is_nested)
        and tensor.layout == torch.strided
    )


def _parameter_of(
    owner_of: Callable[[], nn.Module | None], name: str, number: int
) -> Tensor | None:
    owner = owner_of()
    weight = None if owner is None else owner._parameters.get(name)
    return weight if id(weight) == number else None


def _place(weight: Tensor) -> tuple[int, int]:
    return weight.data_ptr(), weight._version


def _bits(weight: Tensor) -> Tensor:
    return weight.detach().reshape(-1)[:_ELEMENTS].view(torch.int16).clone()


def _is_readable(weight: Tensor) -> bool:
    capturing = weight.is_cuda and torch.cuda.is_current_stream_capturing()
    return _is_comparable(weight) and not capturing


def _bits_if_readable(weight: Tensor) -> Tensor | None:
    return _bits(weight) if _is_readable(weight) else None


def _loses_writes(watched: _Weight) -> bool:
    """Count a write that has changed only a few numbers: whether it is the second one."""
    weight = watched.get()
    if weight is None or not _is_readable(weight):
        return False
    before, watched.bits = watched.bits, _bits(weight)
    if before is None or before.shape != watched.bits.shape:
        return False
    moves = (watched.bits.to(before.device).int() - before.int()).abs()
    moves = moves[moves > 0].cpu()
    watched.changed = len(moves)
    # A write that does nothing leaves all of them.
    if not 0 < watched.changed < before.numel() // 2 or moves.median() > _SMALL_MOVE:
        return False
    if is_named(weight) or any(_loses_nothing(weight, watched.bits, each) for each in _trained()):
        _weights.remove(watched)
        return False
    watched.lossy += 1
    return watched.lossy == _LOSSY_WRITES


def _loses_nothing(weight: Tensor, bits: Tensor, trained: Tensor) -> bool:
    """Whether a weight is trained itself by now, or was made equal to one that is trained."""
    if weight is trained:
        return True
    if (trained.shape, trained.dtype) != (weight.shape, weight.dtype):
        return False
    # To compare a sharded weight, its ranks would have to talk to each other.
    if not _is_comparable(trained):
        return True
    return torch.equal(_bits(trained).to(bits.device), bits)


def _warn(watched: _Weight) -> None:
    compared = 0 if watched.bits is None else watched.bits.numel()
    if watched.is_loose:
        what = f"a tensor outside of all modules follows {watched.name!r} and is bfloat16, too"
        remedy = (
            "make the average before the model is cast, or of p.float(), or convert its tensors "
            "with float() once it is made; it then follows the bf16 weights in fp32. "
            "torch_bf16.EMA(model, decay) is such an average"
        )
    elif watched.is_copy:
        what = f"a copy of {watched.name!r} is bfloat16, as in the cast model that it copied"
        remedy = (
            "make the copy before the model is cast, or call float() on it once it is made; it "
            "then follows the bf16 weights in fp32. torch_bf16.EMA(model, decay) is such an average"
        )
    else:
        what = f"{watched.name!r} is bfloat16 and no optimizer of torch_bf16 trains it"
        module = watched.name.split(".")[0]
        remedy = (
            f"keep_fp32=[{module + '*'!r}] keeps it in fp32, where blending with bf16 weights "
            "works; or an optimizer that was converted, if it is to be trained"
        )
    warnings.warn(
        f"{what}, and the program moves it between steps: of {compared} numbers the last write "
        f"has changed {watched.changed}. It is rounded to nearest, so what moves a number by less "
        "than half a bf16 spacing (0.2 to 0.4 %) is lost, and an average or a target network "
        "hardly moves. "
        f"What works: {remedy}",
        stacklevel=4,
    )
