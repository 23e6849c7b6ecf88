"""What an optimizer becomes by conversion, or why it cannot be converted; before any change."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from torch_bf16.argument_checks import check_module
from torch_bf16.engine.wrappers import held_optimizers, optimizers_in
from torch_bf16.errors import full_name
from torch_bf16.model.kept_fp32 import fp32_parameters
from torch_bf16.optim.adafactor import Adafactor
from torch_bf16.optim.adagrad import Adagrad, RMSprop
from torch_bf16.optim.adam import Adam, AdamW, NAdam, RAdam
from torch_bf16.optim.lion import Lion
from torch_bf16.optim.muon import Muon
from torch_bf16.optim.optimizer import BF16Optimizer
from torch_bf16.optim.schedule_free import AdamWScheduleFree, SGDScheduleFree
from torch_bf16.optim.sgd import SGD
from torch_bf16.optim.validation import check_group, check_options, check_real
from torch_bf16.parameters import parameters_of
from torch_bf16.recipe import Recipe, get_recipe
from torch_bf16.rules import FIRST_MOMENT, SECOND_MOMENT
from torch_bf16.sharding.zero_redundancy import is_zero

from .advice import SCHEDULE_FREE, refusal_of_holder
from .capabilities import check_steps_on_copies
from .eight_bit import eight_bit, overridden
from .optimizer import foreign_class

__all__ = [
    "CONVERTIBLE",
    "Conversion",
    "check_conversion",
    "check_roles",
    "check_same",
    "fused_class",
    "refuse_unconvertible",
]

_FORMATS = tuple(f.name for f in dataclasses.fields(Recipe) if f.compare and f.name != "name")

CONVERTIBLE: dict[type, type[BF16Optimizer]] = {
    each.torch_class: each
    for each in (AdamW, Adam, NAdam, RAdam, Adagrad, RMSprop, Adafactor, Muon, SGD)
}
"""Our class for each class of ``torch.optim``."""


@dataclasses.dataclass(frozen=True)
class Conversion:
    """What an optimizer becomes.

    Attributes:
        optimizer: the optimizer to convert; for a ``ZeroRedundancyOptimizer``, the local one.
        target: the class that it gets.
        fused: whether kernels take its steps, and not its own code.
        scheduled: whether an LR scheduler has wrapped its ``step``.
    """

    optimizer: Any
    target: type[BF16Optimizer]
    fused: bool
    scheduled: bool


def check_conversion(
    function: str,
    optimizer: Any,
    recipe: Recipe,
    model: nn.Module | None = None,
    cast: Collection[int] = (),
) -> Conversion | None:
    """What an optimizer becomes; None if it stays as it is.

    So does one that holds others, which were converted before, and one that cannot be converted but
    trains only parameters that the model's cast leaves in fp32.

    Args:
        function: name of the public function, for messages.
        optimizer: the optimizer; not changed.
        recipe: the requested recipe.
        model: names the parameters in messages, where the optimizer does not know their names.
        cast: ids of parameters that will have another dtype by then.

    Raises:
        ValueError: it was converted before, an optimizer inside was converted by another recipe, it
            is not an optimizer, or an option is out of range.
        NotImplementedError: it has no fused rule and cannot step on copies, or the recipe offloads
            states.
    """
    if is_zero(optimizer):
        local: Any = getattr(optimizer, "optim", None)
        if not isinstance(local, torch.optim.Optimizer):
            raise NotImplementedError(
                "this ZeroRedundancyOptimizer was made with overlap_with_ddp=True: it steps inside "
                "the backward pass by functions of torch that store fp32 numbers as they are. Make "
                "it with overlap_with_ddp=False. Nothing was changed"
            )
        if not isinstance(local, BF16Optimizer):
            return check_conversion(function, local, recipe, model, cast)
        if local._engine.names.zero is None:  # which a conversion sets
            raise ValueError(
                f"this ZeroRedundancyOptimizer was made with torch_bf16's {type(local).__name__}, "
                "which does not see the parameters of other ranks: make it with a class of "
                "torch.optim and convert it"
            )
    if isinstance(optimizer, BF16Optimizer):
        raise ValueError(
            f"this {type(optimizer).__name__} already stores its numbers by recipe "
            f"{optimizer.recipe.label!r}. To change the recipe, make a new torch.optim optimizer "
            "and convert that one"
        )
    if held := held_optimizers(optimizer):
        for each in held:
            made = f"the {type(each).__name__} in this {type(optimizer).__name__} was made with"
            check_same(function, recipe, each.recipe, made)
        return None
    if not isinstance(optimizer, torch.optim.Optimizer):
        known = ", ".join(f"torch.optim.{each.__name__}" for each in CONVERTIBLE)
        raise ValueError(
            refusal_of_holder(function, optimizer)
            or f"{function} takes a torch.optim optimizer, not {type(optimizer).__name__}; known: "
            f"{known}"
        )
    target = fused_class(optimizer, recipe)
    if target is None:
        try:
            check_steps_on_copies(optimizer)
        except NotImplementedError:
            if model is not None and _stays_fp32(optimizer, recipe, model):
                return None
            raise
        if recipe.offload != "none":
            raise NotImplementedError(
                f"offload={recipe.offload!r} is for optimizers with a fused rule, and "
                f"{type(optimizer).__name__} steps by its own code on fp32 copies. Leave offload "
                "out, or use an optimizer of torch_bf16. Nothing was changed"
            )
    named = () if model is None else model.named_parameters()
    of_model = {id(parameter): name for name, parameter in named}
    for number, group in enumerate(optimizer.param_groups):
        if target is not None:
            check_options(group, number)
        given = [of_model.get(id(p), "") for p in group["params"]]
        check_group(group, number, given, cast)
        if target in (Adafactor, Muon):
            check_real(group, number, target.__name__, given)
    _refuse_old_loading(optimizer)
    ours = target or foreign_class(type(optimizer))
    return Conversion(optimizer, ours, target is not None, _scheduler_wrapper(optimizer))


def refuse_unconvertible(
    asked: Iterable[tuple[torch.optim.Optimizer, str | Recipe, nn.Module | None]],
) -> None:
    """Refuse what :func:`torch_bf16.convert` would of several optimizers, and change nothing.

    States that they have already are not looked at.

    Args:
        asked: an optimizer, its recipe, and the module that owns its parameters, in the order in
            which they are to be converted. One that holds an earlier one leaves its steps to it.

    Raises:
        ValueError, NotImplementedError: as :func:`torch_bf16.convert` does.
    """
    before: set[int] = set()
    for optimizer, recipe, model in asked:
        if model is not None:
            check_module("convert", model)
        if before.isdisjoint(map(id, optimizers_in(optimizer).values())):
            check_conversion("convert", optimizer, get_recipe(recipe), model)
        before.add(id(optimizer))


def _stays_fp32(optimizer: torch.optim.Optimizer, recipe: Recipe, model: nn.Module) -> bool:
    """Whether a model's cast leaves all parameters of an optimizer in fp32."""
    try:
        staying = {id(p) for p in fp32_parameters(model, recipe).values()}
    except ValueError:  # a pattern of keep_fp32 matches nothing in it, which its cast will say
        return False
    trained = {id(p) for p in parameters_of(optimizer)}
    return bool(trained) and trained <= staying


