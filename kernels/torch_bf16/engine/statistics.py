"""Sums over whole tensors that rules need before they update: one integer for each tensor.

Kernels sum over what this rank holds; ranks that hold other parts then add up their sums. Sums of
integers are the same in any order, so that any number of ranks gives the bits of one process.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from torch_bf16.backends import Totals
from torch_bf16.sharding import Shard

from .member import Member

__all__ = ["Statistics"]


class Statistics:
    """The sums for those members of a plan whose rule has a statistic.

    Args:
        members: the plan's members.
        sharded: the sharded parameters of such rules, in an order that is the same on every rank.
            Parameters outside this plan are included: other ranks may have their gradients.

    Attributes:
        groups: the process groups over which sums are reduced, each with its device.
    """

    def __init__(self, members: Sequence[Member], sharded: Sequence[Shard]) -> None:
        together: dict[Any, list[Tensor]] = defaultdict(list)
        for shard in sharded:
            together[shard.parameter.device, tuple(shard.groups())].append(shard.parameter)
        included = {parameter for parameters in together.values() for parameter in parameters}
        for member in members:
            if member.rule.statistic is not None and member.parameter not in included:
                together[member.parameter.device, ()].append(member.parameter)
        self._sums = {
            key: torch.zeros(len(parameters), dtype=torch.int64, device=key[0])
            for key, parameters in together.items()
        }
        self._places = {
            parameter: (self._sums[key], place)
            for key, parameters in together.items()
            for place, parameter in enumerate(parameters)
        }
        self.groups = {group: device for device, groups in together for group in groups}

    def __bool__(self) -> bool:
        return bool(self._sums)

    def totals(self, members: Sequence[Member]) -> Totals | None:
        """Where a batch sums its statistic; None if the rule has none. One member for each task."""
        if members[0].rule.statistic is None:
            return None
        places = [self._places[member.parameter] for member in members]
        counts = np.array([member.shard.numel for member in members], np.int64)
        return Totals(places[0][0], np.array([place for _, place in places], np.int64), counts)

    def place_of(self, member: Member) -> int | None:
        """Identify the buffer of a member's sum: all sums of a batch must be in one buffer."""
        place = self._places.get(member.parameter)
        return None if place is None else id(place[0])

    def clear(self, device: torch.device | None = None) -> None:
        """Set the sums to zero, on one device or on all."""
        for sums in self._sums.values():
            if device in (None, sums.device):
                sums.zero_()

    def reduce(self) -> None:
        """Add the sums of other ranks; communicates on all ranks of the groups."""
        for (_, groups), sums in self._sums.items():
            for group in groups:
                dist.all_reduce(sums, group=group)
