"""What the plugin of a host calls besides the names that programs use.

``lightning_bf16`` and ``accelerate_bf16`` are written on this and on ``torch_bf16`` alone, and so
could be a plugin for another trainer: it reads the mode and its options from the environment,
refuses what cannot be trained before anything is changed, and converts what the program gave it.
"""

from __future__ import annotations

from .engine.wrappers import held_optimizers
from .environment import (
    mode_from_environment,
    monitor_from_environment,
    options_from_environment,
)
from .foreign.convertible import refuse_unconvertible
from .gradients.clipping import refuse_released
from .gradients.release_options import release_options
from .gradients.setup import end_releases
from .model.carried_forward import inside_step
from .model.cast_modules import cast_recipe
from .model.casting import refuse_uncastable
from .model.fp32_adapters import fp32_adapters
from .model.kept_fp32 import fp32_parameters, matched_patterns, refuse_unmatched
from .model.nested_tensors import widen_tensors
from .model.remainders import sync_wrapped_masters
from .model.unconverted import warn_unconverted
from .optim.replaced import refuse_replaced
from .parameters import parameters_in, parameters_of
from .prepare import prepare_for_deepspeed
from .sharding import unwrap_compiled

__all__ = [
    "cast_recipe",
    "end_releases",
    "fp32_adapters",
    "fp32_parameters",
    "held_optimizers",
    "inside_step",
    "matched_patterns",
    "mode_from_environment",
    "monitor_from_environment",
    "options_from_environment",
    "parameters_in",
    "parameters_of",
    "prepare_for_deepspeed",
    "refuse_released",
    "refuse_replaced",
    "refuse_uncastable",
    "refuse_unconvertible",
    "refuse_unmatched",
    "release_options",
    "sync_wrapped_masters",
    "unwrap_compiled",
    "warn_unconverted",
    "widen_tensors",
]
