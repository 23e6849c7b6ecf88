"""Train neural networks in bfloat16 and end up where fp32 would have.

Example:
    >>> import torch, torch_bf16
    >>> model = torch.nn.Linear(8, 8)
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    >>> model, optimizer = torch_bf16.prepare(model, optimizer, "bf16-stochastic")
"""

from .errors import check_torch

check_torch()

from .checkpoints.files import load_checkpoint, save_checkpoint
from .checkpoints.state_dicts import fp32_optimizer_state_dict, fp32_state_dict
from .errors import BackendUnavailableError, CheckpointError, StateMismatchError
from .foreign.convert import convert
from .gradients.accumulation import accumulate_gradients
from .gradients.clipping import (
    clip_grad_norm_,
    clip_next_step,
    scale_gradients,
    total_norm,
)
from .gradients.release import release_gradients
from .gradients.scaler import GradScaler
from .gradients.setup import setup_gradients
from .gradients.wire import reduce_gradients
from .model.arithmetic import arithmetic
from .model.averaging import EMA, ema_multi_avg_fn
from .model.carried_autocast import carry_autocast
from .model.casting import cast_model
from .model.parameter_groups import param_groups
from .model.remainders import sync_masters
from .model.vector_groups import separate_vectors
from .optim.adafactor import Adafactor
from .optim.adagrad import Adagrad, RMSprop
from .optim.adam import ADOPT, Adam, AdamW, NAdam, RAdam
from .optim.attach import attach
from .optim.exact_weights import exact_weights
from .optim.lion import Lion
from .optim.muon import Muon
from .optim.optimizer import BF16Optimizer
from .optim.schedule_free import AdamWScheduleFree, SGDScheduleFree
from .optim.sgd import SGD
from .optim.train_mode import averaged, follow
from .prepare import prepare
from .recipe import RECIPES, Recipe, get_recipe
from .sharding import deepspeed_config
from .tools.describe import Description, describe
from .tools.monitor import LayerUpdate, UpdateMonitor, take_figures

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
    "AdamWScheduleFree",
    "BF16Optimizer",
    "BackendUnavailableError",
    "CheckpointError",
    "Description",
    "GradScaler",
    "LayerUpdate",
    "Lion",
    "Muon",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Recipe",
    "SGDScheduleFree",
    "StateMismatchError",
    "UpdateMonitor",
    "accumulate_gradients",
    "arithmetic",
    "attach",
    "averaged",
    "carry_autocast",
    "cast_model",
    "clip_grad_norm_",
    "clip_next_step",
    "convert",
    "deepspeed_config",
    "describe",
    "ema_multi_avg_fn",
    "exact_weights",
    "follow",
    "fp32_optimizer_state_dict",
    "fp32_state_dict",
    "get_recipe",
    "load_checkpoint",
    "param_groups",
    "prepare",
    "reduce_gradients",
    "release_gradients",
    "save_checkpoint",
    "scale_gradients",
    "separate_vectors",
    "setup_gradients",
    "sync_masters",
    "take_figures",
    "total_norm",
]
