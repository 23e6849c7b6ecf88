"""The remainders of fp32 weights that are cast to bf16: the bits that bf16 lacks.

They are kept until an optimizer makes its exact masters, which then start from the user's fp32
weights and not from the rounded ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from torch_bf16.argument_checks import check_module
from torch_bf16.locks import fork_safe_lock
from torch_bf16.numerics.rounding import bf16_nearest, join16, split16
from torch_bf16.parameters import own_parameter, parameters_in
from torch_bf16.recipe import Recipe
from torch_bf16.sharding import (
    Shard,
    any_flattened,
    local,
    places,
    settle_at_exit,
    shard_of,
    shown_like,
    unwrap_compiled,
)

from .fingerprint import Fingerprint

__all__ = [
    "Dropped",
    "find_remainder",
    "find_remainders",
    "find_unwritten",
    "forget",
    "forget_written",
    "loaded_since",
    "remember",
    "remember_planes",
    "second_plane",
    "split",
    "sync_masters",
    "sync_wrapped_masters",
]


@dataclass(frozen=True, slots=True)
class _Remainder:
    """The bits that a cast dropped from a parameter.

    Attributes:
        bits: int16 as ``split16`` makes them, or fp32 weights if the recipe keeps those; only of
            the local memory if the parameter was placed on a mesh.
        version: the parameter's version then; a later write makes ``bits`` stale.
        fingerprint: of the bf16 bits, to notice writes that do not change the version
            (``p.data.zero_()``).
        placed: whether the parameter is found by its place in a module only, because it was placed
            on a mesh when it was cast, or because torch's conversions replace parameters.
        places: modules that own the parameter, by their ids and the parameter's name there.
    """

    bits: Tensor
    version: int
    fingerprint: Fingerprint
    placed: bool
    places: dict[tuple[int, str], ref[nn.Module]] = field(default_factory=dict)

    def is_beyond_bf16(self) -> bool:
        """Whether the weights were any that bf16 cannot hold; waits for the device."""
        bits = self.bits
        beyond = bits if bits.dtype == torch.int16 else bits != bits.to(torch.bfloat16)
        return bool(beyond.any())


_by_parameter: WeakIdKeyDictionary = WeakIdKeyDictionary()
# The same, by the module that owns the parameter and its name there: ``fully_shard`` puts another
# parameter in that place. Sharded parameters are only here: torch does not convert a parameter that
# has a weak reference by swapping it.
_by_owner: MutableMapping[nn.Module, dict[str, _Remainder]] = WeakIdKeyDictionary()

# Other threads may train other models, whose remainders are in the same tables.
_lock = fork_safe_lock()

# The module that owns a parameter and the parameter's name there, by its id, as of the last search.
_places: dict[int, tuple[ref[nn.Module], str]] = {}


class Dropped(NamedTuple):
    """The bits that bf16 lacks of an fp32 weight, and the fingerprint of those that it has."""

    bits: Tensor
    fingerprint: Fingerprint


def split(weight: Tensor, recipe: Recipe) -> tuple[Tensor, Dropped | None]:
    """The bf16 parameter for an fp32 weight, and what an exact master needs besides, if any."""
    memory = local(weight)
    planes = recipe.format_of("weights", weight.shape).planes
    if len(planes) == 1 or weight.device.type == "meta":
        return shown_like(weight, memory.to(torch.bfloat16)), None
    if planes[1].dtype == torch.float32:
        visible = memory.to(torch.bfloat16)
        bits = memory.clone(memory_format=torch.contiguous_format)
    else:
        # Both halves belong together: the upper one rounds ties away from zero, not to even.
        visible, lower = split16(memory)
        bits = lower.contiguous()
    # The bits wait for the first step in the memory where the master will be.
    bits = bits.cpu() if recipe.offload == "states" else bits
    return shown_like(weight, visible), Dropped(bits, Fingerprint.of(visible))


def remember(module: nn.Module, dropped_from: Mapping[int, Dropped]) -> None:
    """Keep what :func:`split` dropped from a module's parameters, by the parameters' ids.

    A later write to a parameter makes it void.
    """
    remainders = {}
    for parameter in parameters_in(module):
        if (dropped := dropped_from.get(id(parameter))) is not None:
            remainders[id(parameter)] = _remainder(shard_of(parameter), *dropped)
    _keep(module, remainders)


def remember_planes(planes: Mapping[Tensor, Tensor], module: nn.Module | None) -> None:
    """Keep what an optimizer has beside weights, until it or another one makes masters of them.

    Args:
        planes: by parameter, this rank's part of its master's second plane, in any format.
        module: the module that has the parameters, if it is known; without it, those that are
            found by their place only are left out.
    """
    remainders = {}
    for parameter, plane in planes.items():
        bits = plane.to(torch.int16) << 8 if plane.dtype == torch.int8 else plane
        shard = shard_of(parameter)
        remainders[parameter] = _remainder(shard, bits, Fingerprint.of(shard.memory))
    if module is not None:
        _keep(module, {id(p): each for p, each in remainders.items()})
    with _lock:
        for parameter, each in remainders.items():
            if not each.placed and parameter not in _by_parameter:
                _by_parameter[parameter] = each


def _remainder(shard: Shard, bits: Tensor, fingerprint: Fingerprint) -> _Remainder:
    return _Remainder(bits, shard.version(), fingerprint, _found_by_place(shard))


def _keep(module: nn.Module, remainders: Mapping[int, _Remainder]) -> None:
    with _lock:
        _places.clear()
        for owner in module.modules():
            for name, parameter in owner._parameters.items():
                remainder = remainders.get(id(parameter))
                if parameter is not None and remainder is not None:
                    _keep_one(owner, name, parameter, remainder)


def _keep_one(owner: nn.Module, name: str, parameter: Tensor, remainder: _Remainder) -> None:
    before = None if remainder.placed else _by_parameter.get(parameter)
    remainder.places[id(owner), name] = ref(owner)
    if before is not None and before is not remainder:
        # Tied weights are loaded once for each of their modules.
        remainder.places.update(before.places)
    for place, reference in [*remainder.places.items()]:
        if (living := reference()) is None:
            del remainder.places[place]
        else:
            _by_owner.setdefault(living, {})[place[1]] = remainder
    if not remainder.placed:
        _by_parameter[parameter] = remainder


def find_remainder(shard: Shard) -> _Remainder | None:
    """The remainder of this parameter, if no master has taken it over yet."""
    return find_remainders([shard])[0]


def find_remainders(shards: Iterable[Shard]) -> list[_Remainder | None]:
    """:func:`find_remainder` for each shard; searches all modules once at most."""
    with _lock:
        return [*_found(shards)]


def _found(shards: Iterable[Shard]) -> Iterator[_Remainder | None]:
    fresh = False
    for shard in shards:
        remainder = None if shard.replaces_parameter else _by_parameter.get(shard.parameter)
        if remainder is not None or not _found_by_place(shard):
            yield remainder
            continue
        place = _place_of(shard, fresh)
        if place is None and _by_owner and not fresh:
            _index()
            fresh = True
            place = _place_of(shard, fresh)
        yield None if place is None else _by_owner.get(place[0], {}).get(place[1])


def find_unwritten(shards: Sequence[Shard]) -> list[_Remainder | None]:
    """:func:`find_remainders`, without those of parameters that were written since.

    A write may be a broadcast of the same numbers, so :func:`sync_masters` still counts these.
    """
    found = zip(shards, find_remainders(shards), strict=True)
    return [None if each is None or _was_written(shard, each) else each for shard, each in found]


def loaded_since(shard: Shard, version: int) -> bool:
    """Whether fp32 weights that bf16 cannot hold were loaded since a parameter had this version."""
    remainder = find_remainder(shard)
    if remainder is None or not _comparable(shard, remainder):
        return False
    return version < remainder.version == shard.version() and remainder.is_beyond_bf16()


def _found_by_place(shard: Shard) -> bool:
    """Whether this may be another parameter than the one that was cast, in the same place."""
    return (
        shard.replaces_parameter
        or torch.__future__.get_overwrite_module_params_on_conversion()
        or torch.__future__.get_swap_module_params_on_conversion()
    )


def _place_of(shard: Shard, fresh: bool) -> tuple[nn.Module, str] | None:
    """The module that owns a parameter, and the parameter's name there, if the index knows them."""
    reference, name = _places.get(id(shard.parameter), (None, ""))
    owner = None if reference is None else reference()
    # Another parameter may have taken the place, or the id, since.
    if owner is None or not (fresh or own_parameter(owner, name) is shard.parameter):
        return None
    return owner, name


