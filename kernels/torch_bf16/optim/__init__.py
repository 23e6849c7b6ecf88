"""Optimizers with ``torch.optim``'s signatures, and the conversion of torch's own into them."""

from .accumulation import GradientAccumulation, accumulate_gradients
from .adafactor import Adafactor
from .adagrad import Adagrad
from .adam import Adam, AdamW
from .adopt import ADOPT
from .averaging import EMA, ema_multi_avg_fn
from .clipping import clip_grad_norm_, total_norm
from .convert import CONVERTIBLE, convert
from .grad_scaler import GradScaler
from .groups import param_groups
from .lion import Lion
from .muon import Muon
from .nadam import NAdam
from .optimizer import BF16Optimizer
from .own_step import BUCKET_BYTES
from .radam import RAdam
from .release import GradientRelease, release_gradients
from .rmsprop import RMSprop
from .sgd import SGD

__all__ = [
    "ADOPT",
    "BUCKET_BYTES",
    "CONVERTIBLE",
    "EMA",
    "SGD",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "BF16Optimizer",
    "GradScaler",
    "GradientAccumulation",
    "GradientRelease",
    "Lion",
    "Muon",
    "NAdam",
    "RAdam",
    "RMSprop",
    "accumulate_gradients",
    "clip_grad_norm_",
    "convert",
    "ema_multi_avg_fn",
    "param_groups",
    "release_gradients",
    "total_norm",
]
