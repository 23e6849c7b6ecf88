"""Sums over whole tensors that rules need before they update: one integer for each tensor.

Kernels add up what this rank holds, and ranks that hold other parts add theirs. Sums of integers
are the same in any order, so that any number of ranks has the bits of one process.
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
    """The sums of the members of a plan whose rule has a statistic.

    Args:
        members: of a plan.
        sharded: the parameters of such rules that ranks hold parts of, in an order that is the same
            on every rank: those of this plan and others, as a rank may have no gradient of one.

    Attributes:
        groups: those whose ranks add up their sums, each with its device.
    """

    def __init__(self, members: Sequence[Member], sharded: Sequence[Shard] = ()) -> None:
        together: dict[Any, list[Tensor]] = defaultdict(list)
        for shard in sharded:
            together[shard.parameter.device, tuple(shard.groups())].append(shard.parameter)
        known = {parameter for some in together.values() for parameter in some}
        for each in members:
            if each.rule.statistic is not None and each.parameter not in known:
                together[each.parameter.device, ()].append(each.parameter)
        self._sums = {
            key: torch.zeros(len(some), dtype=torch.int64, device=key[0])
            for key, some in together.items()
        }
        self._places = {
            parameter: (self._sums[key], place)
            for key, some in together.items()
            for place, parameter in enumerate(some)
        }
        self.groups = {group: device for device, groups in together for group in groups}

    def __bool__(self) -> bool:
        return bool(self._sums)

    def totals(self, members: Sequence[Member]) -> Totals | None:
        """Where a batch adds up: one that has a part of each member; None without a statistic."""
        if members[0].rule.statistic is None:
            return None
        places = [self._places[each.parameter] for each in members]
        counts = np.array([each.shard.numel for each in members], np.int64)
        return Totals(places[0][0], np.array([place for _, place in places], np.int64), counts)

    def place_of(self, member: Member) -> int | None:
        """Which buffer a member's sum is in: a batch has sums in one of them."""
        known = self._places.get(member.parameter)
        return None if known is None else id(known[0])

    def clear(self, device: torch.device | None = None) -> None:
        """Begin to add up, on one device or all."""
        for sums in self._sums.values():
            if device in (None, sums.device):
                sums.zero_()

    def reduce(self) -> None:
        """Add what other ranks hold; communicates on all of them."""
        for (_, groups), sums in self._sums.items():
            for group in groups:
                dist.all_reduce(sums, group=group)
