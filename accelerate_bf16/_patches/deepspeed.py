"""DeepSpeed under Accelerate: its configuration, and the engine that ``prepare`` creates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["attach", "complete_configs", "schedulers", "uses_deepspeed"]


def uses_deepspeed(accelerator: Any) -> bool:
    """Whether DeepSpeed's engine takes the steps."""
    return accelerator.distributed_type.value == "DEEPSPEED"


def complete_configs(plugins: Any) -> None:
    """Add what a mode needs to the configurations of DeepSpeed's plugins, one or several.

    Raises:
        ValueError, NotImplementedError: a configuration contradicts the mode; none is changed.
    """
    import torch_bf16

    all_plugins = plugins.values() if isinstance(plugins, dict) else [plugins] if plugins else []
    completed = [(p, torch_bf16.deepspeed_config(p.deepspeed_config)) for p in all_plugins]
    for plugin, config in completed:
        plugin.deepspeed_config.update(config)


def schedulers(arguments: Sequence[Any]) -> list[Any]:
    """Torch's learning-rate schedulers among the arguments of ``prepare``."""
    from torch.optim.lr_scheduler import LRScheduler

    return [each for each in arguments if isinstance(each, LRScheduler)]


def attach(accelerator: Any) -> Any:
    """Attach the engine that was created last, and return it."""
    import torch_bf16

    engine = accelerator.deepspeed_engine_wrapped.engine
    torch_bf16.attach(engine)
    return engine
