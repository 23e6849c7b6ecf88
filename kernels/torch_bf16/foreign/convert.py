"""Turning a user's ``torch.optim`` optimizer into ours, in place."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar, cast
from weakref import ref

import torch
from torch import nn

from torch_bf16.argument_checks import check_module
from torch_bf16.engine.engine import engine_of
from torch_bf16.optim.adafactor import Adafactor
from torch_bf16.optim.adam import Adam, AdamW, NAdam, RAdam
from torch_bf16.optim.muon import Muon
from torch_bf16.optim.optimizer import BF16Optimizer
from torch_bf16.optim.schedule_free import AdamWScheduleFree, SGDScheduleFree
from torch_bf16.optim.sgd import SGD, Adagrad, Lion, RMSprop
from torch_bf16.optim.unconverted import wraps_converted
from torch_bf16.optim.validation import check_group, check_options
from torch_bf16.recipe import Recipe, get_recipe
from torch_bf16.rules import FIRST_MOMENT, SECOND_MOMENT
from torch_bf16.sharding import WRAPPERS, register, shard_of
from torch_bf16.sharding.zero import Whole, is_zero
from torch_bf16.states.recoding import Changes

from .advice import EIGHT_BIT, SCHEDULE_FREE
from .capabilities import Traits, check_steps_on_copies
from .optimizer import ROLES, foreign_class

__all__ = ["CONVERTIBLE", "check_roles", "convert", "fused_class"]

CONVERTIBLE: dict[type, type[BF16Optimizer]] = {
    each.torch_class: each
    for each in (AdamW, Adam, NAdam, RAdam, Adagrad, RMSprop, Adafactor, Muon, SGD)
}
"""For each ``torch.optim`` class, ours."""

_T = TypeVar("_T", bound=torch.optim.Optimizer)


def convert(
    optimizer: _T,
    recipe: str | Recipe = "bf16-stochastic",
    *,
    model: nn.Module | None = None,
    backend: str | None = None,
    roles: Mapping[str, str | None] | None = None,
    elementwise: bool = False,
) -> _T:
    """Make an optimizer store its numbers by a recipe, in place.

    For the classes in :data:`CONVERTIBLE` a fused kernel takes the steps. Any other class runs its
    own ``step`` on fp32 copies of 64 MB of tensors at a time, or of one larger tensor; then
    weights, and states with a known name (:data:`ROLES`), are encoded by the recipe, and whatever
    else it keeps stays in fp32. Its first three steps are observed: an optimizer that couples its
    parameters, for example by a norm over all of them, steps on all at once. There are no trial
    calls: each step calls ``step`` once for each 64 MB of copies; only the first of these calls may
    be repeated for all parameters. Where ranks hold parts of a parameter, a class in
    ``torch_bf16.foreign.capabilities.ELEMENTWISE``, or one that ``elementwise=True`` vouches for,
    steps on the parts; for any other class every rank gathers whole tensors.

    ``train()`` and ``eval()`` of schedule-free classes rewrite the weights in the same way; AdamW
    and SGD of the package schedulefree become ours. So do Adam, AdamW and Lion of bitsandbytes with
    8-bit moments if the recipe's are ``int8``; otherwise they are refused.

    The object stays the same, and so do its parameter groups, hooks and LR schedulers. Moments that
    it already has are rounded into the recipe's formats at once. For a
    ``torch.distributed.optim.ZeroRedundancyOptimizer``, the local optimizer is converted.

    Args:
        optimizer: an instance of any subclass of ``torch.optim.Optimizer``; mutated.
        recipe: a name from :data:`torch_bf16.RECIPES` or a :class:`torch_bf16.Recipe`.
        model: the module that owns the parameters: their names, and not their order, then key the
            rounding noise.
        backend: name of the backend that takes the steps; None for the recipe's, else the best that
            works.
        roles: for a class without a kernel, states whose meaning their name does not say:
            ``{"z": "exp_avg"}`` has ``state["z"]`` stored as a first moment, None keeps it in fp32.
        elementwise: for a class without a kernel, whether each element is updated by its own
            weight, gradient, states and the options alone; nothing checks it.

    Returns:
        ``optimizer`` itself.

    Raises:
        ValueError: it was converted before, or a parameter's dtype or the name of a recipe or
            backend is not known; nothing has been changed.
        NotImplementedError: an option has no fused rule, or the class cannot step on copies: it
            keeps data outside ``state``, or wraps another optimizer. The message says what to use.
            Obstacles that show only when it steps, such as data that it then puts elsewhere, or a
            closure that it evaluates several times, are refused at the first ``step``, before any
            weight has changed.

    Example:
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> torch_bf16.convert(optimizer, "bf16-stochastic", model=model) is optimizer
        True
    """
    recipe = get_recipe(recipe)
    ours = isinstance(optimizer, BF16Optimizer) or is_zero(optimizer)
    if not ours and hasattr(optimizer, "__dict__") and wraps_converted(optimizer):
        return optimizer
    if is_zero(optimizer):
        local: Any = getattr(optimizer, "optim", None)
        if not isinstance(local, torch.optim.Optimizer):
            raise NotImplementedError(
                "this ZeroRedundancyOptimizer was made with overlap_with_ddp=True: it steps inside "
                "the backward pass by functions of torch that store fp32 numbers as they are. Make "
                "it with overlap_with_ddp=False. Nothing was changed"
            )
        if isinstance(local, BF16Optimizer):
            raise ValueError(
                "this ZeroRedundancyOptimizer was converted before, or made with torch_bf16's "
                f"{type(local).__name__}, which does not see the parameters of other ranks: make "
                "it with a class of torch.optim and convert it once"
            )
        convert(local, recipe, model=model, backend=backend, roles=roles, elementwise=elementwise)
        local._engine.names.whole = Whole(optimizer)  # pyright: ignore[reportAttributeAccessIssue]
        return optimizer
    if isinstance(optimizer, BF16Optimizer):
        raise ValueError(
            f"this {type(optimizer).__name__} already stores its numbers by recipe "
            f"{optimizer.recipe.name!r}. To change the recipe, make a new torch.optim optimizer "
            "and convert that one"
        )
    if model is not None:
        check_module("convert", model)
        register(model)
    check_roles(roles)
    if not isinstance(optimizer, torch.optim.Optimizer):
        known = ", ".join(f"torch.optim.{each.__name__}" for each in CONVERTIBLE)
        raise ValueError(
            f"convert takes a torch.optim optimizer, not {type(optimizer).__name__}; known: {known}"
        )
    target, traits = fused_class(optimizer, recipe), None
    if target is None:
        check_steps_on_copies(optimizer)
        target, traits = foreign_class(type(optimizer)), Traits(elementwise, named=set(roles or ()))
    if traits is None and (roles or elementwise):
        raise ValueError(
            f"roles={roles} and elementwise={elementwise} are for optimizers that step by their "
            f"own code, and {type(optimizer).__name__} has a kernel; leave them out"
        )
    for number, group in enumerate(optimizer.param_groups):
        if traits is None:
            check_options(group, number)
        check_group(group, number)
    wrapped = _scheduler_wrapper(optimizer)

    source, converted = type(optimizer), cast("Any", optimizer)
    attributes, groups = dict(vars(optimizer)), [dict(each) for each in optimizer.param_groups]
    converted.__class__ = target
    try:
        if source not in CONVERTIBLE and traits is None:
            _replace_options(converted, target)
        converted._setup(recipe, backend)
        if traits is not None:
            converted.roles = {k: v for k, v in {**ROLES, **(roles or {})}.items() if v}
            converted._engine.traits = traits
        if model is not None:
            converted._engine.names.given = _names(optimizer, model)
            converted._engine.model = ref(model)
        taken = _take_over(converted, fused=traits is None)
    except Exception:
        engine = engine_of(converted)
        if engine is not None and engine.accumulation is not None:
            engine.accumulation.remove()
        converted.__class__ = source
        vars(optimizer).clear()
        vars(optimizer).update(attributes)
        for group, options in zip(optimizer.param_groups, groups, strict=True):
            group.clear()
            group.update(options)
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


def check_roles(roles: Mapping[str, str | None] | None) -> None:
    """Refuse roles of states that no recipe has a format for."""
    if {*(roles or {}).values()} - {FIRST_MOMENT, SECOND_MOMENT, None}:
        raise ValueError(
            f"roles={dict(roles or {})}: a state takes the format of 'exp_avg' or 'exp_avg_sq', or "
            "None for fp32"
        )


def fused_class(optimizer: torch.optim.Optimizer, recipe: Recipe) -> type[BF16Optimizer] | None:
    """Ours for an optimizer, or None if it can step by its own code alone.

    One with 8-bit moments becomes ours with such, where the recipe asks for them.

    Raises:
        NotImplementedError: it has options that ours has not, or has stepped already.
    """
    kind = type(optimizer)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if (free := SCHEDULE_FREE.get(name)) is not None:
        return {each.__name__: each for each in (AdamWScheduleFree, SGDScheduleFree)}[free]
    ours, named = CONVERTIBLE.get(kind), EIGHT_BIT.get(name)
    if ours is not None or named is None:
        return ours
    target: Any = {"Adam": Adam, "AdamW": AdamW, "Lion": Lion}[named]
    moments = [recipe.exp_avg] + [recipe.exp_avg_sq] * (target is not Lion)
    if {*moments} != {"int8"}:
        return None
    args = getattr(optimizer, "args", None)
    others = [name for name in ("max_unorm", "skip_zeros") if getattr(args, name, None)]
    if getattr(args, "percentile_clipping", 100) != 100:
        others.append("percentile_clipping")
    if others or optimizer.state:
        what = f"its options {', '.join(others)}" if others else "the 8-bit states that it has"
        raise NotImplementedError(
            f"{kind.__name__} cannot become torch_bf16.{named}, which knows nothing of {what}. "
            "Make it without them, and convert it before its first step. Nothing was changed"
        )
    return target


def _replace_options(optimizer: torch.optim.Optimizer, target: type[BF16Optimizer]) -> None:
    """Leave an optimizer with the attributes and options of another class, and its own values."""
    made: Any = target
    example = made([nn.Parameter(torch.empty(1, device="cpu"))])
    for name in vars(optimizer).keys() - vars(example).keys():
        del vars(optimizer)[name]
    for group in optimizer.param_groups:
        for name in group.keys() - example.param_groups[0].keys() - {"initial_lr", "param_names"}:
            del group[name]
        for name, value in example.defaults.items():
            group.setdefault(name, value)
    defaults = optimizer.defaults
    kept = {key: defaults[key] for key in example.defaults if key in defaults}
    optimizer.defaults = {**example.defaults, **kept}


def _take_over(optimizer: Any, fused: bool) -> dict[Any, dict[str, Any]]:
    taken: dict[Any, dict[str, Any]] = {}
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            state = optimizer.state.get(parameter)
            if fused and state and float(state.get("step", 1)) == 0:
                taken[parameter] = {}  # torch's Adagrad makes it before the first step
            elif state:
                label = optimizer.label(number, position)
                shard = shard_of(parameter)
                taken[parameter] = optimizer._complete(state, shard, group, label, Changes())
    return taken


def _names(optimizer: Any, model: nn.Module) -> dict[tuple[int, int], str]:
    # The first name of a tied parameter counts, as in model.named_parameters().
    names = {parameter: name for name, parameter in reversed([*_named_parameters(model)])}
    return {
        (number, position): names[parameter]
        for number, group in enumerate(optimizer.param_groups)
        for position, parameter in enumerate(group["params"])
        if parameter in names
    }


def _named_parameters(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Parameter]]:
    for name, parameter in module.named_parameters(recurse=False):
        yield prefix + name, parameter
    for name, child in module.named_children():
        # Wrappers put themselves into the names; the noise must not depend on them.
        ddp = name == "module" and isinstance(module, nn.parallel.DistributedDataParallel)
        inner = prefix if ddp or name in WRAPPERS else f"{prefix}{name}."
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
