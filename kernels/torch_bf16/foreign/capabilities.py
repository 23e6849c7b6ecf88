"""What an optimizer's own ``step`` must see at once, by what is known of it and by a trial."""

from __future__ import annotations

import copy
import inspect
import random
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .advice import advice
from .runner import Runner, own_attributes, shared_states

__all__ = ["ELEMENTWISE", "Traits", "examine", "is_elementwise", "rewrites_weights"]

ELEMENTWISE = frozenset(
    {
        "lion_pytorch.lion_pytorch.Lion",
        "pytorch_optimizer.optimizer.adabelief.AdaBelief",
        "pytorch_optimizer.optimizer.adan.Adan",
        "pytorch_optimizer.optimizer.ademamix.AdEMAMix",
        "pytorch_optimizer.optimizer.adopt.ADOPT",
        "pytorch_optimizer.optimizer.lion.Lion",
        "torch.optim.adadelta.Adadelta",
        "torch.optim.adamax.Adamax",
        "torch.optim.asgd.ASGD",
        "torch.optim.rprop.Rprop",
    }
)
"""Classes whose source shows that each element is updated by its own numbers alone.

A subclass may do anything, so it is not one of them.
"""

# Options with which some of them use a norm or a mean of the whole tensor, or of all of them.
_OPTIONS_OVER_TENSORS = ("adanorm", "cautious", "max_grad_norm", "stable_adamw", "use_gc")

_TRIAL_SIZE = 6
_TRIAL_STEPS = 3


@dataclass(frozen=True)
class Traits:
    """What is known about an optimizer's own step.

    Attributes:
        couples: whether a parameter's update depends on which others step with it.
        draws: whether it draws random numbers.
        halves: states that it makes in bf16 or fp16 even beside fp32 parameters.
        states: the names of all that it made in the trial.
        elementwise: whether the user said that it is elementwise.
    """

    couples: bool
    draws: bool
    halves: frozenset[str]
    states: frozenset[str]
    elementwise: bool


def examine(optimizer: torch.optim.Optimizer, elementwise: bool = False) -> Traits:
    """Try an optimizer's step on small made-up parameters.

    It couples its parameters unless they, their states and the optimizer end the same when each
    steps in a call of its own.

    Args:
        optimizer: not changed.
        elementwise: what the user says of it.

    Raises:
        NotImplementedError: it cannot be run on copies; the message says why.
    """
    kind = type(optimizer)
    if why := _obstacle(optimizer):
        raise NotImplementedError(_refusal(kind, why))
    before = random.getstate()
    try:
        together, draws = _try_steps(optimizer, at_once=True)
        alone, _ = _try_steps(optimizer, at_once=False)
        couples = not _same(together, alone)
    except Exception as error:
        said = (str(error).strip().splitlines() or [""])[0]
        why = f"its step fails on parameters of its own: {type(error).__name__}: {said}"
        raise NotImplementedError(_refusal(kind, why)) from error
    finally:
        random.setstate(before)
    halves = frozenset(
        key
        for state in together["states"]
        for key, each in state.items()
        if isinstance(each, Tensor) and each.dtype in (torch.bfloat16, torch.float16)
    )
    made = frozenset(key for state in together["states"] for key in state)
    return Traits(couples, draws, halves, made, elementwise)


def is_elementwise(
    kind: type[torch.optim.Optimizer], group: Mapping[str, Any], traits: Traits
) -> bool:
    """Whether parts of a tensor can step by themselves, as far as the user said or is known."""
    known = f"{kind.__module__}.{kind.__qualname__}" in ELEMENTWISE and not traits.couples
    return traits.elementwise or (known and not any(map(group.get, _OPTIONS_OVER_TENSORS)))


def rewrites_weights(kind: type[torch.optim.Optimizer]) -> bool:
    """Whether a class has ``train()`` and ``eval()``: those of schedule-free ones swap weights."""
    return callable(getattr(kind, "train", None)) and callable(getattr(kind, "eval", None))


