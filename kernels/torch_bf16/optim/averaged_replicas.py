"""torch's averages of replicas, by ``PostLocalSGDOptimizer`` and model averagers, in fp32.

Their one function averages ``p.data``. In bf16 that rounds each replica's share and the sum, and an
exact master begins anew from the result, so that most of a small movement is lost.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torch_bf16.engine.engine import begun_optimizers
from torch_bf16.states.views import masters_in
from torch_bf16.torch_patches import Replacement

from .exact_weights import Write, write
from .overview import placed

__all__ = ["average_exactly"]


def average_exactly() -> None:
    """Let torch average the fp32 numbers that our bf16 weights stand for."""
    if dist.is_available():
        _replacement().apply()


def _averaging(original: Callable[..., None]) -> Any:
    def average_parameters(params: Iterable[nn.Parameter], process_group: Any) -> None:
        every = [*dict.fromkeys(params)]
        # By dtype alone, because all ranks must call the same collectives: an optimizer may have
        # begun on some of them only, as one that has loaded a state.
        rounded = [p for p in every if p.dtype == torch.bfloat16]
        if len(rounded) < len(every):
            original((p for p in every if p.dtype != torch.bfloat16), process_group)
        group = dist.group.WORLD if process_group is None else process_group
        if not rounded or dist.get_rank(group) < 0:
            return
        # As torch does: its own collectives must not run meanwhile.
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        with torch.no_grad():
            _average(rounded, group)

    return average_parameters


def _average(weights: Iterable[nn.Parameter], group: Any) -> None:
    optimizers = begun_optimizers()
    owners = {p: (each, place) for each in optimizers for place, p in placed(each)}
    writes: dict[Any, list[Write]] = {each: [] for each in optimizers}
    for p in weights:
        owner, place = owners.get(p, (None, None))
        mean = (p.float() if owner is None else owner.exact_weight(p)).contiguous()
        mean /= dist.get_world_size(group)
        dist.all_reduce(mean, group=group)
        if place is None:
            p.copy_(mean)
        else:
            writes[owner].append(Write(place, p, mean))
    for owner, its in writes.items():
        write(owner, its)
    # Replicas that have taken other numbers of steps round by other noise.
    source = dist.get_global_rank(group, 0)
    for p in weights:
        numbers = p.detach().contiguous().clone()
        dist.broadcast(numbers.view(-1).view(torch.uint8), source, group=group)
        owner, _ = owners.get(p, (None, None))
        if owner is None or not masters_in(owner.state[p]):
            p.copy_(numbers)


@functools.cache
def _replacement() -> Replacement:
    from torch.distributed.algorithms.model_averaging import utils

    return Replacement("average_parameters", utils, "average_parameters", _averaging)
