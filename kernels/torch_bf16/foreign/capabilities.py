"""What trying an optimizer's own ``step`` on made-up numbers tells about it."""

from __future__ import annotations

import copy
import inspect
import random
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from .runner import OURS, Runner, unhooked

__all__ = ["Trait", "examine", "steps_on_pieces"]

_PROBE_SIZE = 6
_PROBE_STEPS = 3

# Whole blocks and large enough for what is done to large tensors only, and odd, where a vector's
# last elements are computed by other instructions.
_CUT_SHAPES = {1: ((8192,), (8191,)), 2: ((256, 256), (257, 259))}
_CUT_STEPS = 4


@dataclass(frozen=True)
class Trait:
    """What trying an optimizer's step told about it.

    Attributes:
        couples: whether a parameter's update depends on which others step with it.
        halves: states that it makes in bf16 or fp16 even beside fp32 parameters.
    """

    couples: bool
    halves: frozenset[str]


def examine(optimizer: torch.optim.Optimizer) -> Trait:
    """Try an optimizer's step on small made-up parameters.

    Raises:
        NotImplementedError: it cannot be run on stand-ins; the message says why.
    """
    kind = type(optimizer)
    if why := _obstacle(optimizer):
        raise NotImplementedError(_refusal(kind, why))
    try:
        together, _, halves = _probe(_copy(optimizer), kind, whole=True)
        alone, agree, _ = _probe(_copy(optimizer), kind, whole=False)
    except Exception as error:
        said = (str(error).strip().splitlines() or [""])[0]
        why = f"its step fails on parameters of its own: {type(error).__name__}: {said}"
        raise NotImplementedError(_refusal(kind, why)) from error
    return Trait(not agree or not all(map(torch.equal, together, alone)), halves)


def _copy(optimizer: torch.optim.Optimizer) -> Any:
    """A copy to try things on; attributes may be caches, which a probe must not fill."""
    probed: Any = object.__new__(type(optimizer))
    hooks = {name: OrderedDict() for name in vars(optimizer) if name.endswith("_hooks")}
    own = {k: v for k, v in vars(optimizer).items() if k not in OURS | hooks.keys()}
    vars(probed).update(copy.deepcopy(own) | hooks)
    probed.param_groups = [
        {k: v if k == "params" else copy.deepcopy(v) for k, v in group.items()}
        for group in optimizer.param_groups
    ]
    return probed


def _probe(optimizer: Any, kind: type, whole: bool) -> tuple[list[Tensor], bool, frozenset]:
    """Some steps of all stand-ins at once, or of each by itself.

    Returns:
        The weights then; whether all left the same options and attributes behind: a step that
        sums something up in its parameter group couples what is in there; and the names of states
        in half precision.
    """
    generator = torch.Generator().manual_seed(0)
    stand_ins: list[tuple[int, nn.Parameter, dict[str, Any]]] = []
    for number, group in enumerate(optimizer.param_groups):
        kinds = {p.ndim: p for p in group["params"]}
        for parameter in [each for each in kinds.values() for _ in range(2)]:
            shape = [min(max(size, 1), _PROBE_SIZE) for size in parameter.shape]
            stand_in = nn.Parameter(torch.randn(shape, generator=generator))
            stand_ins.append((number, stand_in, {}))
    gradients = [
        [torch.randn(each.shape, generator=generator) for _, each, _ in stand_ins]
        for _ in range(_PROBE_STEPS)
    ]
    batches = [range(len(stand_ins))] if whole else [[n] for n in range(len(stand_ins))]
    states: list[dict[str, Any]] = [{} for _ in stand_ins]
    agree = True
    with torch.random.fork_rng(devices=[]):
        for step in range(_PROBE_STEPS):
            after: dict[Any, Any] = {}
            seen: dict[Any, Any] = {}
            for batch in batches:
                torch.manual_seed(step)
                members = [(*stand_ins[n][:2], states[n]) for n in batch]
                for n, (_, stand_in, _) in zip(batch, members, strict=True):
                    stand_in.grad = gradients[step][n].clone()
                inner = Runner(optimizer, kind, members)
                inner.step()
                for n, (_, stand_in, _) in zip(batch, members, strict=True):
                    states[n] = inner.state_of(stand_in)
                left: Any = ((after, inner.options()), (seen, inner.changed_attributes()))
                for known, new in left:
                    agree &= all(_same(known.get(key, new[key]), new[key]) for key in new)
                    known.update(new)
            if _tensors(seen):
                raise ValueError(
                    f"it keeps tensors in its attribute {', '.join(_tensors(seen))}, outside "
                    "`state`"
                )
            for number, options in after.items():
                optimizer.param_groups[number].update(options)
            vars(optimizer).update(seen)
    halves = frozenset(
        key
        for state in states
        for key, each in state.items()
        if isinstance(each, Tensor) and each.dtype in (torch.bfloat16, torch.float16)
    )
    return [stand_in.detach() for _, stand_in, _ in stand_ins], agree, halves


