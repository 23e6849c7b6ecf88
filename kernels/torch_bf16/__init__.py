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
from .engine.wrappers import held_optimizers
from .environment import (
    mode_from_environment,
    monitor_from_environment,
    options_from_environment,
)
from .errors import BackendUnavailableError, CheckpointError, StateMismatchError
from .foreign.convert import convert
from .foreign.convertible import refuse_unconvertible
from .gradients.accumulation import accumulate_gradients
from .gradients.clipping import (
    clip_grad_norm_,
    clip_next_step,
    refuse_released,
    scale_gradients,
    total_norm,
)
from .gradients.release import release_gradients
from .gradients.release_options import release_options
from .gradients.scaler import GradScaler
from .gradients.setup import end_releases, setup_gradients
from .gradients.wire import reduce_gradients
from .model.arithmetic import arithmetic
from .model.averaging import EMA, ema_multi_avg_fn
from .model.carried_autocast import carry_autocast
from .model.carried_forward import inside_step
from .model.cast_modules import cast_recipe
from .model.casting import cast_model, refuse_uncastable
from .model.fp32_adapters import fp32_adapters
from .model.kept_fp32 import fp32_parameters, matched_patterns, refuse_unmatched
from .model.parameter_groups import param_groups
from .model.remainders import sync_masters
from .model.unconverted import warn_unconverted
from .model.vector_groups import separate_vectors
from .optim.adafactor import Adafactor
from .optim.adagrad import Adagrad, RMSprop
from .optim.adam import ADOPT, Adam, AdamW, NAdam, RAdam
from .optim.attach import attach
from .optim.exact_weights import exact_weights
from .optim.lion import Lion
from .optim.muon import Muon
from .optim.optimizer import BF16Optimizer
from .optim.replaced import refuse_replaced
from .optim.schedule_free import AdamWScheduleFree, SGDScheduleFree
from .optim.sgd import SGD
from .optim.train_mode import averaged, follow
from .parameters import parameters_of
from .prepare import prepare
from .recipe import RECIPES, Recipe, get_recipe
from .sharding import deepspeed_config
from .tools.describe import Description, describe
from .tools.figures import take_figures
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
    "cast_recipe",
    "clip_grad_norm_",
    "clip_next_step",
    "convert",
    "deepspeed_config",
    "describe",
    "ema_multi_avg_fn",
    "end_releases",
    "exact_weights",
    "follow",
    "fp32_adapters",
    "fp32_optimizer_state_dict",
    "fp32_parameters",
    "fp32_state_dict",
    "get_recipe",
    "held_optimizers",
    "inside_step",
    "load_checkpoint",
    "matched_patterns",
    "mode_from_environment",
    "monitor_from_environment",
    "options_from_environment",
    "param_groups",
    "parameters_of",
    "prepare",
    "reduce_gradients",
    "refuse_released",
    "refuse_replaced",
    "refuse_uncastable",
    "refuse_unconvertible",
    "refuse_unmatched",
    "release_gradients",
    "release_options",
    "save_checkpoint",
    "scale_gradients",
    "separate_vectors",
    "setup_gradients",
    "sync_masters",
    "take_figures",
    "total_norm",
    "warn_unconverted",
]
