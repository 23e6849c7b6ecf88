"""The bits that fp32 weights lose when they are cast to bf16.

They are kept until an optimizer makes its exact masters, so that these start from the weights that
the user had and not from the rounded ones.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils.weak import WeakIdKeyDictionary

from torch_bf16.numerics.rounding import bf16_nearest, join16, split16
from torch_bf16.recipe import Recipe
from torch_bf16.sharding.dtensor import (
    Span,
    box_of,
    is_dtensor,
    local,
    place_like,
    span_of,
    version_of,
)
from torch_bf16.sharding.fsdp1 import is_flattened, is_part, owners_of, shapes_of

__all__ = [
    "forget",
    "forget_absent",
    "remember",
    "remembered",
    "second_plane",
    "split",
    "sync_masters",
]


@dataclass
class _Lost:
    """What a cast took from a parameter.

    Attributes:
        rest: int16 halves in ``split16``'s sense, or fp32 weights where the recipe keeps those; of
            the local shard where the parameter was a DTensor.
        version: the parameter's; a write since then makes ``rest`` stale.
        sums: of the bf16 bits, for writes that move no version (``p.data.zero_()``).
        sharded: whether it was a DTensor.
        witness: shares the parameter's version and not its memory, and outlives it where FSDP1 puts
            a flat one in its place; None for a DTensor.
    """

    rest: Tensor
    version: int
    sums: Tensor
    sharded: bool
    witness: Tensor | None

    def moved(self) -> bool:
        """Whether the parameter was written to, as far as its version tells."""
        return self.witness is not None and self.witness._version != self.version


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
                sharded = is_dtensor(parameter)
                witness = None if sharded else parameter.detach()
                if witness is not None:
                    witness.data = witness.data.new_empty(0)
                version, sums = version_of(parameter), _sums(parameter)
                lost = kept[id(parameter)] = _Lost(rest, version, sums, sharded, witness)
                if not sharded:
                    _lost[parameter] = lost
            _owned.setdefault(owner, {})[name] = lost


def remembered(parameter: Tensor) -> bool:
    """Whether a cast kept bits of this parameter that no master has taken over yet."""
    if is_flattened(parameter) and is_part(parameter):
        return any(lost is not None for lost, _ in _of_part(parameter))
    return _find(parameter) is not None


def _of_part(parameter: Tensor) -> list[tuple[_Lost | None, Span | None]]:
    """What a cast took from each whole tensor in a part that FSDP1 has made."""
    return [(_owned.get(o, {}).get(name), span) for o, name, span in owners_of(parameter)]


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
    if is_flattened(parameter) and is_part(parameter):
        return _second_plane_of_part(parameter, dtype)
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
    return _plane(visible, rest, dtype)


def _second_plane_of_part(parameter: Tensor, dtype: torch.dtype) -> Tensor | None:
    memory = parameter.detach()
    if memory.dtype != torch.bfloat16:
        return None
    known = [
        (lost, span, _same_bits(memory[span.start : span.start + span.numel], span, lost))
        for lost, span in _of_part(parameter)
        if lost is not None and span is not None and not lost.moved()
    ]
    written = any(same is False for _, _, same in known)
    # Of a few elements their own sums say nothing; what writes one tensor mostly writes all.
    intact = [(lost, span) for lost, span, same in known if same or (same is None and not written)]
    if not intact:
        return None
    zeros = torch.zeros(memory.shape, dtype=dtype, device=memory.device)
    plane = memory.to(dtype) if dtype.is_floating_point else zeros
    for lost, span in intact:
        here = slice(span.start, span.start + span.numel)
        rest = lost.rest.view(-1)[span.offset : span.offset + span.numel].to(memory.device)
        plane[here] = _plane(memory[here], rest, dtype)
    return plane


def _plane(visible: Tensor, rest: Tensor, dtype: torch.dtype) -> Tensor:
    """The second plane from the bf16 weight and what was remembered of it."""
    if dtype == torch.int8:
        halves = _plane(visible, rest, torch.int16)
        # To nearest, and at the end of the range to what the visible half allows.
        return ((halves.int() + 0x80) >> 8).clamp_(max=127).to(dtype)
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
    if is_flattened(parameter) and is_part(parameter):
        taken = {id(each) for each, _ in _of_part(parameter)}
        for each in _owned.values():
            for name in [name for name, other in each.items() if id(other) in taken]:
                del each[name]
    elif is_dtensor(parameter):
        for each, name in _places(parameter):
            del each[name]
    elif lost is not None:
        for each in _owned.values():
            for name in [name for name, other in each.items() if other is lost]:
                del each[name]


def forget_absent(parameters: Iterable[Tensor]) -> None:
    """Free what is remembered of those that FSDP1 has left nothing of on this rank.

    They take part in no step, so that nothing else would.
    """
    for parameter in parameters:
        if is_flattened(parameter) and not parameter.numel():
            forget(parameter)


def sync_masters(module: nn.Module, src: int = 0, group: dist.ProcessGroup | None = None) -> None:
    """Give every replica the exact masters of one rank; call it right after wrapping.

    DDP broadcasts the bf16 weights of rank 0 when it wraps a module, which counts as a write on
    every rank: exact masters would start from the bf16 weights. This broadcasts what the cast took
    from the weights of ``src``, so that all start from its fp32 weights. Where replicas are made
    equal by other means than DDP (``dist.broadcast(p.data, 0)``), it is needed for more than that:
    without it each keeps lower halves of its own, and the replicas drift apart. The same goes for
    FSDP1 with ``sync_module_states=True``.

    Args:
        module: the wrapped module, or the one inside; the same on every rank.
        src: global rank whose masters count.
        group: process group; the default one if None.
    """
    # Of what is sharded by DTensors each rank has cast what it holds.
    given = [p for p in module.parameters() if p.dtype == torch.bfloat16 and not is_dtensor(p)]
    parts = [p for p in given if is_flattened(p) and is_part(p)]
    apart = {id(p) for p in parts}
    plain = [p for p in given if id(p) not in apart]
    send = functools.partial(_send, src=src, group=group)
    if plain:
        losts = [_lost.get(p) for p in plain]
        intact = [x if x and _unwritten(p, x) else None for p, x in zip(plain, losts, strict=True)]
        rests = {}
        for p, x, kind in zip(plain, intact, _kinds(intact, plain[0], src, group), strict=True):
            forget(p)
            if kind is not None:
                rests[id(p)] = send(x and x.rest, p.shape, kind, p.device)
        remember(module, rests)
    if parts:
        _sync_parts(parts, send, src, group)


def _sync_parts(
    parts: Sequence[Tensor], send: Any, src: int, group: dist.ProcessGroup | None
) -> None:
    """The same for what FSDP1 has flattened, which ``sync_module_states=True`` makes equal."""
    owned, intact = [], []
    for part in parts:
        for (owner, name, span), shape in zip(owners_of(part), shapes_of(part), strict=True):
            lost = _owned.get(owner, {}).get(name)
            owned.append((part.device, owner, name, shape, lost))
            held = part[:0] if span is None else part[span.start : span.start + span.numel]
            same = lost and (span is None or _same_bits(held.detach(), span, lost) is not False)
            intact.append(lost if same else None)
    kinds = _kinds(intact, parts[0], src, group)
    for (device, owner, name, shape, old), lost, kind in zip(owned, intact, kinds, strict=True):
        if kind is None:
            _owned.get(owner, {}).pop(name, None)
            continue
        rest = send(lost and lost.rest, shape, kind, device)
        size = -(-rest.numel() // _summed(rest.numel()))
        sums = send(lost and lost.sums, (size,), torch.int32, device)
        witness = None if old is None else old.witness
        version = 0 if witness is None else witness._version
        _owned.setdefault(owner, {})[name] = _Lost(rest, version, sums, False, witness)


def _kinds(
    losts: list[_Lost | None], like: Tensor, src: int, group: dist.ProcessGroup | None
) -> list[torch.dtype | None]:
    """What there is to send, which is for ``src`` to say: nothing, halves or whole weights."""
    known = [None, torch.int16, torch.float32]
    numbers = [0 if each is None else known.index(each.rest.dtype) for each in losts]
    kinds = torch.tensor(numbers, dtype=torch.uint8, device=like.device)
    dist.broadcast(kinds, src=src, group=group)
    return [known[kind] for kind in kinds.tolist()]


def _send(
    given: Tensor | None,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    src: int,
    group: dist.ProcessGroup | None,
) -> Tensor:
    if dist.get_rank() == src and given is not None:
        sent = given.to(device)
    else:
        sent = torch.empty(tuple(shape), dtype=dtype, device=device)
    # As bytes, because NCCL knows no 16-bit integers.
    dist.broadcast(sent.view(-1).view(torch.uint8), src=src, group=group)
    return sent


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
    same = _same_bits(bits, span_of(parameter, ""), lost)
    return version_of(parameter) == 0 if same is None else same


def _same_bits(bits: Tensor, span: Span, lost: _Lost) -> bool | None:
    """Whether a part has the bits that the cast made; None where it has no whole sum."""
    size = _summed(lost.rest.numel())
    bits = bits.view(torch.int16)
    e = torch.arange(bits.numel(), device=bits.device)
    places = (span.offset + e // span.width * span.pitch + e % span.width) // size
    numbers, at, counts = places.unique_consecutive(return_inverse=True, return_counts=True)
    found = torch.zeros(len(numbers), dtype=torch.int32, device=bits.device)
    found.index_add_(0, at, bits.to(torch.int32))
    complete = counts == size
    if not complete.any():
        return None
    return torch.equal(found[complete], lost.sums.to(bits.device)[numbers[complete]])