def _copy(optimizer: torch.optim.Optimizer) -> Any:
    """A copy to try things on; attributes may be caches, which a trial must not fill."""
    tried: Any = object.__new__(type(optimizer))
    vars(tried).update(copy.deepcopy(own_attributes(optimizer)))
    vars(tried).update({n: OrderedDict() for n in vars(optimizer) if n.endswith("_hooks")})
    tried.state = copy.deepcopy(shared_states(optimizer.state))
    tried.param_groups = [
        {k: v if k == "params" else copy.deepcopy(v) for k, v in group.items()}
        for group in optimizer.param_groups
    ]
    return tried


def _try_steps(optimizer: torch.optim.Optimizer, at_once: bool) -> tuple[dict[str, Any], bool]:
    """What some steps leave, of all parameters in one call or of each in its own; if any drew."""
    tried, generator = _copy(optimizer), torch.Generator().manual_seed(0)
    members: list[tuple[int, nn.Parameter]] = []
    states: list[dict[str, Any]] = []
    for number, group in enumerate(tried.param_groups):
        # Two for each number of dimensions, which is what steps tell tensors apart by.
        for parameter in {p.ndim: p for p in group["params"]}.values():
            shape = [min(max(n, 1), _TRIAL_SIZE) for n in parameter.shape]
            # What a constructor marks parameters with, such as the seed of a projection.
            marks = optimizer.state.get(parameter, {})
            began = any(isinstance(each, Tensor) for each in marks.values())
            for _ in range(2):
                members.append((number, nn.Parameter(torch.randn(shape, generator=generator))))
                states.append({} if began else copy.deepcopy(marks))
    if rewrites_weights(type(optimizer)):
        mode = Runner(tried, type(optimizer))
        mode.run([], "train")
        mode.finish()
    calls = [range(len(members))] if at_once else [[n] for n in range(len(members))]
    draws = False
    with torch.random.fork_rng(devices=[]):
        for step in range(_TRIAL_STEPS):
            for _, parameter in members:
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            runner = Runner(tried, type(optimizer))
            for call in calls:
                torch.manual_seed(step)
                found = runner.run([(*members[n], states[n]) for n in call])
                for n, state in zip(call, found, strict=True):
                    states[n] = state
            for name, each in runner.attributes.items():
                if any(isinstance(found, Tensor) for found in _within(each)):
                    raise ValueError(f"it keeps tensors in its attribute {name}, outside `state`")
            for key, each in runner.shared.items():
                if any(isinstance(x, Tensor) and x.numel() > 1 for x in _within({key: each})):
                    raise ValueError(f"it keeps tensors under the key {key!r} of its state")
            runner.finish()
            draws |= runner.draws
    left = {
        "weights": [parameter.detach() for _, parameter in members],
        "states": states,
        "shared": tried.state,
        "options": [{**group, "params": None} for group in tried.param_groups],
        "attributes": own_attributes(tried),
    }
    return left, draws


def _same(one: Any, other: Any, depth: int = 8) -> bool:
    if type(one) is not type(other):
        return False
    if not depth:
        return True
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[k], other[k], depth - 1) for k in one)
    if isinstance(one, (list, tuple)):
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(_same(*pair, depth - 1) for pair in pairs)
    if type(one).__eq__ is object.__eq__:  # two copies of one object are never equal
        return _same(getattr(one, "__dict__", {}), getattr(other, "__dict__", {}), depth - 1)
    return one == other or one != one


def _obstacle(optimizer: torch.optim.Optimizer) -> str | None:
    """Why a step cannot run on copies, as far as that can be told without running it."""
    if isinstance(optimizer, torch.optim.LBFGS):
        return "it evaluates the closure several times per step, outside any update rule"
    if isinstance(optimizer, torch.optim.SparseAdam):
        return "it updates what sparse gradients touch, and gradients here are dense"
    if type(optimizer).__name__ == "LayerWiseDummyOptimizer":
        return "its step does nothing, and one optimizer for each parameter steps in backward()"
    parameters = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, each in own_attributes(optimizer).items():
        for found in _within(each) if name != "defaults" else ():
            if isinstance(found, torch.optim.Optimizer):
                return (
                    f"it wraps another optimizer, {type(found).__name__}, in its attribute {name}, "
                    f"which takes the steps: torch_bf16.convert(optimizer.{name}, recipe, "
                    "model=model) converts that one, and the wrapper is then left as it is"
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


def _refusal(kind: type, why: str) -> str:
    return f"{kind.__module__}.{kind.__qualname__} cannot be converted: {why}. {advice(kind)}"
