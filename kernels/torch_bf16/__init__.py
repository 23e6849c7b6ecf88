"""Train neural networks in bfloat16 and end where fp32 would have ended.

Example:
    >>> import torch, torch_bf16
    >>> model = torch_bf16.cast_module(torch.nn.Linear(8, 8))
    >>> optimizer = torch_bf16.AdamW(model.parameters(), lr=1e-3)
"""

from .checkpoint_files import load_checkpoint, save_checkpoint
from .diagnostics import describe
from .errors import BackendUnavailableError, CheckpointError, StateMismatchError
from .export import fp32_optimizer_state_dict, fp32_state_dict
from .islands import cast_module, fp32_parameters
from .lost_bits import sync_masters
from .monitor import LayerUpdate, UpdateMonitor
from .optim import (
    ADOPT,
    EMA,
    SGD,
    Adafactor,
    Adagrad,
    Adam,
    AdamW,
    BF16Optimizer,
    GradScaler,
    Lion,
    Muon,
    NAdam,
    RAdam,
    RMSprop,
    accumulate_gradients,
    clip_grad_norm_,
    convert,
    ema_multi_avg_fn,
    param_groups,
    release_gradients,
    total_norm,
)
from .recipe import RECIPES, Recipe, get_recipe

__version__ = "0.1.0"

__all__ = [
    "ADOPT",
    "EMA",
    "RECIPES",
    "SGD",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "BF16Optimizer",
    "BackendUnavailableError",
    "CheckpointError",
    "GradScaler",
    "LayerUpdate",
    "Lion",
    "Muon",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Recipe",
    "StateMismatchError",
    "UpdateMonitor",
    "accumulate_gradients",
    "cast_module",
    "clip_grad_norm_",
    "convert",
    "describe",
    "ema_multi_avg_fn",
    "fp32_optimizer_state_dict",
    "fp32_parameters",
    "fp32_state_dict",
    "get_recipe",
    "load_checkpoint",
    "param_groups",
    "release_gradients",
    "save_checkpoint",
    "sync_masters",
    "total_norm",
]
