"""Turning a user's ``torch.optim`` optimizer into ours, in place."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, TypeVar, cast
from weakref import ref

import torch
from torch import Tensor, nn

from torch_bf16.argument_checks import check_module
from torch_bf16.engine.engine import engine_of
from torch_bf16.engine.wrappers import held_optimizers
from torch_bf16.memory import share_like
from torch_bf16.model.remainders import find_remainder
from torch_bf16.optim.loading import read_placed
from torch_bf16.optim.optimizer import BF16Optimizer
from torch_bf16.optim.overview import placed
from torch_bf16.optim.shared_states import pass_on
from torch_bf16.optim.subclass_listing import leave_out_namesakes
from torch_bf16.parameters import parameters_of
from torch_bf16.recipe import Recipe, get_recipe
from torch_bf16.sharding import Shard, register, shard_of
from torch_bf16.sharding.zero_redundancy import ZeroNames
from torch_bf16.states.recoding import Changes, restored_remainders

from .capabilities import Traits
from .convertible import CONVERTIBLE, Conversion, check_conversion, check_roles
from .optimizer import ROLE_OF_STATE

__all__ = ["convert"]

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
    weights, and states with a known name (:data:`ROLE_OF_STATE`), are encoded by the recipe, and
    all other states stay in fp32. Its first three steps are observed: an optimizer that couples its
    parameters, for example by a norm over all of them, steps on all at once. There are no trial
    calls: each step calls ``step`` once for each 64 MB of copies; only the first of these calls may
    be repeated for all parameters. If ranks hold parts of a parameter, a class in
    ``torch_bf16.foreign.capabilities.ELEMENTWISE``, or one that ``elementwise=True`` vouches for,
    steps on the parts; for any other class every rank gathers whole tensors.

    ``train()`` and ``eval()`` of schedule-free classes rewrite the weights in the same way; AdamW
    and SGD of the package schedulefree become ours. So do Adam, AdamW and Lion of bitsandbytes with
    8-bit moments if the recipe's are ``int8``; otherwise they are refused.

    The object stays the same, and so do its parameter groups, hooks and LR schedulers. Moments that
    it already has are rounded into the recipe's formats at once. For a
    ``torch.distributed.optim.ZeroRedundancyOptimizer``, the local optimizer is converted. One that
    cannot be converted stays as it is if the cast of ``model`` leaves all of its parameters in
    fp32: SparseAdam for an embedding of ``keep_fp32``.

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
        ValueError: it was converted before, or it wraps one that was, by another recipe or with
            other arguments; or a parameter's dtype or the name of a recipe or backend is not known;
            nothing has been changed.
        NotImplementedError: an option has no fused rule, or the class cannot step on copies: it
            keeps data outside ``state``, or wraps another optimizer. The message says what to use.
            For obstacles that only a step reveals, such as data that it puts elsewhere, or a
            closure that it evaluates several times, the first ``step`` raises, before any weight
            has changed.

    Example:
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> torch_bf16.convert(optimizer, "bf16-stochastic", model=model) is optimizer
        True
    """
    recipe = get_recipe(recipe)
    if model is not None:
        check_module("convert", model)
    check_roles(roles)
    conversion = check_conversion("convert", optimizer, recipe, model)
    if conversion is None:
        _check_held(optimizer, backend, roles, elementwise)
        return optimizer
    if conversion.fused and (roles or elementwise):
        raise ValueError(
            f"roles={roles} and elementwise={elementwise} are for optimizers that step by their "
            f"own code, and {type(conversion.optimizer).__name__} has a kernel; leave them out"
        )
    if model is not None:
        register(model)
    leave_out_namesakes()
    _become(conversion, recipe, model, backend, roles, elementwise)
    if conversion.optimizer is not optimizer:
        conversion.optimizer._engine.names.zero = ZeroNames(optimizer)
        optimizer.register_load_state_dict_post_hook(_read_local)
    return optimizer


def _read_local(zero: Any) -> None:
    """Read the states that ZeRO's ``load_state_dict`` has put into the local one, past ours."""
    read_placed(zero.optim, zero.param_groups)


