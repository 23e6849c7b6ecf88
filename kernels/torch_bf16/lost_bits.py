"""The bits that fp32 weights lose when they are cast to bf16.

They are kept until an optimizer makes its exact masters, so that these start from the weights that
the user had and not from the rounded ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from .recipe import Recipe
from .rounding import bf16_nearest, join16, split16

__all__ = ["forget", "remember", "remembered", "second_plane", "split", "sync_masters"]


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


def split(weight: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor | None]:
    """The bf16 parameter for an fp32 weight, and what an exact master needs beside it, if any."""
    nearest = weight.to(torch.bfloat16)
    planes = recipe.format_of("weights", nearest).planes
    if len(planes) == 1 or weight.device.type == "meta":
        return nearest, None
    if planes[1].dtype == torch.float32:
        return nearest, weight.clone(memory_format=torch.contiguous_format)
    # The halves belong together: their upper one rounds ties away from zero, not to even.
    upper, lower = split16(weight)
    return upper, lower.contiguous()


def remember(parameter: Tensor, rest: Tensor) -> None:
    """Keep what :func:`split` took from a parameter; a later write to it makes that void."""
    _lost[parameter] = _Lost(rest, parameter._version, _checksum(parameter))


def remembered(parameter: Tensor) -> bool:
    """Whether a cast kept bits of this parameter that no master has taken over yet."""
    return parameter in _lost


def second_plane(parameter: Tensor, dtype: torch.dtype) -> Tensor | None:
    """The second plane of an exact master of the weight that ``cast_module`` saw.

    Args:
        parameter: bf16.
        dtype: int16 for the lower half beside the parameter, int8 for that half rounded to its
            upper 8 bits, fp32 for the whole weight.

    Returns:
        Shaped like the parameter, or None if it was not cast or was written to since.
    """
    lost = _lost.get(parameter)
    if lost is None or lost.version != parameter._version or not _unwritten(parameter, lost):
        return None
    rest, visible = lost.rest.to(parameter.device), parameter.detach().contiguous()
    if dtype == torch.int8:
        halves = second_plane(parameter, torch.int16)
        # To nearest, and at the end of the range to what the visible half allows.
        return None if halves is None else ((halves.int() + 0x80) >> 8).clamp_(max=127).to(dtype)
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


def forget(parameter: Tensor) -> None:
    """Free what is remembered of a parameter; its master exists by now."""
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
        remember(parameter, rest)


def _checksum(parameter: Tensor) -> Tensor:
    return parameter.detach().view(torch.int16).sum(dtype=torch.int64)


def _unwritten(parameter: Tensor, lost: _Lost) -> bool:
    same = parameter.dtype == torch.bfloat16 and parameter.shape == lost.rest.shape
    return same and torch.equal(_checksum(parameter), lost.checksum.to(parameter.device))
