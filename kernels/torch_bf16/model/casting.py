"""Casting a model to bf16 without ruining what must stay as it is.

``model.to(torch.bfloat16)`` rounds rotary frequencies, drops the imaginary part of complex buffers
and makes metrics stop counting at 256. :func:`cast_model` casts parameters only.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from torch_bf16.argument_checks import check_module
from torch_bf16.errors import warn, warn_once
from torch_bf16.locks import fork_safe_lock
from torch_bf16.memory import is_shared, share_like
from torch_bf16.model import remainders
from torch_bf16.parameters import parameters_in
from torch_bf16.recipe import Recipe, get_recipe
from torch_bf16.sharding import any_flattened, has_run, units

from . import cast_modules
from .aliases import Alias, refuse_tied
from .autocast import fill_gaps, widen
from .blended_weights import watch_blends
from .carried_autocast import carry_autocast, check_scripted
from .carried_forward import (
    CarriedForward,
    called_through,
    device_type,
    own_forward,
    place_of_forward,
)
from .composite_operations import decompose_under_autocast
from .foreign_averages import watch_averages
from .gradient_hooks import NodeHooks
from .kept_fp32 import is_castable, is_narrow, kept, staying_ids
from .loading import watch_loading
from .mixed_dtypes import name_weights_in_errors
from .nested_tensors import map_arguments
from .slow_products import warn_slow_products
from .unconverted import warn_unconverted

__all__ = ["cast_model", "refuse_uncastable"]


def cast_model(model: nn.Module, recipe: str | Recipe = "bf16-stochastic") -> nn.Module:
    """Cast the fp32 parameters of a model to bf16, in place.

    Parameters keep their identity, so tied weights stay tied and existing optimizers keep working.
    Left as they are: all buffers, metrics of torchmetrics, modules with running statistics (batch
    norm; torch cannot mix bf16 gains with fp32 statistics on CPUs), every ``SyncBatchNorm``, peft's
    :func:`fp32_adapters`, and parameters that are not plain tensors (quantised weights) or are
    frozen in a dtype other than fp32. Buffers and frozen parameters over the memory of a weight
    follow it. Modules named by ``recipe.keep_fp32``, or by a model of transformers in its
    ``_keep_in_fp32_modules_strict``, are fp32 afterwards, even if they were bf16 or fp16, and
    compute in fp32, with their inputs upcast (tensors, also in tuples, lists and dicts).

    Call it before DDP or FSDP1 wraps the model, and before or after ``fully_shard`` or tensor
    parallelism, but before the first forward; on the meta device too.

    Args:
        model: mutated.
        recipe: name or :class:`Recipe`; decides which parameters get an exact master. For those,
            the bits that each fp32 weight loses are kept until the first step (2 bytes per element,
            4 with ``bf16+fp32``). If its ``compute`` is not ``"autocast"``, the model carries its
            arithmetic along: see :func:`carry_autocast`.

    Returns:
        ``model`` itself. If it will be trained on a CPU whose bf16 products are slow, a warning,
        once per process, says so and what to do.

    Raises:
        ValueError: a parameter is lazy, or fp16 or fp64 and not frozen, two lie over the same
            memory, the model is wrapped by DDP, FSDP1 or DataParallel over several GPUs, or has run
            under FSDP2, a group of FSDP2 would have two dtypes, or a pattern of ``keep_fp32``
            matches nothing; nothing has been changed then.
        NotImplementedError: the recipe computes in fp32 and a part is a ``ScriptModule``; nothing
            has been changed.

    Example:
        >>> model = cast_model(torch.nn.Linear(4, 4), "bf16-fp32-master")
        >>> model.weight.dtype
        torch.bfloat16
    """
    recipe = get_recipe(recipe)
    in_fp32, asked, to_fp32, to_bf16, in_bf16 = _parts(model, recipe)
    changed = {**to_fp32, **to_bf16}
    fill_gaps()
    decompose_under_autocast()
    name_weights_in_errors()
    watch_averages()
    watch_blends()
    watch_loading()
    gradient_of = {key: p.grad for key, p in changed.items() if p.grad is not None}
    _warn_of_buffers([*gradient_of.values()])
    _warn_of_shared(changed.values())
    hooks = NodeHooks.of(changed.values())
    aliases = Alias.of(model, changed.values())
    dropped_from: dict[int, remainders.Dropped] = {}
    for parameter in changed.values():
        parameter.grad = None

    # Takes all the memory that a parameter needs before it notes anything: an allocation that fails
    # then leaves the parameter as it was.
    def cast(t: Tensor) -> Tensor:
        if id(t) in to_fp32 and is_narrow(t):
            weight, dropped = t.detach().float(), None
        elif id(t) in to_bf16 and t.dtype == torch.float32:
            weight, dropped = remainders.split(t.detach(), recipe)
        else:
            return t
        gradient = gradient_of.get(id(t))
        converted = None if gradient is None else gradient.to(weight.dtype)
        weight = share_like(weight, t.detach())
        if converted is not None:
            gradient_of[id(t)] = converted
        if dropped is not None:
            dropped_from[id(t)] = dropped
        return weight

    try:
        with _keeping_parameters():
            # _apply, not a loop: RNNs and sharded modules override it to repair what they derive
            # from weights.
            model._apply(cast)
    finally:
        # Also if memory ran out half-way: a second call goes on from there.
        for key, gradient in gradient_of.items():
            changed[key].grad = gradient
        for each in hooks:
            each.pass_on()
        for each in aliases:
            each.restore()
        remainders.remember(model, dropped_from)
    cast_modules.note(model, recipe, to_bf16, in_bf16, {id(p) for p in asked})
    for each in _callable(in_fp32):
        _compute_in_fp32(each)
        # In evaluation, unless a part has a hook or autocast is on, TransformerEncoderLayer hands
        # the weights of its parts to a fused kernel, which takes one dtype.
        if recipe.compute == "bf16" and not each._forward_pre_hooks:
            each.register_forward_pre_hook(_nothing)
    if recipe.compute != "autocast":
        carry_autocast(model, compute=recipe.compute)
    if recipe.compute != "fp32" and _trains_on_cpu(model):
        warn_slow_products()
    if to_bf16:
        warn_unconverted(
            model,
            "Call torch_bf16.prepare(model, optimizer, recipe), or torch_bf16.convert, before its "
            "first step; or use an optimizer of torch_bf16",
        )
    return model


_conversions = fork_safe_lock()


@contextmanager
def _keeping_parameters() -> Iterator[None]:
    """Keep torch from putting new parameters into modules, which no optimizer would have."""
    with _conversions:  # the setting is the whole process's, and other threads may cast, too
        overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
        torch.__future__.set_overwrite_module_params_on_conversion(False)
        try:
            yield
        finally:
            torch.__future__.set_overwrite_module_params_on_conversion(overwrites)


def refuse_uncastable(model: nn.Module, recipe: str | Recipe = "bf16-stochastic") -> None:
    """Refuse what :func:`cast_model` would, and change nothing.

    For programs that cast several models, or convert an optimizer first, and want all or none.

    Raises:
        ValueError, NotImplementedError: as :func:`cast_model` does.
    """
    _parts(model, get_recipe(recipe))


class _Parts(NamedTuple):
    """The modules that compute in fp32, and the parameters by what becomes of them, by their ids.

    Those that were asked for in fp32 include the ones that are cast to it.
    """

    in_fp32: list[nn.Module]
    asked: list[nn.Parameter]
    to_fp32: dict[int, nn.Parameter]
    to_bf16: dict[int, nn.Parameter]
    in_bf16: set[int]


def _parts(model: nn.Module, recipe: Recipe) -> _Parts:
    """What a cast makes of a model, or why it cannot be cast."""
    check_module("cast_model", model)
    check_scripted(model, recipe.compute)
    in_fp32, asked = kept(recipe, model)
    staying = staying_ids(model, asked)
    to_fp32 = {id(p): p for p in asked if is_narrow(p)}
    to_bf16, in_bf16 = {}, set()
    for name, parameter in model.named_parameters():
        if id(parameter) in staying or not is_castable(parameter):
            continue
        if parameter.dtype in (torch.float16, torch.float64) and parameter.requires_grad:
            raise ValueError(
                f"parameter {name!r} of shape {tuple(parameter.shape)} is {parameter.dtype}; "
                "cast_model starts from float32. Call model.float() first"
            )
        if parameter.dtype == torch.float32:
            to_bf16[id(parameter)] = parameter
        elif parameter.dtype == torch.bfloat16:
            in_bf16.add(id(parameter))
    if changed := [*to_fp32.values(), *to_bf16.values()]:
        _check_wrappers(model, changed)
    refuse_tied(model, to_bf16.values())
    _check_groups(model, set(to_fp32), set(to_bf16))
    return _Parts(in_fp32, asked, to_fp32, to_bf16, in_bf16)


def _warn_of_buffers(gradients: list[Tensor]) -> None:
    """Warn if gradients lie in a buffer, as a wrapper that reduces them all at once makes it."""
    views = sum(type(g) is Tensor and g.untyped_storage().nbytes() > g.nbytes for g in gradients)
    if views:
        warn(
            f"gradients ({views} in all) lie in larger buffers, and after the cast each has memory "
            "of its own: what reduces, clips or zeroes the buffers does not reach it any more. "
            "Cast the model, or prepare() it, before what makes the buffers",
        )


def _warn_of_shared(parameters: Iterable[nn.Parameter]) -> None:
    """Warn if the cast takes weights out of memory that processes without ranks train together."""
    if multiprocessing.parent_process() is None or not any(map(is_shared, parameters)):
        return
    ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not (ranks or "RANK" in os.environ or "LOCAL_RANK" in os.environ):
        warn_once(
            "a model in memory that processes share was cast in a process that another one has "
            "started: its bf16 weights are this process's own, and no other process sees them "
            "move. To train one model by several processes (Hogwild), cast or prepare it in the "
            "process that starts the others"
        )


def _check_wrappers(module: nn.Module, changed: Iterable[nn.Parameter]) -> None:
    for sub in module.modules():
        if isinstance(sub, DistributedDataParallel):
            raise ValueError(
                "cast_model was given a module inside DistributedDataParallel, and a change of "
                "dtype would cut off the hooks that reduce its gradients. Cast first, then wrap it"
            )
        if isinstance(sub, DataParallel) and len(sub.device_ids) > 1:
            raise ValueError(
                f"cast_model was given a module inside DataParallel over {len(sub.device_ids)} "
                "GPUs, whose threads know nothing of the dtype of torch.autocast and would compute "
                "in fp16. Use DistributedDataParallel, or leave one GPU in CUDA_VISIBLE_DEVICES"
            )
    flat = any(type(sub).__name__ == "FullyShardedDataParallel" for sub in module.modules())
    # Where the root alone was wrapped, the module inside it has no wrapper of its own.
    if flat or any_flattened(changed):
        raise ValueError(
            "cast_model was given a module inside FullyShardedDataParallel, which has copied its "
            "parameters into flat ones. Cast first, then wrap it; or shard with "
            "torch.distributed.fsdp.fully_shard, which can be cast afterwards, too"
        )
    # The first forward settles the dtype in which gradients are reduced.
    if has_run(module):
        raise ValueError(
            "cast_model was given a module that fully_shard wraps and that has run already; "
            "FSDP settles its dtypes in the first forward. Cast before it"
        )


def _check_groups(module: nn.Module, to_fp32: set[int], to_bf16: set[int]) -> None:
    # FSDP2 raises only in its first forward, and names no parameters.
    names = {id(p): name for name, p in module.named_parameters()}
    for unit in units(module):
        first: dict[torch.dtype, str] = {}
        for p in unit.parameters:
            if id(p) in names and p.requires_grad and p.is_floating_point():
                dtype = torch.bfloat16 if id(p) in to_bf16 else p.dtype
                dtype = torch.float32 if id(p) in to_fp32 else dtype
                first.setdefault(dtype, names[id(p)])
        if len(first) > 1:
            held = " and ".join(f"{name!r} in {dtype}" for dtype, name in first.items())
            raise ValueError(
                f"one group of fully_shard would hold {held}, and FSDP reduces the gradients of a "
                "group in one dtype (norms with running statistics, peft's float32 adapters, and "
                "modules in keep_fp32 or in a model's own _keep_in_fp32_modules_strict, stay in "
                "float32). Give each module that stays a group of its own: fully_shard(norm) "
                "before the module around it. Nothing was changed"
            )


def _trains_on_cpu(module: nn.Module) -> bool:
    # If there is a GPU, a model that is on the CPU now may be on its way there.
    return not torch.accelerator.is_available() and any(
        p.device.type == "cpu" and p.requires_grad and p.dtype == torch.bfloat16 and p.ndim > 1
        for p in parameters_in(module)
    )


def _callable(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    # Nobody calls a ModuleList; its members compute.
    for module in modules:
        if type(module).forward is nn.Module.forward:
            yield from _callable(module.children())
        else:
            yield module


def _compute_in_fp32(module: nn.Module) -> None:
    own = own_forward(module)
    # A carried forward stays outermost, as it does around a forward of another library.
    carried = own if isinstance(own, CarriedForward) else None
    own = own if carried is None else carried.own
    if getattr(own, "func", None) is _forward_in_fp32:
        return
    forward = functools.partial(_forward_in_fp32, module, own)
    if carried is None:
        module.__dict__[place_of_forward(module)] = forward
    else:
        carried.own = forward


def _nothing(module: nn.Module, args: Any) -> None:
    """A hook that only has to exist."""


def _forward_in_fp32(module: nn.Module, own: Callable[..., Any] | None, /, *args, **kwargs):
    if not torch.compiler.is_compiling():
        called, shared = called_through(sys._getframe(1))
        if isinstance(shared, functools.partial) and shared.args[:1] == (module,):
            module = called
    forward = functools.partial(type(module).forward, module) if own is None else own
    if any(map(is_narrow, parameters_in(module))):  # cast later, by the user or another recipe
        return forward(*args, **kwargs)
    args, kwargs = map_arguments(widen, args, kwargs)
    device = device_type(module)
    # The meta device has no autocast.
    with nullcontext() if device == "meta" else torch.autocast(device, enabled=False):
        return forward(*args, **kwargs)
