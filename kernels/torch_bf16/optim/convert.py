"""Turning a user's ``torch.optim`` optimizer into ours, in place."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, TypeVar, cast
from weakref import ref

import torch
from torch import nn

from torch_bf16 import checkpoint
from torch_bf16.recipe import Recipe, get_recipe

from .adafactor import Adafactor
from .adagrad import Adagrad
from .adam import Adam, AdamW
from .admission import check_group
from .muon import Muon
from .nadam import NAdam
from .optimizer import BF16Optimizer
from .radam import RAdam
from .rmsprop import RMSprop
from .sgd import SGD

__all__ = ["CONVERTIBLE", "convert"]

CONVERTIBLE: dict[type, type[BF16Optimizer]] = {
    each.torch_class: each
    for each in (AdamW, Adam, NAdam, RAdam, Adagrad, RMSprop, Adafactor, Muon, SGD)
}
"""For each ``torch.optim`` class, ours."""

_T = TypeVar("_T", bound=torch.optim.Optimizer)

_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module")


def convert(
    optimizer: _T,
    recipe: str | Recipe = "true-bf16-stochastic",
    *,
    module: nn.Module | None = None,
    backend: str | None = None,
) -> _T:
    """Make a ``torch.optim`` optimizer store its numbers by a recipe, in place.

    The object stays the same, and so do its parameter groups, hooks, and the LR schedulers that
    were built on it before or will be after. State it already has is taken over: moments are
    rounded into the recipe's formats at once.

    Args:
        optimizer: exactly one of the ``torch.optim`` classes in :data:`CONVERTIBLE`; mutated.
        recipe: a name from :data:`torch_bf16.RECIPES` or a :class:`torch_bf16.Recipe`.
        module: the module that owns the parameters: their names then key the rounding noise, so
            that it does not depend on the order of the parameters.
        backend: name of the backend that takes the steps; None for the best that works.

    Returns:
        ``optimizer`` itself.

    Raises:
        ValueError: it was converted before, or a parameter's dtype or the name of a recipe or
            backend is not known; nothing has been changed.
        NotImplementedError: there is no fused rule for this class or option.

    Example:
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> torch_bf16.convert(optimizer, "bf16-stochastic", module=model) is optimizer
        True
    """
    recipe = get_recipe(recipe)
    if isinstance(optimizer, BF16Optimizer):
        raise ValueError(
            f"this {type(optimizer).__name__} already stores its numbers by recipe "
            f"{optimizer.recipe.name!r}; converting it again would change nothing or lose its "
            "state. To change the recipe, make a new torch.optim optimizer and convert that one"
        )
    if module is not None and not isinstance(module, nn.Module):
        raise ValueError(f"module must be a torch.nn.Module, not {type(module).__name__}")
    target = _target(optimizer)
    for number in range(len(optimizer.param_groups)):
        check_group(optimizer, number)
    wrapped = _scheduler_wrapper(optimizer)

    source, converted = type(optimizer), cast("Any", optimizer)
    attributes = dict(vars(optimizer))
    converted.__class__ = target
    try:
        converted._adopt(recipe, backend)
        if module is not None:
            converted._names = _names(optimizer, module)
        taken = _take_over(converted)
    except Exception:
        if converted._accumulation is not None:
            converted._accumulation.remove()
        converted.__class__ = source
        vars(optimizer).clear()
        vars(optimizer).update(attributes)
        raise
    for parameter, state in taken.items():
        optimizer.state[parameter] = state
        if not state:
            del optimizer.state[parameter]
    # torch hangs its profiling and step hooks on the class the first time that one is made.
    converted._patch_step_function()
    if wrapped:
        optimizer.__dict__["step"] = _count_steps(optimizer)
    return optimizer


def _target(optimizer: torch.optim.Optimizer) -> type[BF16Optimizer]:
    known = ", ".join(f"torch.optim.{each.__name__}" for each in CONVERTIBLE)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"convert takes a torch.optim optimizer, not {type(optimizer).__name__}; known: {known}"
        )
    target = CONVERTIBLE.get(type(optimizer))
    if target is None:
        kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        why = "there is no fused update rule for it"
        if isinstance(optimizer, torch.optim.LBFGS):
            why = "it evaluates the closure several times per step, outside any update rule"
        elif isinstance(optimizer, tuple(CONVERTIBLE)):
            why = "it is a subclass, whose own step would be replaced"
        raise NotImplementedError(
            f"{kind} cannot be converted: {why}. Use one of {known}, or keep this optimizer "
            "and train in float32 or bf16-mixed"
        )
    return target


def _take_over(optimizer: Any) -> dict[Any, dict[str, Any]]:
    taken = {}
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            rule, state = optimizer.rule_for(group, parameter), optimizer.state.get(parameter)
            if state and float(state.get("step", 1)) == 0:
                taken[parameter] = {}  # torch's Adagrad makes it before the first step
            elif state:
                taken[parameter] = checkpoint.complete_state(
                    state, parameter, rule, optimizer.recipe, optimizer.label(number, position)
                )
    return taken


def _names(optimizer: Any, module: nn.Module) -> dict[tuple[int, int], str]:
    known: dict[Any, str] = {}
    for name, parameter in _named_parameters(module):
        # The first name of a tied parameter counts, as in module.named_parameters().
        known.setdefault(parameter, name)
    return {
        (number, position): known[parameter]
        for number, group in enumerate(optimizer.param_groups)
        for position, parameter in enumerate(group["params"])
        if parameter in known
    }


def _named_parameters(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Parameter]]:
    for name, parameter in module.named_parameters(recurse=False):
        yield prefix + name, parameter
    for name, child in module.named_children():
        # Wrappers put themselves into the names; the noise must not depend on them.
        ddp = name == "module" and isinstance(module, nn.parallel.DistributedDataParallel)
        inner = prefix if ddp or name in _WRAPPERS else f"{prefix}{name}."
        yield from _named_parameters(child, inner)


def _scheduler_wrapper(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an LR scheduler put its own ``step`` on the optimizer, bound to the old class."""
    step = optimizer.__dict__.get("step")
    if step is None:
        return False
    # The scheduler's wrapper names the class's own step as what it wraps; a user's step on either
    # side of it does not, though functools.wraps may have copied the scheduler's mark.
    own = getattr(step, "__wrapped__", None) is type(optimizer).step
    if not own or not hasattr(step, "_wrapped_by_lr_sched"):
        raise NotImplementedError(
            f"the step method of this {type(optimizer).__name__} was replaced by {step!r}, which "
            "would go on running the old update; convert the optimizer first, replace its step then"
        )
    return True


def _count_steps(optimizer: torch.optim.Optimizer) -> Any:
    # What torch's LRScheduler does to see that the optimizer steps before it, over the new class.
    step, reference = type(optimizer).step, ref(optimizer)

    @functools.wraps(step)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        live = reference()
        live._opt_called = True  # pyright: ignore
        return step(live, *args, **kwargs)  # pyright: ignore

    wrapper._wrapped_by_lr_sched = True  # pyright: ignore
    return wrapper
