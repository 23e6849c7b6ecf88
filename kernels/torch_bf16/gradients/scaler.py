"""``torch.amp.GradScaler`` for bf16 gradients on GPUs."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_bf16.engine.engine import engine_of
from torch_bf16.parameters import parameters_of
from torch_bf16.sharding import all_whole, local, shard_of

__all__ = ["GradScaler"]


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` that also reads bf16 gradients on GPUs.

    torch has no kernel there that checks and unscales bf16, and its scaler raises
    ``NotImplementedError``; on CPUs, and for fp32 gradients, torch's own works with our optimizers
    as it is. bf16 has the range of fp32 and needs no scaling: this is for scripts that scale
    anyway.

    Without ``unscale_``, gradients are read once and not written: our optimizers divide by the
    scale inside the step, and skip it on the device if a gradient is not finite, without waiting.
    Ranks that hold parts of the parameters agree on that, so their scales stay the same.
    Arguments and use are those of ``torch.amp.GradScaler``.

    Example:
        >>> scaler = torch_bf16.GradScaler("cpu")
        >>> scaler.scale(model(torch.ones(2, 4)).mean()).backward()
        >>> scaler.step(optimizer)
        >>> scaler.update()
    """

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        # Called by unscale_, and by step, with a factor of 1 and allow_fp16, only to check.
        if engine_of(optimizer) is None:
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        parameters = parameters_of(optimizer)
        alike: dict[Any, list[Tensor]] = defaultdict(list)
        with torch.no_grad():
            for parameter in parameters:
                if parameter.grad is None:
                    continue
                gradient = local(parameter.grad)
                if gradient.numel():
                    alike[gradient.device, gradient.dtype].append(gradient)
            found: dict[torch.device, Tensor] = {}
            for (device, _), gradients in alike.items():
                # The largest magnitude shows Inf and NaN, and no sum can overflow.
                largest = torch.stack(torch._foreach_norm(gradients, float("inf")))  # pyright: ignore[reportPrivateImportUsage]
                new = (~largest.isfinite()).any().float()
                found[device] = torch.maximum(found[device], new) if device in found else new
                if not allow_fp16:
                    torch._foreach_mul_(gradients, inv_scale.to(device))  # pyright: ignore[reportPrivateImportUsage]
            return _over_ranks(parameters, found or {found_inf.device: found_inf}, found_inf.device)


def _over_ranks(
    parameters: list[Tensor], found: dict[torch.device, Tensor], device: torch.device
) -> dict[torch.device, Tensor]:
    """``found`` of this rank and the ranks that hold other parts, even without a gradient here."""
    if all_whole(parameters):
        return found
    # In the order of the parameters, which all ranks share.
    groups = {group: None for each in parameters for group in shard_of(each).groups()}
    if not groups:
        return found
    total = torch.stack([each.to(device) for each in found.values()]).amax()
    for group in groups:
        dist.all_reduce(total, dist.ReduceOp.MAX, group)
    return {device: total}