def _index() -> None:
    _places.clear()
    for owner, each in _by_owner.items():
        for name in each:
            _places[id(own_parameter(owner, name))] = ref(owner), name
    # Whose modules show what FSDP2 has gathered from a forward pass until a backward pass. Also
    # those without a remainder, or each would be searched for anew.
    _places.update((id(parameter), (ref(owner), name)) for parameter, owner, name in places())


def second_plane(shard: Shard, dtype: torch.dtype) -> Tensor | None:
    """This rank's part of the second plane of an exact master of the weight that was cast.

    Args:
        shard: shard of a bf16 parameter.
        dtype: int16 for the remainder beside the parameter, int8 for the remainder rounded to its
            upper 8 bits, fp32 for the whole weight.

    Returns:
        The plane, or None if the parameter was not cast, or was written to since.
    """
    remainder = find_remainder(shard)
    if remainder is None or _was_written(shard, remainder):
        return None
    same = remainder.fingerprint.is_of(shard)
    if same is False:
        return None
    if same is None and not _comparable(shard, remainder) and shard.version() != 0:
        return None
    memory = shard.memory.contiguous()
    bits = remainder.bits.to(memory.device)
    return _plane(memory, bits if bits.shape == memory.shape else shard.take(bits), dtype)


def _comparable(shard: Shard, remainder: _Remainder) -> bool:
    """Whether versions can be compared: no other parameter has taken the cast one's place."""
    return shard.replaces_parameter == remainder.placed


def _was_written(shard: Shard, remainder: _Remainder) -> bool:
    """Whether a write that counts has made a remainder void."""
    return _comparable(shard, remainder) and remainder.version != shard.version()


