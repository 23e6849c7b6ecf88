"""Optimizers with ``torch.optim``'s signatures, and the conversion of torch's own into them."""

from .accumulation import GradientAccumulation, accumulate_gradients
from .adagrad import Adagrad
from .adam import Adam, AdamW
from .adopt import ADOPT
from .averaging import EMA, ema_multi_avg_fn
from .clipping import total_norm
from .convert import CONVERTIBLE, convert
from .groups import param_groups
from .lion import Lion
from .nadam import NAdam
from .optimizer import BF16Optimizer
from .radam import RAdam
from .release import GradientRelease, release_gradients
from .rmsprop import RMSprop
from .sgd import SGD

__all__ = [
    "ADOPT",
    "CONVERTIBLE",
    "EMA",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "BF16Optimizer",
    "GradientAccumulation",
    "GradientRelease",
    "Lion",
    "NAdam",
    "RAdam",
    "RMSprop",
    "accumulate_gradients",
    "convert",
    "ema_multi_avg_fn",
    "param_groups",
    "release_gradients",
    "total_norm",
]
