"""Sends tensors from each rank of a group to some of the others, in one message per pair."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Like", "all_gather", "exchange", "group_of", "world_size"]

Like = tuple[int, torch.dtype]
"""The number of elements and the dtype of a tensor of one dimension."""

# Each tensor begins at a multiple of this in a message, so that it can be viewed in its dtype.
_ALIGNED = 16

# The default group of the process, and the groups made of some of its ranks, by ranks.
_known: tuple[Any, dict[tuple[int, ...], Any]] = (None, {})


def world_size() -> int:
    """The number of processes of the default group; 1 if there is none."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def group_of(ranks: Sequence[int]) -> Any:
    """A process group of these ranks, all of which must call this; made once."""
    global _known
    if _known[0] is not dist.group.WORLD:
        _known = dist.group.WORLD, {}
    groups, key = _known[1], tuple(ranks)
    if key not in groups:
        groups[key] = dist.new_group([*ranks], use_local_synchronization=True)
    return groups[key]


def all_gather(whole: Tensor, share: Tensor, group: Any) -> None:
    """Fill ``whole``, ``[ranks * n]``, with the shares of all ranks, ``[n]`` each."""
    # torch 2.13 warns about the name in older versions.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(whole, share, group=group)


def exchange(
    outgoing: Mapping[int, Sequence[Tensor]],
    incoming: Mapping[int, Sequence[Like]],
    group: Any,
    device: torch.device,
) -> dict[int, list[Tensor]]:
    """Send tensors to other ranks of a group, and receive theirs.

    A rank communicates only with ranks that it sends to or receives from.

    Args:
        outgoing: the tensors for each global rank.
        incoming: the tensors to expect from each global rank, in the order in which it sends them.
        group: a process group.
        device: the device of all tensors.

    Returns:
        The tensors received from each global rank, of one dimension each.
    """
    sent = {rank: _pack(tensors) for rank, tensors in outgoing.items() if tensors}
    places = {rank: _places(likes) for rank, likes in incoming.items() if likes}
    received = {
        rank: torch.empty(ends[-1], dtype=torch.uint8, device=device)
        for rank, ends in places.items()
    }
    # All ranks go through their peers in the order of ranks.
    ways = [(rank, dist.isend, each) for rank, each in sent.items()]
    ways += [(rank, dist.irecv, each) for rank, each in received.items()]
    operations = [
        dist.P2POp(way, each, rank, group) for rank, way, each in sorted(ways, key=lambda w: w[0])
    ]
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
    return {
        rank: [
            message[start : start + numel * dtype.itemsize].view(dtype)
            for start, (numel, dtype) in zip(places[rank], incoming[rank], strict=False)
        ]
        for rank, message in received.items()
    }


def _places(likes: Sequence[Like]) -> list[int]:
    """The offset of each tensor in a message, in bytes, and then the size of the message."""
    sizes = (-(-numel * dtype.itemsize // _ALIGNED) * _ALIGNED for numel, dtype in likes)
    return [*accumulate(sizes, initial=0)]


def _pack(tensors: Sequence[Tensor]) -> Tensor:
    places = _places([(prod(each.shape), each.dtype) for each in tensors])
    message = torch.empty(places[-1], dtype=torch.uint8, device=tensors[0].device)
    for start, each in zip(places, tensors, strict=False):
        end = start + each.numel() * each.itemsize
        message[start:end].view(each.dtype).view(each.shape).copy_(each)
    return message
