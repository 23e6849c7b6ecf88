"""Optimizers with ``torch.optim``'s signatures."""

from .adafactor import Adafactor
from .adagrad import Adagrad
from .adam import Adam, AdamW
from .adopt import ADOPT
from .lion import Lion
from .muon import Muon
from .nadam import NAdam
from .optimizer import BF16Optimizer
from .radam import RAdam
from .rmsprop import RMSprop
from .sgd import SGD

__all__ = [
    "ADOPT",
    "SGD",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "BF16Optimizer",
    "Lion",
    "Muon",
    "NAdam",
    "RAdam",
    "RMSprop",
]
