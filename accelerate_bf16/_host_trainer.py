"""The seam to the Hugging Face Trainer, and through its arguments to TRL.

The Trainer makes its ``Accelerator`` with ``TrainingArguments.mixed_precision``, so the mode has to
be right there; all the rest happens in ``prepare``, and what the monitor sees joins the logs.
``bf16_autoload`` calls :func:`on_import` right after each of some modules of transformers has been
executed.
"""

from __future__ import annotations

import functools
import os
from types import ModuleType
from typing import Any

from .enum_members import add_member
from .modes import MODES, canonical, canonical_or_refuse
from .refusals import refuse_arguments

__all__ = ["OPTIMIZERS", "on_import"]

OPTIMIZERS: dict[str, str] = {f"adamw_{mode.replace('-', '_')}": mode for mode in MODES}
"""Values of ``TrainingArguments.optim`` that name a mode too."""


def on_import(module: ModuleType) -> None:
    """Make the modes known to transformers.

    Args:
        module: ``transformers.training_args``, ``transformers.trainer_optimizer`` or
            ``transformers.trainer``; mutated, once.
    """
    {
        "transformers.training_args": _extend_arguments,
        "transformers.trainer_optimizer": _extend_optimizers,
        "transformers.trainer": _extend_reports,
    }[module.__name__](module)


def _extend_arguments(module: Any) -> None:
    for name in OPTIMIZERS:
        add_member(module.OptimizerNames, name.upper(), name)
    arguments = module.TrainingArguments
    original = arguments.__post_init__
    if not hasattr(original, "_before_bf16"):
        arguments.__post_init__ = _naming_the_mode(original)


def _extend_optimizers(module: Any) -> None:
    names = module.OptimizerNames
    for name in OPTIMIZERS:
        # Both are torch.optim.AdamW until prepare converts it.
        member = add_member(names, name.upper(), name)
        module._OPTIMIZER_HANDLERS.setdefault(member, module._get_adamw_torch)


def _extend_reports(module: Any) -> None:
    original = module.get_reporting_integration_callbacks
    if not hasattr(original, "_before_bf16"):

        @functools.wraps(original)
        def get_reporting_integration_callbacks(*args: Any, **kwargs: Any) -> list[Any]:
            from .trainer_logs import around

            return around(original(*args, **kwargs))

        get_reporting_integration_callbacks._before_bf16 = original  # pyright: ignore
        module.get_reporting_integration_callbacks = get_reporting_integration_callbacks


def _naming_the_mode(original: Any) -> Any:
    @functools.wraps(original)
    def __post_init__(self: Any) -> None:
        launched = canonical_or_refuse(os.environ.get("ACCELERATE_MIXED_PRECISION", "no"))
        original(self)
        optimizer = str(getattr(self.optim, "value", self.optim))
        own = getattr(self, "mixed_precision", None)
        mode = OPTIMIZERS.get(optimizer) or launched or canonical(own)
        if mode is None:
            return
        refuse_arguments(mode, self, launched)
        # TRL sets bf16=True unless told otherwise, and that sets mixed_precision="bf16".
        self.mixed_precision = mode
        if own is None:
            # transformers 4 tells its Accelerator by the environment, where it has written "bf16".
            os.environ["ACCELERATE_MIXED_PRECISION"] = mode
        # The weights are bf16 already; module.to(bf16) would round rotary frequencies on top.
        self.bf16_full_eval = False

    __post_init__._before_bf16 = original  # pyright: ignore
    return __post_init__
