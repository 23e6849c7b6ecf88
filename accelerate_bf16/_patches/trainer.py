"""The Hugging Face Trainer, and through its arguments TRL.

The Trainer creates its ``Accelerator`` with ``TrainingArguments.mixed_precision``, so the mode has
to be set there; everything else happens in ``prepare``. The monitor's figures are added to the
logs.
"""

from __future__ import annotations

import copy
import os
from typing import Any

from accelerate_bf16.modes import (
    LAUNCHER_VARIABLE,
    MODES,
    canonical,
    environment_mode,
    in_use,
    mode_of,
)
from accelerate_bf16.refusals import refuse_arguments, refuse_late_clipping, refuse_late_optim
from bf16_autoload import Patches

from .enums import add_member

__all__ = [
    "OPTIMIZERS",
    "add_names",
    "create_accelerator_and_postprocess",
    "get_optimizer_cls_and_kwargs",
    "get_reporting_integration_callbacks",
    "load_from_checkpoint",
    "post_init",
    "save_averages",
    "trainer_config_process",
]

OPTIMIZERS: dict[str, str] = {f"adamw_{mode.replace('-', '_')}": mode for mode in MODES}
"""Values of ``TrainingArguments.optim`` that also select a mode."""


def add_names(module: Any, patches: Patches) -> None:
    """Make :data:`OPTIMIZERS` members of ``OptimizerNames``."""
    for name in OPTIMIZERS:
        # In training_args.bin, which save_model and push_to_hub share.
        add_member(patches, module.OptimizerNames, name, module.OptimizerNames.ADAMW_TORCH)


def get_optimizer_cls_and_kwargs(original: Any) -> Any:
    """Let the Trainer create AdamW for :data:`OPTIMIZERS`; ``prepare`` converts it."""

    def get_optimizer_cls_and_kwargs(args: Any, *further: Any, **named: Any) -> Any:
        if mode := OPTIMIZERS.get(_name(args.optim)):
            refuse_late_optim(mode, args)
            args = copy.copy(args)
            args.optim = type(args.optim)("adamw_torch")
        return original(args, *further, **named)

    return get_optimizer_cls_and_kwargs


def create_accelerator_and_postprocess(original: Any) -> Any:
    """Give its Accelerator the Trainer's arguments: the Trainer sums micro-batches itself."""

    def create_accelerator_and_postprocess(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        self.accelerator._bf16_trainer_arguments = self.args
        return result

    return create_accelerator_and_postprocess


def trainer_config_process(original: Any) -> Any:
    """Let ``"auto"`` for bf16 in DeepSpeed's configuration mean what the mode needs."""

    def trainer_config_process(self: Any, args: Any, *further: Any, **named: Any) -> Any:
        if _mode_of(args, environment_mode()) is not None:
            args = copy.copy(args)
            args.bf16 = True
        return original(self, args, *further, **named)

    return trainer_config_process


def get_reporting_integration_callbacks(original: Any) -> Any:
    """Add the monitor's figures to the logs that reporting callbacks get."""

    def get_reporting_integration_callbacks(*args: Any, **kwargs: Any) -> list[Any]:
        from accelerate_bf16.trainer_logs import around

        return around(original(*args, **kwargs))

    return get_reporting_integration_callbacks


def load_from_checkpoint(original: Any) -> Any:
    """Cast a model that has bf16 weights before it loads fp32 ones, not after.

    Loading would round them; weights that are loaded after the cast keep all their bits.
    """

    def _load_from_checkpoint(self: Any, resume_from_checkpoint: Any, model: Any = None) -> Any:
        mode = mode_of(self.accelerator)
        # A model that is passed has been prepared: FSDP and DeepSpeed load into the wrapped one.
        if mode is not None and model is None:
            from accelerate_bf16.preparation import Preparation
            from accelerate_bf16.recipe_options import options_of

            # An optimizer of ours that the script has created brings its own recipe.
            optimizers = [] if self.optimizer is None else [self.optimizer]
            preparation = Preparation(mode, (), optimizers, options_of(self.accelerator))
            preparation.cast_before_loading(self.model)
        return original(self, resume_from_checkpoint, model)

    return _load_from_checkpoint


def save_averages(original: Any) -> Any:
    """Save the averages of a schedule-free optimizer; the Trainer puts it back before it trains."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not in_use():
            return original(self, *args, **kwargs)
        import torch_bf16
        from accelerate_bf16.optimizers import converted_optimizers

        optimizers = [] if self.optimizer is None else converted_optimizers([self.optimizer])
        with torch_bf16.averaged(*optimizers):
            return original(self, *args, **kwargs)

    return method


def post_init(original: Any) -> Any:
    """Name the mode that ``optim`` or the launcher asks for."""
    exported: list[str] = []

    def __post_init__(self: Any) -> None:
        # Set by earlier arguments below, and not by a launcher.
        if exported and os.environ.get(LAUNCHER_VARIABLE) == exported.pop():
            del os.environ[LAUNCHER_VARIABLE]
        requested = environment_mode()
        original(self)
        own = getattr(self, "mixed_precision", None)
        mode = _mode_of(self, requested)
        if mode is None:
            return
        refuse_arguments(mode, self, requested)
        # Imported only now that a mode is requested, because it imports the core.
        from torch_bf16 import plugin_api

        if plugin_api.options_from_environment().get("release_gradients"):
            refuse_late_clipping(self)
        # TRL sets bf16=True unless told otherwise, and that sets mixed_precision="bf16".
        self.mixed_precision = mode
        if own is None:
            # transformers 4 configures its Accelerator through the environment, which has "bf16".
            os.environ[LAUNCHER_VARIABLE] = mode
            if requested is None:
                exported.append(mode)
        # The weights are bf16 already; module.to(bf16) would round rotary frequencies on top.
        self.bf16_full_eval = False

    return __post_init__


def _mode_of(arguments: Any, requested: str | None) -> str | None:
    """The mode that ``optim``, the launcher or the arguments name, or None."""
    own = canonical(getattr(arguments, "mixed_precision", None))
    return OPTIMIZERS.get(_name(arguments.optim)) or requested or own


def _name(optimizer: Any) -> str:
    return str(getattr(optimizer, "value", optimizer))
