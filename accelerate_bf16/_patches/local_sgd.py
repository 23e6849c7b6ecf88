"""Local SGD averages the fp32 weights of replicas, not their bf16 roundings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accelerate_bf16.modes import mode_of

__all__ = ["sync_and_avg_model_params"]


def sync_and_avg_model_params(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """Average exact weights, and parameters without an optimizer of ours, as they are."""

    def _sync_and_avg_model_params(sgd: Any) -> None:
        accelerator = sgd.accelerator
        if mode_of(accelerator) is None:
            original(sgd)
            return
        import torch_bf16
        from accelerate_bf16.optimizers import converted_optimizers

        accelerator.wait_for_everyone()
        optimizers = converted_optimizers(accelerator._optimizers)
        with torch_bf16.exact_weights(sgd.model, *optimizers) as weights:
            for name, weight in weights.items():
                weights[name] = accelerator.reduce(weight, reduction="mean")

    return _sync_and_avg_model_params
