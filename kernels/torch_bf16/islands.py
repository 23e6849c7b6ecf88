"""Casting a module to bf16 without ruining what must stay as it is.

``module.to(torch.bfloat16)`` rounds rotary frequencies, drops the imaginary part of complex buffers
and makes metrics stop counting at 256. :func:`cast_module` casts parameters only, leaves islands of
fp32 where they are needed, and remembers the bits that fp32 weights lose, so that exact masters
start from the weights the user had.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakIdKeyDictionary

from .cpu_autocast import fill_gaps
from .recipe import Recipe, get_recipe
from .rounding import split16

__all__ = ["cast_module", "lost_halves", "sync_masters"]


@dataclass
class _LostHalf:
    """The int16 halves that a cast took from a parameter, valid while its version is unchanged."""

    half: Tensor
    version: int


_lost: WeakIdKeyDictionary = WeakIdKeyDictionary()


def cast_module(module: nn.Module, recipe: str | Recipe = "true-bf16-stochastic") -> nn.Module:
    """Cast the fp32 parameters of a module to bf16, in place.

    Parameters keep their identity, so tied weights stay tied and optimizers made before keep
    working. What stays as it was: every buffer (rotary frequencies, complex ones, batch-norm
    statistics), metrics of torchmetrics, modules with running statistics (batch norm; torch cannot
    mix bf16 gains with fp32 statistics on CPUs), modules named by ``recipe.keep_fp32`` (which
    compute in fp32, their inputs upcast), and parameters that are not fp32 or not plain tensors
    (quantised weights).

    Call it before the module is wrapped by DDP: afterwards a change of dtype would cut the hooks
    that reduce gradients.

    Args:
        module: mutated.
        recipe: name or :class:`Recipe`; decides which parameters get an exact master, for which the
            lost lower half of each fp32 weight (2 bytes per element) is kept until the first step.

    Returns:
        ``module`` itself.

    Raises:
        ValueError: a parameter is fp16 or fp64, or a pattern of ``keep_fp32`` matches no module;
            nothing has been changed then.

    Example:
        >>> model = cast_module(torch.nn.Linear(4, 4), "bf16-fp32-master")
        >>> model.weight.dtype
        torch.bfloat16
    """
    recipe = get_recipe(recipe)
    islands = list(_islands(module, recipe.keep_fp32))
    kept = {id(p) for island in islands for p in island.parameters()}
    kept.update(id(p) for metric in _metrics(module) for p in metric.parameters())
    kept.update(id(p) for norm in _running_norms(module) for p in norm.parameters())
    named = [(n, p) for n, p in module.named_parameters() if id(p) not in kept and _is_plain(p)]
    for name, parameter in named:
        if parameter.dtype in (torch.float16, torch.float64):
            raise ValueError(
                f"parameter {name!r} of shape {tuple(parameter.shape)} is {parameter.dtype}; "
                "cast_module starts from float32. Call module.float() first"
            )
    chosen = {id(p): p for _, p in named if p.dtype == torch.float32}
    fill_gaps()
    gradients = {key: p.grad for key, p in chosen.items() if p.grad is not None}
    for parameter in chosen.values():
        parameter.grad = None
        if recipe.has_master(parameter.detach().to("meta", torch.bfloat16)):
            _lose(parameter)
    # _apply, not a loop: RNNs and sharded modules override it to repair what they derive from
    # weights.
    module._apply(lambda t: t.to(torch.bfloat16) if id(t) in chosen else t)
    for key, parameter in chosen.items():
        if key in gradients:
            parameter.grad = gradients[key].to(torch.bfloat16)
        if parameter in _lost:
            _lost[parameter].version = parameter._version
    for island in islands:
        island.forward = functools.partial(_forward_in_fp32, island)
    return module


def lost_halves(parameter: Tensor) -> Tensor | None:
    """The lower halves that :func:`cast_module` took from a parameter, in ``split16``'s sense.

    Returns:
        int16, shaped like the parameter, or None if it was not cast or was written to since.
    """
    lost = _lost.get(parameter)
    if lost is None or lost.version != parameter._version:
        return None
    return lost.half.to(parameter.device)


def forget_lost_halves(parameter: Tensor) -> None:
    """Free what :func:`cast_module` remembers of a parameter; its master exists by now."""
    _lost.pop(parameter, None)


def sync_masters(module: nn.Module, src: int = 0, group: dist.ProcessGroup | None = None) -> None:
    """Give every replica the exact masters of one rank; call it right after wrapping with DDP.

    DDP broadcasts the bf16 weights of rank 0 when it wraps a module. Replicas that were initialised
    differently would still hold their own lower halves; this broadcasts those too.

    Args:
        module: the wrapped module, or the one inside; the same on every rank.
        src: global rank whose masters count.
        group: process group; the default one if None.
    """
    for parameter in module.parameters():
        lost = _lost.get(parameter)
        if lost is not None:
            half = lost.half.to(parameter.device)
            # As bytes, because NCCL knows no 16-bit integers.
            dist.broadcast(half.view(-1).view(torch.uint8), src=src, group=group)
            _lost[parameter] = _LostHalf(half, parameter._version)


def _lose(parameter: Tensor) -> None:
    if parameter.device.type != "meta":
        _, half = split16(parameter.detach())
        _lost[parameter] = _LostHalf(half.contiguous(), parameter._version)


def _is_plain(parameter: Tensor) -> bool:
    # Quantised weights of other libraries are Parameters or subclasses that pretend to be floats.
    return type(parameter) is nn.Parameter and parameter.is_floating_point()


def _islands(module: nn.Module, keep_fp32: Iterable[str | type]) -> Iterator[nn.Module]:
    for key in keep_fp32:
        matches = [
            sub
            for name, sub in module.named_modules()
            if (isinstance(sub, key) if isinstance(key, type) else fnmatchcase(name, key))
        ]
        if not matches:
            known = [name for name, _ in module.named_modules() if name]
            raise ValueError(
                f"keep_fp32={key!r} matches no module of {type(module).__name__}; its modules are "
                + ", ".join(known[:20])
                + (", ..." if len(known) > 20 else "")
            )
        yield from matches


def _metrics(module: nn.Module) -> Iterator[nn.Module]:
    for sub in module.modules():
        if any(base.__module__.split(".")[0] == "torchmetrics" for base in type(sub).__mro__):
            yield sub


def _running_norms(module: nn.Module) -> Iterator[nn.Module]:
    for sub in module.modules():
        if isinstance(sub, _NormBase) and sub.track_running_stats:
            yield sub


def _forward_in_fp32(module: nn.Module, *args, **kwargs):
    def upcast(x):
        return x.float() if isinstance(x, Tensor) and x.dtype == torch.bfloat16 else x

    args, kwargs = tree_map(upcast, (args, kwargs))
    device = next(module.parameters()).device.type
    with torch.autocast(device, enabled=False):
        return type(module).forward(module, *args, **kwargs)
