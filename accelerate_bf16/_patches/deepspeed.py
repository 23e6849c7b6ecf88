"""DeepSpeed below Accelerate: its configuration, and the engine that ``prepare`` makes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["attach", "complete_configs", "schedulers", "uses_deepspeed"]


def uses_deepspeed(accelerator: Any) -> bool:
    """Whether DeepSpeed's engine takes the steps."""
    return accelerator.distributed_type.value == "DEEPSPEED"


def complete_configs(plugins: Any) -> None:
    """Write what a mode needs into the configurations of DeepSpeed's plugins, one or several.

    Raises:
        ValueError, NotImplementedError: a line of one says otherwise; none has been changed.
    """
    import torch_bf16

    several = plugins.values() if isinstance(plugins, dict) else [plugins] if plugins else []
    completed = [(p, torch_bf16.deepspeed_config(p.deepspeed_config)) for p in several]
    for plugin, config in completed:
        plugin.deepspeed_config.update(config)


def schedulers(arguments: Sequence[Any]) -> list[Any]:
    """The learning-rate schedulers of torch among what is prepared."""
    from torch.optim.lr_scheduler import LRScheduler

    return [each for each in arguments if isinstance(each, LRScheduler)]


def attach(accelerator: Any) -> Any:
    """Attach the engine that was made last, and return it."""
    import torch_bf16

    engine = accelerator.deepspeed_engine_wrapped.engine
    torch_bf16.attach(engine)
    return engine
