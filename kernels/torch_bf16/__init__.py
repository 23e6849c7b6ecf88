"""Train neural networks in bfloat16 and end where fp32 would have ended.

Example:
    >>> import torch, torch_bf16
    >>> model = torch_bf16.cast_module(torch.nn.Linear(8, 8))
    >>> optimizer = torch_bf16.AdamW(model.parameters(), lr=1e-3)
"""

from .checkpoints.export import fp32_optimizer_state_dict, fp32_state_dict
from .checkpoints.files import load_checkpoint, save_checkpoint
from .errors import BackendUnavailableError, CheckpointError, StateMismatchError
from .foreign.convert import convert
from .gradients.accumulation import accumulate_gradients
from .gradients.clipping import clip_grad_norm_, total_norm
from .gradients.release import release_gradients
from .gradients.scaler import GradScaler
from .model.averaging import EMA, ema_multi_avg_fn
from .model.casting import cast_module, fp32_parameters
from .model.parameter_groups import param_groups
from .model.residuals import sync_masters
from .optim import (
    ADOPT,
    SGD,
    Adafactor,
    Adagrad,
    Adam,
    AdamW,
    BF16Optimizer,
    Lion,
    Muon,
    NAdam,
    RAdam,
    RMSprop,
)
from .recipe import RECIPES, Recipe, get_recipe
from .tools.describe import describe
from .tools.monitor import LayerUpdate, UpdateMonitor

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