def steps_on_pieces(
    optimizer: Any, kind: type, number: int, ndim: int, dims: Sequence[int] | None
) -> bool:
    """Whether an optimizer makes of pieces of a tensor what it makes of the whole, bit for bit.

    Tried on made-up tensors of some ten thousand elements, for four steps. Its states must be cut
    like the tensor or be the same for all pieces, empty ones too.

    Args:
        optimizer: converted; not changed.
        kind: its own class.
        number: of the parameter group whose options count.
        ndim: how many dimensions the tensor has.
        dims: those in which it is cut; None cuts the row of all its elements.

    Raises:
        NotImplementedError: its step draws random numbers, which would be others on each rank.
    """
    rows = (64,) + (4,) * (ndim - 2)
    generator, before = torch.Generator().manual_seed(0), random.getstate()
    with torch.random.fork_rng(devices=[]):
        start = torch.get_rng_state()
        try:
            agree = all(
                _agrees(
                    *(optimizer, kind, number),
                    torch.randn(_CUT_STEPS + 1, *shape, generator=generator),
                    dims,
                )
                for shape in _CUT_SHAPES.get(ndim, ((64, *rows), (65, *rows)))
            )
        except Exception:
            agree = False
        drawn = not torch.equal(start, torch.get_rng_state()) or random.getstate() != before
    random.setstate(before)
    if drawn:
        raise NotImplementedError(
            f"{kind.__module__}.{kind.__qualname__} draws random numbers in its step, and ranks "
            "that share a parameter would draw others: train it with DDP, seeded alike on every "
            "rank, or use another optimizer. Nothing was updated"
        )
    return agree


def _agrees(
    optimizer: Any, kind: type, number: int, numbers: Tensor, dims: Sequence[int] | None
) -> bool:
    if dims is None:
        numbers = numbers.flatten(1)
    cut = (0,) if dims is None else dims
    whole, states, left = _taken_steps(optimizer, kind, number, numbers)
    sides = [
        [slice(0, 0), slice(0, size // 3), slice(size // 3, size)] if dim in cut else [slice(None)]
        for dim, size in enumerate(whole.shape)
    ]
    for box in product(*sides):
        piece, its, other = _taken_steps(optimizer, kind, number, numbers[(slice(None), *box)])
        if not torch.equal(piece, whole[box]) or its.keys() != states.keys():
            return False
        for key, value in its.items():
            of_whole = states[key]
            if isinstance(of_whole, Tensor) and of_whole.shape == whole.shape:
                of_whole = of_whole[box]
            if not _same(of_whole, value):
                return False
        if not all(_same(one, another) for one, another in zip(left, other, strict=True)):
            return False
    return True


def _taken_steps(
    optimizer: Any, kind: type, number: int, numbers: Tensor
) -> tuple[Tensor, dict[str, Any], tuple[Any, Any]]:
    """Weight, state, and what is left in options and attributes after a few steps."""
    probed = _copy(optimizer)
    weight, *gradients = (each.clone(memory_format=torch.contiguous_format) for each in numbers)
    stand_in, state, attributes = nn.Parameter(weight), {}, {}
    for gradient in gradients:
        stand_in.grad = gradient
        inner = Runner(probed, kind, [(number, stand_in, state)])
        inner.step()
        state = inner.state_of(stand_in)
        probed.param_groups[number].update(inner.options()[number])
        attributes |= inner.changed_attributes()
        vars(probed).update(attributes)
    options = {k: v for k, v in probed.param_groups[number].items() if k != "params"}
    return stand_in.detach(), state, (options, attributes)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        # One tensor for all is counted up by each of them.
        return one is not other and torch.equal(torch.as_tensor(one), torch.as_tensor(other))
    return type(one) is type(other) and (one == other or one != one)


def _obstacle(optimizer: torch.optim.Optimizer) -> str | None:
    """Why a step cannot run on stand-ins, as far as that can be told without running it."""
    kind = type(optimizer)
    if isinstance(optimizer, torch.optim.LBFGS):
        return "it evaluates the closure several times per step, outside any update rule"
    if isinstance(optimizer, torch.optim.SparseAdam):
        return "it updates what sparse gradients touch, and gradients here are dense"
    closure = inspect.signature(unhooked(kind.step)).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        return "its step needs a closure, which it calls when and as often as it likes"
    if callable(getattr(kind, "train", None)) and callable(getattr(kind, "eval", None)):
        return "its train() and eval() rewrite the weights outside of step"
    parameters = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, each in vars(optimizer).items():
        if name in OURS or name == "defaults" or name.endswith("_hooks"):
            continue
        for found in _within(each):
            if isinstance(found, torch.optim.Optimizer):
                return (
                    f"it wraps another optimizer, {type(found).__name__}, in its attribute {name}: "
                    "convert that one and wrap it afterwards"
                )
            if isinstance(found, nn.Module) or id(found) in parameters:
                return f"it keeps the model's own tensors in its attribute {name}"
            if isinstance(found, Tensor) and found.numel() > 1:
                return f"it keeps tensors in its attribute {name}, outside `state`"
    return None


def _within(value: Any, depth: int = 4) -> Iterable[Any]:
    if isinstance(value, (Tensor, nn.Module, torch.optim.Optimizer)):
        yield value
    elif depth and isinstance(value, Mapping):
        for each in (*value.keys(), *value.values()):
            yield from _within(each, depth - 1)
    elif depth and isinstance(value, (list, tuple, set)):
        for each in value:
            yield from _within(each, depth - 1)
    elif depth and hasattr(value, "__dict__") and not inspect.isroutine(value):
        yield from () if isinstance(value, type) else _within(vars(value), depth - 1)


def _tensors(attributes: Mapping[str, Any]) -> list[str]:
    return [
        name
        for name, each in attributes.items()
        if any(isinstance(found, Tensor) for found in _within(each))
    ]


def _refusal(kind: type, why: str) -> str:
    return (
        f"{kind.__module__}.{kind.__qualname__} cannot be converted: {why}. Keep this optimizer "
        "and train in float32 or bf16-mixed, or use one that torch_bf16 has"
    )
