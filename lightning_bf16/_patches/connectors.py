"""Names of recipes become precisions of Trainer and Fabric."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_bf16.modes import MODES, is_plugin, overriding_mode

__all__ = ["choose"]

_OVERRIDDEN = ("32-true", "bf16-mixed", "bf16-true")
_XLA = ("SingleDeviceXLAStrategy", "XLAStrategy", "XLAFSDPStrategy")


def choose(flag: str, instance: str, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Use our plugin if it was passed or named, also by ``BF16_MODE``; else what Lightning creates.

    ``flag`` and ``instance`` are the connector's attributes with the name and the plugin.
    """
    # lightning.pytorch, lightning.fabric, pytorch_lightning or lightning_fabric.
    parts = original.__module__.split(".")
    family = parts[: 2 if parts[0] == "lightning" else 1]

    def _check_and_init_precision(connector: Any) -> Any:
        name, passed = getattr(connector, flag), getattr(connector, instance)
        if mode := overriding_mode():
            name = _override(mode, name, passed)
        named = passed is None and isinstance(name, str) and name in MODES
        if not named and not is_plugin(passed):
            return original(connector)
        host = importlib.import_module(f"lightning_bf16.{family[-1]}")
        plugin_class = host.BF16Precision
        plugin: Any = plugin_class(name) if named else passed
        strategy = type(connector.strategy)
        kinds = {kind.__name__ for kind in strategy.__mro__}
        if not kinds.isdisjoint(_XLA):
            raise ValueError(
                f"precision {plugin.mode!r} cannot be used with {strategy.__name__}: the fused "
                "optimizer step does not run on XLA devices. Use strategy='ddp', FSDP2 or tensor "
                "parallelism through ModelParallelStrategy, or precision='bf16-true'"
            )
        if not isinstance(plugin, (plugin_class, host.BF16DeepSpeedPrecision)):
            # Fabric, for example, accepts a Trainer's plugin but never calls its connect.
            kind = type(plugin)
            raise TypeError(
                f"{kind.__module__}.{kind.__name__} cannot be used in {'.'.join(family)}, which "
                f"calls other methods of it. Use {plugin_class.__module__}.BF16Precision with the "
                "same options"
            )
        if "DeepSpeedStrategy" in kinds:
            return _under_deepspeed(plugin, host.BF16DeepSpeedPrecision, connector.strategy.config)
        return plugin

    return _check_and_init_precision


def _override(mode: str, name: Any, passed: Any) -> str:
    """The mode of ``BF16_MODE``; logs if it replaces the script's precision."""
    own, current = f"precision={name!r}", name
    if passed is not None:
        own = f"the plugin {type(passed).__name__}"
        current = passed.mode if is_plugin(passed) else None
    if current == mode:
        return mode
    if passed is not None or name not in _OVERRIDDEN:
        raise ValueError(
            f"BF16_MODE={mode} cannot take the place of {own}, which the script names: it "
            f"takes that of {', '.join(_OVERRIDDEN)}. Have the script name one of these, or none; "
            "or unset BF16_MODE to train as the script says"
        )
    rank_zero_info(f"{own} in the script becomes {mode!r}: BF16_MODE={mode}")
    return mode


def _under_deepspeed(plugin: Any, kind: type, config: Any) -> Any:
    """A plugin with the same options for DeepSpeed's engine, whose configuration is checked."""
    if plugin.release is not None:
        raise NotImplementedError(
            "release_gradients=True cannot be used with DeepSpeedStrategy, which reduces gradients "
            "and takes the step: leave it out"
        )
    if isinstance(config, dict):
        import torch_bf16

        torch_bf16.deepspeed_config(config)
    return kind(plugin.recipe)
