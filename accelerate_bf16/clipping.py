"""Clipping by norm, over optimizers that read their gradients once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import torch_bf16

from .optimizers import inner

__all__ = ["clip_by_norm"]


def clip_by_norm(
    parameters: Iterable[Tensor],
    max_norm: float,
    optimizers: Iterable[torch.optim.Optimizer],
) -> Tensor:
    """Let the next steps see gradients whose common 2-norm is at most ``max_norm``.

    The norm is fp32. Where the parameters are all that an optimizer has gradients for, its next
    step multiplies as it reads, and the gradients stay as they are in memory; the others are scaled
    in place.

    Args:
        parameters: those without a gradient are passed over.
        max_norm: the limit.
        optimizers: that own them, perhaps among others.

    Returns:
        The norm before clipping, a 0-d fp32 tensor.

    Example:
        >>> norm = clip_by_norm(model.parameters(), 1.0, [optimizer])
    """
    parameters = list(parameters)
    norm = torch_bf16.total_norm(parameters)
    left = {id(p): p for p in parameters if p.grad is not None}
    coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    owned = [
        (
            each,
            {id(p) for group in each.param_groups for p in group["params"] if p.grad is not None},
        )
        for each in map(inner, optimizers)
    ]
    owners = Counter(key for _, own in owned for key in own)
    for optimizer, own in owned:
        alone = all(owners[key] == 1 for key in own)
        if isinstance(optimizer, torch_bf16.BF16Optimizer) and own and alone and own <= left.keys():
            optimizer.scale_next_step(coefficient)
            for key in own:
                del left[key]
    for parameter in left.values():
        gradient: Any = parameter.grad
        part = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        part.mul_(coefficient.to(part.device))
    return norm
