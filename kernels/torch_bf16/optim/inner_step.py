"""An optimizer's own ``step``, run on fp32 stand-ins for its parameters, gradients and states."""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Inner", "Trait", "examine"]

# Attributes that are not the wrapped class's own, or that stand-ins replace.
_OURS = frozenset({"param_groups", "state", "step", "recipe", "backend", "observers"}) | {
    *(
        "roles",
        "bucket_bytes",
        "_names",
        "_whole",
        "_plan",
        "_seen",
        "_next",
        "_accumulation",
        "_couples",
        "_halves",
    )
}
_PROBE_SIZE = 6
_PROBE_STEPS = 3


@dataclass(frozen=True)
class Trait:
    """What trying an optimizer's step told about it.

    Attributes:
        couples: whether a parameter's update depends on which others step with it.
        halves: states that it makes in bf16 or fp16 even beside fp32 parameters.
    """

    couples: bool
    halves: frozenset[str]


class Inner:
    """An instance of the optimizer's own class over stand-ins, for one call of its ``step``.

    Args:
        optimizer: whose class, attributes and options count; not changed.
        kind: its own class.
        members: ``(group number, stand-in with its gradient, its state)``.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        kind: type[torch.optim.Optimizer],
        members: Sequence[tuple[int, nn.Parameter, dict[str, Any]]],
    ) -> None:
        own: Any = object.__new__(kind)
        hooks = {name: OrderedDict() for name in vars(optimizer) if name.endswith("_hooks")}
        self._attributes = {
            name: each for name, each in vars(optimizer).items() if name not in _OURS | hooks.keys()
        }
        own.__dict__.update(copy.copy(self._attributes) | hooks)
        self.numbers = sorted({number for number, _, _ in members})
        own.param_groups = [
            {
                **{k: v for k, v in optimizer.param_groups[number].items() if k != "param_names"},
                "params": [parameter for its, parameter, _ in members if its == number],
            }
            for number in self.numbers
        ]
        own.state = defaultdict(dict, {p: state for _, p, state in members if state})
        self._own, self._step = own, _unhooked(kind.step)

    def step(self) -> None:
        """Run it, with gradients switched off as an optimizer's step expects."""
        with torch.no_grad():
            self._step(self._own)

    def state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        """What it keeps for a stand-in now."""
        return self._own.state.get(parameter, {})

    def options(self) -> dict[int, dict[str, Any]]:
        """The options of each parameter group now, by the group's number."""
        return {
            number: {k: v for k, v in group.items() if k != "params"}
            for number, group in zip(self.numbers, self._own.param_groups, strict=True)
        }

    def changed_attributes(self) -> dict[str, Any]:
        """Attributes that are other objects than before the step."""
        missing = object()
        return {
            name: each
            for name, each in vars(self._own).items()
            if name not in _OURS
            and not name.endswith("_hooks")
            and self._attributes.get(name, missing) is not each
        }


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
    attributes = {k: v for k, v in vars(optimizer).items() if k not in _OURS}
    vars(probed).update(copy.deepcopy(attributes))
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
                inner = Inner(optimizer, kind, members)
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
    closure = inspect.signature(_unhooked(kind.step)).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        return "its step needs a closure, which it calls when and as often as it likes"
    if callable(getattr(kind, "train", None)) and callable(getattr(kind, "eval", None)):
        return "its train() and eval() rewrite the weights outside of step"
    parameters = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, each in vars(optimizer).items():
        if name in _OURS or name == "defaults" or name.endswith("_hooks"):
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


def _unhooked(step: Any) -> Any:
    """The class's own ``step``: torch wraps it so that hooks run, and these run around ours."""
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    return step


def _refusal(kind: type, why: str) -> str:
    return (
        f"{kind.__module__}.{kind.__qualname__} cannot be converted: {why}. Keep this optimizer "
        "and train in float32 or bf16-mixed, or use one that torch_bf16 has"
    )