def check_same(
    function: str, asked: Recipe, found: Recipe, where: str, fields: Sequence[str] = _FORMATS
) -> None:
    """Raise if a requested recipe differs from one that was applied already.

    Args:
        function: name of the public function.
        asked: the requested recipe.
        found: the recipe that was applied already.
        where: what it was applied to; begins the message.
        fields: fields that must be the same; by default all on which formats depend.

    Raises:
        ValueError: the recipes differ.
    """
    differing = [
        f"{name} is {getattr(found, name)!r} there and {getattr(asked, name)!r} here"
        for name in fields
        if getattr(found, name) != getattr(asked, name)
    ]
    if differing:
        raise ValueError(
            f"{where} recipe {found.label!r} and {function} was asked for {asked.label!r}: "
            f"{', '.join(differing)}. Use one recipe for both: call {function} with the existing "
            "one's recipe, or make a new one in its place. Nothing was changed"
        )


def check_roles(roles: Mapping[str, str | None] | None) -> None:
    """Raise for a role of states that no recipe has a format for."""
    known = (FIRST_MOMENT, SECOND_MOMENT, None)
    given: Any = {} if roles is None else roles
    if not isinstance(given, Mapping) or not all(each in known for each in given.values()):
        raise ValueError(
            f"roles={roles!r} must be a dict of states' names: a state takes the format of "
            "'exp_avg' or 'exp_avg_sq', or None for fp32"
        )


