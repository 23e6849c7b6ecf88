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
from torch_bf16.engine.wrappers import owners
from torch_bf16.torch_patches import Replacement

__all__ = ["average_exactly"]


def average_exactly() -> None:
    """Let torch average the fp32 numbers that our bf16 weights stand for."""
    if dist.is_available():
        _replacement().apply()


def _averaging(original: Callable[..., None]) -> Any:
    def average_parameters(params: Iterable[nn.Parameter], process_group: Any) -> None:
        every, of = [*params], owners(begun_optimizers())
        ours = [p for p in every if p.dtype == torch.bfloat16 and p in of]
        chosen = {*map(id, ours)}
        if len(ours) < len(every):
            original((p for p in every if id(p) not in chosen), process_group)
        group = dist.group.WORLD if process_group is None else process_group
        if not ours or dist.get_rank(group) < 0:
            return
        # As torch does: its own collectives must not run meanwhile.
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        with torch.no_grad():
            for p in ours:
                mean = of[p].exact_weight(p) / dist.get_world_size(group)
                dist.all_reduce(mean, group=group)
                of[p].set_exact_weight(p, mean)

    return average_parameters


@functools.cache
def _replacement() -> Replacement:
    from torch.distributed.algorithms.model_averaging import utils

    return Replacement("average_parameters", utils, "average_parameters", _averaging)