def _plane(visible: Tensor, bits: Tensor, dtype: torch.dtype) -> Tensor:
    """The second plane, from the bf16 weight and the bits that were remembered."""
    if dtype == torch.int8:
        remainder = _plane(visible, bits, torch.int16)
        # Rounded to nearest, and at the end of the range to what the visible half allows.
        return ((remainder.int() + 0x80) >> 8).clamp_(max=127).to(dtype)
    if bits.dtype == dtype:
        return bits
    # The two formats round ties differently. Where that matters the master moves by one unit of
    # fp32's last place, to the side that the parameter is on.
    upper = visible.view(torch.int16).to(torch.int32) << 16
    if dtype == torch.int16:
        return (bits.view(torch.int32) - upper).clamp_(-(2**15), 2**15 - 1).to(torch.int16)
    master = join16(visible, bits)
    tie = bf16_nearest(master).view(torch.int16) != visible.view(torch.int16)
    return (master.view(torch.int32) + tie).view(torch.float32)


def forget(*shards: Shard) -> None:
    """Free the remainders of parameters, whose masters exist by now."""
    for shard, remainder in zip(shards, find_remainders(shards), strict=True):
        if remainder is not None:
            with _lock:
                _forget(shard, remainder)


def _forget(shard: Shard, remainder: _Remainder) -> None:
    if not shard.replaces_parameter:
        _by_parameter.pop(shard.parameter, None)
    for (_, name), reference in remainder.places.items():
        owner = reference()
        owned = {} if owner is None else _by_owner.get(owner, {})
        if owner is not None and owned.get(name) is remainder:
            del owned[name]
            if not owned:
                del _by_owner[owner]


def forget_written(shards: Sequence[Shard]) -> None:
    """Free the remainders of parameters that were written since, as by a load of bf16 weights."""
    found = zip(shards, find_remainders(shards), strict=True)
    forget(*(shard for shard, each in found if each and _was_written(shard, each)))


def sync_masters(
    model: nn.Module, src: int | None = None, group: dist.ProcessGroup | None = None
) -> None:
    """Give every replica the exact masters of one rank; call it right after wrapping.

    DDP broadcasts the bf16 weights of rank 0 when it wraps a module, which counts as a write on
    every rank: exact masters would start from the bf16 weights. This broadcasts the bits that the
    cast dropped on ``src``, so that all ranks start from its fp32 weights. If replicas are made
    equal by ``dist.broadcast(p.data, 0)``, or by FSDP1 with ``sync_module_states=True``, each would
    otherwise keep its own remainders, and the replicas would drift apart.

    Args:
        model: the wrapped module, or the one inside; the same on every rank.
        src: global rank whose masters count; None for the first of the group, as in DDP.
        group: process group; None for that of a DDP module, or the default one for other modules.
            Without any, there is one replica, and nothing happens.

    Raises:
        ValueError: ``model`` is not a module.
    """
    check_module("sync_masters", model)
    if not dist.is_available() or not dist.is_initialized():
        return
    settle_at_exit()
    wrapped = unwrap_compiled(model)
    if group is None and isinstance(wrapped, DistributedDataParallel):
        group = wrapped.process_group
    if src is None:
        src = 0 if group is None else dist.get_global_rank(group, 0)
    shards = [shard_of(p) for p in parameters_in(model) if p.dtype == torch.bfloat16]
    # Of parameters that are placed on a mesh, each rank has cast its own part.
    shards = [each for each in shards if not each.replaces_parameter]
    if not shards:
        return
    known = find_remainders(shards)
    # ``src`` tells the other ranks what it will send: nothing, remainders or whole weights.
    kinds = [
        each.bits.dtype if each and each.fingerprint.is_of(shard) is not False else None
        for shard, each in zip(shards, known, strict=True)
    ]
    dist.broadcast_object_list(kinds, src, group, shards[0].parameter.device)
    synced = {}
    forget(*shards)
    for shard, remainder, kind in zip(shards, known, kinds, strict=True):
        if kind is None:
            continue
        device = shard.parameter.device
        if dist.get_rank() == src and remainder is not None:
            bits, fingerprint = remainder.bits.to(device), remainder.fingerprint.to(device)
        else:
            bits = torch.empty(shard.shape, dtype=kind, device=device)
            fingerprint = Fingerprint.empty(bits.shape, device)
        for each in (bits, fingerprint.sums):
            # As bytes, because NCCL knows no 16-bit integers.
            dist.broadcast(each.view(-1).view(torch.uint8), src=src, group=group)
        bits = bits if remainder is None else bits.to(remainder.bits.device)
        synced[id(shard.parameter)] = _remainder(shard, bits, fingerprint)
    _keep(model, synced)


def sync_wrapped_masters(wrapped: nn.Module, sent: bool) -> None:
    """:func:`sync_masters` if a wrapper has sent weights: DDP does, FSDP1 if ``sent`` is true."""
    inner = unwrap_compiled(wrapped)
    sent = sent and any_flattened(parameters_in(inner))
    if sent or isinstance(inner, DistributedDataParallel):
        sync_masters(inner)