def fused_class(optimizer: torch.optim.Optimizer, recipe: Recipe) -> type[BF16Optimizer] | None:
    """Our fused class for an optimizer, or None if it can only step by its own code.

    An optimizer with 8-bit moments gets our class if the recipe has 8-bit moments, too.

    Raises:
        NotImplementedError: it has options that our class lacks, or has stepped already.
    """
    kind = type(optimizer)
    name = full_name(kind)
    if (free := SCHEDULE_FREE.get(name)) is not None:
        return {each.__name__: each for each in (AdamWScheduleFree, SGDScheduleFree)}[free]
    ours, named = CONVERTIBLE.get(kind), eight_bit(optimizer)
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
    others += overridden(optimizer)
    if others or optimizer.state:
        what = f"its options {', '.join(others)}" if others else "the 8-bit states that it has"
        raise NotImplementedError(
            f"{kind.__name__} cannot become torch_bf16.{named}, which knows nothing of {what}. "
            "Make it without them, and convert it before its first step. Nothing was changed"
        )
    return target


def _refuse_old_loading(optimizer: torch.optim.Optimizer) -> None:
    """Refuse a replaced ``load_state_dict`` that goes on calling that of the old class.

    nanotron's ``NamedOptimizer`` puts such a function on the optimizer that it wraps.
    """
    load = optimizer.__dict__.get("load_state_dict")
    called = [load]
    if isinstance(load, functools.partial):
        called += [load.func, *load.args]
    function = getattr(load, "__func__", load)
    if inspect.isfunction(function):
        called += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # it is empty
                called.append(cell.cell_contents)
    own = type(optimizer).load_state_dict
    if any(own in (each, getattr(each, "__func__", None)) for each in called):
        raise NotImplementedError(
            f"the load_state_dict method of this {type(optimizer).__name__} was replaced by "
            f"{getattr(load, '__qualname__', type(load).__name__)}, which would go on loading as "
            "before, and cast each moment to its parameter's dtype. Convert first, and wrap the "
            "method then. Nothing was changed"
        )


def _scheduler_wrapper(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an LR scheduler put its own ``step`` on the optimizer, bound to the old class."""
    step = optimizer.__dict__.get("step")
    if step is None:
        return False
    # The scheduler's wrapper directly wraps the class's own step. With a user's step inside or
    # around it that is not so, though functools.wraps may have copied the scheduler's mark.
    own = getattr(step, "__wrapped__", None) is type(optimizer).step
    if not own or not hasattr(step, "_wrapped_by_lr_sched"):
        replaced_by = getattr(step, "__qualname__", type(step).__name__)
        raise NotImplementedError(
            f"the step method of this {type(optimizer).__name__} was replaced by {replaced_by}, "
            "which would go on running the old update. If it rounds or releases by itself, leave "
            "it out: the converted optimizer does both. If it wraps the step, convert first and "
            "wrap the step then"
        )
    return True
