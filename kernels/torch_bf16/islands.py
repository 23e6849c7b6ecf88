"""Casting a module to bf16 without ruining what must stay as it is.

``module.to(torch.bfloat16)`` rounds rotary frequencies, drops the imaginary part of complex buffers
and makes metrics stop counting at 256. :func:`cast_module` casts parameters only, leaves islands of
fp32 where they are needed, and remembers the bits that fp32 weights lose, so that exact masters
start from the weights the user had.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakIdKeyDictionary

from .cpu_autocast import fill_gaps
from .recipe import Recipe, get_recipe
from .rounding import bf16_nearest, join16, split16

__all__ = ["cast_module", "forget_seed", "seed_of_master", "sync_masters"]


@dataclass
class _Lost:
    """What a cast took from a parameter.

    Attributes:
        rest: int16 halves in ``split16``'s sense, or fp32 weights where the recipe keeps those.
        version: the parameter's; a write since then makes ``rest`` stale.
        checksum: of the bf16 bits, for writes that move no version (``p.data.zero_()``).
    """

    rest: Tensor
    version: int
    checksum: Tensor


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
        ValueError: a parameter is fp16, fp64 or lazy, the module is wrapped by DDP, or a pattern of
            ``keep_fp32`` matches no module; nothing has been changed then.

    Example:
        >>> model = cast_module(torch.nn.Linear(4, 4), "bf16-fp32-master")
        >>> model.weight.dtype
        torch.bfloat16
    """
    recipe = get_recipe(recipe)
    if not isinstance(module, nn.Module):
        raise ValueError(f"cast_module takes a torch.nn.Module, not {type(module).__name__}")
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
    for name, parameter in module.named_parameters():
        if is_lazy(parameter):
            raise ValueError(
                f"parameter {name!r} is not initialised yet and would come out as float32; run the "
                "module once, then call cast_module"
            )
    if chosen and any(isinstance(sub, DistributedDataParallel) for sub in module.modules()):
        raise ValueError(
            "cast_module was given a module inside DistributedDataParallel, whose hooks a change "
            "of dtype would cut: gradients would not be reduced any more. Cast first, then wrap it"
        )
    fill_gaps()
    gradients = {key: p.grad for key, p in chosen.items() if p.grad is not None}
    rests = {}
    for parameter in chosen.values():
        parameter.grad = None

    def cast(t: Tensor) -> Tensor:
        if id(t) not in chosen or t.dtype != torch.float32:
            return t
        weight, rests[id(t)] = _split(t.detach(), recipe)
        return weight

    # _apply, not a loop: RNNs and sharded modules override it to repair what they derive from
    # weights.
    module._apply(cast)
    for key, parameter in chosen.items():
        if key in gradients:
            parameter.grad = gradients[key].to(torch.bfloat16)
        if (rest := rests.get(key)) is not None:
            _lost[parameter] = _Lost(rest, parameter._version, _checksum(parameter))
    for island in _callable(islands):
        island.forward = functools.partial(_forward_in_fp32, island)
    return module


def seed_of_master(parameter: Tensor, dtype: torch.dtype) -> Tensor | None:
    """The second plane of an exact master of the weight that :func:`cast_module` saw.

    Args:
        parameter: bf16.
        dtype: int16 for the lower half beside the parameter, fp32 for the whole weight.

    Returns:
        Shaped like the parameter, or None if it was not cast or was written to since.
    """
    lost = _lost.get(parameter)
    if lost is None or lost.version != parameter._version or not _unwritten(parameter, lost):
        return None
    rest, visible = lost.rest.to(parameter.device), parameter.detach().contiguous()
    if rest.dtype == dtype:
        return rest
    # The two formats round ties differently. Where that matters the master moves by one unit of
    # fp32's last place, to the side that the parameter is on.
    upper = visible.view(torch.int16).to(torch.int32) << 16
    if dtype == torch.int16:
        return (rest.view(torch.int32) - upper).clamp_(-(2**15), 2**15 - 1).to(torch.int16)
    master = join16(visible, rest)
    tie = bf16_nearest(master).view(torch.int16) != visible.view(torch.int16)
    return (master.view(torch.int32) + tie).view(torch.float32)


def forget_seed(parameter: Tensor) -> None:
    """Free what :func:`cast_module` remembers of a parameter; its master exists by now."""
    _lost.pop(parameter, None)


def sync_masters(module: nn.Module, src: int = 0, group: dist.ProcessGroup | None = None) -> None:
    """Give every replica the exact masters of one rank; call it right after wrapping with DDP.

    DDP broadcasts the bf16 weights of rank 0 when it wraps a module, which counts as a write on
    every rank: exact masters would start from the bf16 weights. This broadcasts what the cast took
    from the weights of ``src``, so that all start from its fp32 weights. Where replicas are made
    equal by other means than DDP (``dist.broadcast(p.data, 0)``), it is needed for more than that:
    without it each keeps lower halves of its own, and the replicas drift apart.

    Args:
        module: the wrapped module, or the one inside; the same on every rank.
        src: global rank whose masters count.
        group: process group; the default one if None.
    """
    parameters = [p for p in module.parameters() if p.dtype == torch.bfloat16]
    if not parameters:
        return
    # What there is to send is for src to say: 0 nothing, 1 halves, 2 whole weights.
    kinds = torch.zeros(len(parameters), dtype=torch.uint8)
    for number, parameter in enumerate(parameters):
        lost = _lost.get(parameter)
        if lost is not None and _unwritten(parameter, lost):
            kinds[number] = 1 if lost.rest.dtype == torch.int16 else 2
    kinds = kinds.to(parameters[0].device)
    dist.broadcast(kinds, src=src, group=group)
    for parameter, kind in zip(parameters, kinds.tolist(), strict=True):
        lost = _lost.pop(parameter, None)
        if kind == 0:
            continue
        dtype = torch.int16 if kind == 1 else torch.float32
        if dist.get_rank() == src and lost is not None:
            rest = lost.rest.to(parameter.device)
        else:
            rest = torch.empty(parameter.shape, dtype=dtype, device=parameter.device)
        # As bytes, because NCCL knows no 16-bit integers.
        dist.broadcast(rest.view(-1).view(torch.uint8), src=src, group=group)
        _lost[parameter] = _Lost(rest, parameter._version, _checksum(parameter))


def _split(weight: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor | None]:
    """The bf16 parameter for an fp32 weight, and what a master needs beside it."""
    nearest = weight.to(torch.bfloat16)
    planes = recipe.format_of("weights", nearest).planes
    if len(planes) == 1 or weight.device.type == "meta":
        return nearest, None
    if planes[1].dtype == torch.float32:
        return nearest, weight.clone(memory_format=torch.contiguous_format)
    # The halves belong together: their upper one rounds ties away from zero, not to even.
    upper, lower = split16(weight)
    return upper, lower.contiguous()


def _checksum(parameter: Tensor) -> Tensor:
    return parameter.detach().view(torch.int16).sum(dtype=torch.int64)


def _unwritten(parameter: Tensor, lost: _Lost) -> bool:
    same = parameter.dtype == torch.bfloat16 and parameter.shape == lost.rest.shape
    return same and torch.equal(_checksum(parameter), lost.checksum.to(parameter.device))


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


def _callable(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    # Nobody calls a ModuleList; its members compute.
    for module in modules:
        if type(module).forward is nn.Module.forward:
            yield from _callable(module.children())
        else:
            yield module


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
    tensors = itertools.chain(module.parameters(), module.buffers())
    device = next((t.device.type for t in tensors), "cpu")
    with torch.autocast(device, enabled=False):
        return type(module).forward(module, *args, **kwargs)
