"""``DeepSpeedStrategy`` makes an engine of a model and an optimizer; both strategies."""

from __future__ import annotations

from typing import Any

from lightning_bf16.deepspeed import DeepSpeedMixin

__all__ = ["make_engine"]


def make_engine(original: Any) -> Any:
    """Convert the optimizer before the engine is made, and attach it after."""

    def make_engine(
        strategy: Any, model: Any, optimizer: Any = None, scheduler: Any = None, **named: Any
    ) -> Any:
        # Fabric and the Trainer call it by other names.
        plugin = getattr(strategy, "precision", None) or strategy.precision_plugin
        if isinstance(plugin, DeepSpeedMixin) and optimizer is not None:
            plugin.prepare_for_engine(strategy.config, model, optimizer, scheduler)
            result = original(strategy, model, optimizer, scheduler, **named)
            plugin.attach_engine(result[0])
            return result
        return original(strategy, model, optimizer, scheduler, **named)

    return make_engine
