"""``DeepSpeedStrategy`` of Fabric and Trainer builds an engine from model and optimizer."""

from __future__ import annotations

from typing import Any

from lightning_bf16.deepspeed import DeepSpeedMixin

__all__ = ["make_engine"]


def make_engine(original: Any) -> Any:
    """Convert the optimizer before the engine is created, and attach the engine afterwards."""

    def make_engine(
        strategy: Any, model: Any, optimizer: Any = None, *others: Any, **named: Any
    ) -> Any:
        # Fabric's strategy has ``precision``, the Trainer's ``precision_plugin``.
        plugin = getattr(strategy, "precision", None) or strategy.precision_plugin
        ours = isinstance(plugin, DeepSpeedMixin) and optimizer is not None
        if ours:
            # The Trainer's strategy says ``lr_scheduler``.
            given = named.get("scheduler", named.get("lr_scheduler"))
            scheduler = others[0] if others else given
            plugin.prepare_for_engine(strategy.config, model, optimizer, scheduler)
        result = original(strategy, model, optimizer, *others, **named)
        if ours:
            plugin.attach_engine(result[0])
        return result

    return make_engine
