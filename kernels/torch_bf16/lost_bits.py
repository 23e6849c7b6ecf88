"""The bits that fp32 weights lose when they are cast to bf16.

They are kept until an optimizer makes its exact masters, so that these start from the weights that
the user had and not from the rounded ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils.weak import WeakIdKeyDictionary

from .recipe import Recipe
from .rounding import bf16_nearest, join16, split16
from .sharding import box_of, is_dtensor, local, place_like, span_of, version_of

__all__ = ["forget", "remember", "remembered", "second_plane", "split", "sync_masters"]


@dataclass
class _Lost:
    """What a cast took from a parameter.

    Attributes:
        rest: int16 halves in ``split16``'s sense, or fp32 weights where the recipe keeps those; of
            the local shard where the parameter was a DTensor.
        version: the parameter's; a write since then makes ``rest`` stale.
        sums: of the bf16 bits, for writes that move no version (``p.data.zero_()``).
        sharded: whether it was a DTensor.
    """

    rest: Tensor
    version: int
    sums: Tensor
    sharded: bool


_lost: WeakIdKeyDictionary = WeakIdKeyDictionary()
# The same under the module that owns the parameter and its name there: sharding puts another
# parameter in that place. DTensors are here alone: torch converts none that has a weak reference.
_owned: WeakKeyDictionary[nn.Module, dict[str, _Lost]] = WeakKeyDictionary()

# Elements whose bits are summed: what a shard lacks of its first and last sum cannot be compared.
_SUMMED = 64


def split(weight: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor | None]:
    """The bf16 parameter for an fp32 weight, and what an exact master needs beside it, if any."""
    memory = local(weight)
    nearest = place_like(weight, memory.to(torch.bfloat16))
    planes = recipe.format_of("weights", nearest).planes
    if len(planes) == 1 or weight.device.type == "meta":
        return nearest, None
    if planes[1].dtype == torch.float32:
        return nearest, memory.clone(memory_format=torch.contiguous_format)
    # The halves belong together: their upper one rounds ties away from zero, not to even.
    upper, lower = split16(memory)
    return place_like(weight, upper), lower.contiguous()


def remember(module: nn.Module, rests: Mapping[int, Tensor]) -> None:
    """Keep what :func:`split` took from parameters; a later write to one makes that void.

    Args:
        module: the module that was cast.
        rests: what was taken, by the parameter's id.
    """
    kept: dict[int, _Lost] = {}
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            rest = rests.get(id(parameter))
            if parameter is None or rest is None:
                continue
            lost = kept.get(id(parameter))
            if lost is None:
                lost = kept[id(parameter)] = _Lost(
                    rest, version_of(parameter), _sums(parameter), is_dtensor(parameter)
                )
                if not is_dtensor(parameter):
                    _lost[parameter] = lost
            _owned.setdefault(owner, {})[name] = lost


def remembered(parameter: Tensor) -> bool:
    """Whether a cast kept bits of this parameter that no master has taken over yet."""
    return _find(parameter) is not None


def _find(parameter: Tensor) -> _Lost | None:
    if not is_dtensor(parameter):
        return _lost.get(parameter)
    return next((each[name] for each, name in _places(parameter)), None)


def _places(parameter: Tensor) -> list[tuple[dict[str, _Lost], str]]:
    return [
        (each, name)
        for owner, each in _owned.items()
        for name in each
        if owner._parameters.get(name) is parameter
    ]


def second_plane(parameter: Tensor, dtype: torch.dtype) -> Tensor | None:
    """The second plane of an exact master of the weight that ``cast_module`` saw.

    Args:
        parameter: bf16.
        dtype: int16 for the lower half beside the parameter, int8 for that half rounded to its
            upper 8 bits, fp32 for the whole weight.

    Returns:
        This rank's part, or None if it was not cast or was written to since.
    """
    lost = _find(parameter)
    if lost is None or not _unwritten(parameter, lost):
        return None
    # Of a parameter that sharding has put in the place of the one that was cast this says nothing.
    if (is_dtensor(parameter) == lost.sharded) and lost.version != version_of(parameter):
        return None
    visible = local(parameter).detach().contiguous()
    rest = lost.rest.to(visible.device)
    if rest.shape != visible.shape:
        # A copy: a view would keep the whole tensor, and torch copies no DTensor over one.
        rest = rest[box_of(parameter)].clone(memory_format=torch.contiguous_format)
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
    lost = _lost.pop(parameter, None)
    if is_dtensor(parameter):
        for each, name in _places(parameter):
            del each[name]
    elif lost is not None:
        for each in _owned.values():
            for name in [name for name, other in each.items() if other is lost]:
                del each[name]


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
    # What is sharded is no replica: each rank has cast what it holds.
    parameters = [p for p in module.parameters() if p.dtype == torch.bfloat16 and not is_dtensor(p)]
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
    rests = {}
    for parameter, kind in zip(parameters, kinds.tolist(), strict=True):
        lost = _lost.get(parameter)
        forget(parameter)
        if kind == 0:
            continue
        dtype = torch.int16 if kind == 1 else torch.float32
        if dist.get_rank() == src and lost is not None:
            rest = lost.rest.to(parameter.device)
        else:
            rest = torch.empty(parameter.shape, dtype=dtype, device=parameter.device)
        # As bytes, because NCCL knows no 16-bit integers.
        dist.broadcast(rest.view(-1).view(torch.uint8), src=src, group=group)
        rests[id(parameter)] = rest
    remember(module, rests)


def _sums(parameter: Tensor) -> Tensor:
    bits = local(parameter).detach().reshape(-1).view(torch.int16)
    size = _summed(bits.numel())
    return pad(bits, (0, -bits.numel() % size)).view(-1, size).sum(1, dtype=torch.int32)


def _summed(numel: int) -> int:
    return _SUMMED if numel > 4096 else 1


def _unwritten(parameter: Tensor, lost: _Lost) -> bool:
    """Whether the bits are still those that the cast made, as far as a shard can be compared."""
    sums = lost.sums.to(parameter.device)
    if parameter.dtype != torch.bfloat16:
        return False
    if local(parameter).shape == lost.rest.shape:
        return torch.equal(_sums(parameter), sums)
    if parameter.shape != lost.rest.shape:
        return False
    bits = local(parameter).detach().reshape(-1).view(torch.int16)
    span, size = span_of(parameter, ""), _summed(lost.rest.numel())
    e = torch.arange(bits.numel(), device=bits.device)
    places = (span.offset + e // span.width * span.pitch + e % span.width) // size
    numbers, at, counts = places.unique_consecutive(return_inverse=True, return_counts=True)
    found = torch.zeros(len(numbers), dtype=torch.int32, device=bits.device)
    found.index_add_(0, at, bits.to(torch.int32))
    complete = counts == size
    if not complete.any():
        return version_of(parameter) == 0
    return torch.equal(found[complete], sums[numbers[complete]])