def _check_held(
    optimizer: Any, backend: str | None, roles: Mapping[str, str | None] | None, elementwise: bool
) -> None:
    for ours in held_optimizers(optimizer):
        if roles or elementwise or backend not in (None, ours.backend):
            raise ValueError(
                f"roles={roles}, elementwise={elementwise} and backend={backend!r} are for an "
                f"optimizer that is converted now, and this {type(optimizer).__name__} leaves the "
                f"step to its {type(ours).__name__}, which was converted before: leave them out, "
                "or pass them when you convert() that one, before it is wrapped. Nothing was "
                "changed"
            )


def _become(
    conversion: Conversion,
    recipe: Recipe,
    model: nn.Module | None,
    backend: str | None,
    roles: Mapping[str, str | None] | None,
    elementwise: bool,
) -> None:
    """Convert an optimizer, or leave it as it was if that fails."""
    optimizer, target, fused = conversion.optimizer, conversion.target, conversion.fused
    source, converted = type(optimizer), cast("Any", optimizer)
    attributes, groups = dict(vars(optimizer)), [dict(each) for each in optimizer.param_groups]
    converted.__class__ = target
    try:
        if source not in CONVERTIBLE and fused:
            _replace_options(converted, target)
        converted._setup(recipe, backend)
        if not fused:
            converted.roles = {k: v for k, v in {**ROLE_OF_STATE, **(roles or {})}.items() if v}
            converted._engine.traits = Traits(elementwise, named=set(roles or ()))
        if model is not None:
            parameters = parameters_of(optimizer)
            converted._engine.names.give(parameters, model)
            converted._engine.model = ref(model)
        taken = _take_over(converted, fused)
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
        if state:
            optimizer.state[parameter] = state
        else:
            optimizer.state.pop(parameter, None)
    pass_on(attributes, converted.state)
    # torch patches profiling and step hooks into a class when its first instance is made.
    converted._patch_step_function()
    if conversion.scheduled:
        optimizer.__dict__["step"] = _count_steps(optimizer)


def _replace_options(optimizer: torch.optim.Optimizer, target: type[BF16Optimizer]) -> None:
    """Give an optimizer the attributes and options of another class, with its own values."""
    constructor: Any = target
    example = constructor([nn.Parameter(torch.empty(1, device="cpu"))])
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
    for place, parameter in placed(optimizer):
        state = optimizer.state.get(parameter)
        if fused and state and float(state.get("step", 1)) == 0:
            taken[parameter] = {}  # torch's Adagrad makes it before the first step
        elif state:
            shard, group = shard_of(parameter), optimizer.param_groups[place.group]
            restored = restored_remainders(state)
            if restored and _holds_bf16(shard):
                state = {**state, **restored}
                if parameter.dtype == torch.float32:  # Accelerate casts the model afterwards
                    taken[parameter] = state
                    continue
            label = functools.partial(optimizer.label, *place)
            completed = optimizer._complete(state, shard, group, label, Changes())
            for key in completed.keys() & state.keys():
                if isinstance(completed[key], Tensor) and isinstance(state[key], Tensor):
                    share_like(completed[key], state[key])
            taken[parameter] = completed
    return taken


def _holds_bf16(shard: Shard) -> bool:
    """Whether fp32 weights were loaded from bf16 ones, and no step in fp32 has moved them since."""
    weight = shard.memory.detach()
    if weight.dtype == torch.float32:
        return torch.equal(weight.bfloat16().float(), weight)
    cast_off = find_remainder(shard)
    if cast_off is None:
        return False
    exact = weight.float() if cast_off.bits.is_floating_point() else torch.zeros_like(cast_off.bits)
    return torch.equal(cast_off.bits, exact.to(cast_off.bits.device))


def _count_steps(optimizer: torch.optim.Optimizer) -> Any:
    # As torch's LRScheduler does, to notice that the optimizer steps first, but with the new class.
    step, reference = type(optimizer).step, ref(optimizer)

    @functools.wraps(step)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        live = reference()
        live._opt_called = True  # pyright: ignore
        return step(live, *args, **kwargs)  # pyright: ignore

    wrapper._wrapped_by_lr_sched = True  # pyright: ignore
    return wrapper
