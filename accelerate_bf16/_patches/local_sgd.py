"""Local SGD averages the fp32 weights of replicas, not their bf16 roundings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accelerate_bf16.modes import mode_of

__all__ = ["sync_and_avg_model_params"]


def sync_and_avg_model_params(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """Average exact weights one by one; parameters without an optimizer of ours, as before."""

    def _sync_and_avg_model_params(sgd: Any) -> None:
        accelerator = sgd.accelerator
        if mode_of(accelerator) is None:
            original(sgd)
            return
        from accelerate_bf16.optimizers import converted_optimizers
        from torch_bf16 import plugin_api

        optimizers = converted_optimizers(accelerator._optimizers)
        owners = {p: each for each in optimizers for p in plugin_api.parameters_of(each)}
        accelerator.wait_for_everyone()
        for parameter in sgd.model.parameters():
            owner = owners.get(parameter)
            if owner is None:
                parameter.data = accelerator.reduce(parameter.data, reduction="mean")
            else:
                mean = accelerator.reduce(owner.exact_weight(parameter), reduction="mean")
                owner.set_exact_weight(parameter, mean)

    return _sync_and_avg_model_params
