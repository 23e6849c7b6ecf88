"""Update rules: arithmetic only, one element at a time, unaware of how numbers are stored."""

from .adagrad import ADAGRAD
from .adam import ADAM, ADAM_AMSGRAD, ADAMW, ADAMW_AMSGRAD
from .adopt import ADOPT
from .auxiliary import ACCUMULATE, AVERAGE, STORE
from .cautious import CAUTIOUS_ADAMW, CAUTIOUS_LION
from .descent import ADAFACTOR, ADAFACTOR_VECTOR, MUON
from .lion import LION
from .nadam import NADAM
from .radam import RADAM
from .rmsprop import RMSPROP, RMSPROP_CENTERED, RMSPROP_CENTERED_MOMENTUM, RMSPROP_MOMENTUM
from .rule import (
    EXACT,
    FIRST_MOMENT,
    GRADIENT,
    ITERATE,
    LARGEST_STATISTIC,
    SECOND_MOMENT,
    STATISTIC_UNIT,
    WEIGHTS,
    Rule,
    State,
    lift,
)
from .schedule_free import SCHEDULE_FREE_ADAMW, SCHEDULE_FREE_SGD
from .sgd import SGD, SGD_MOMENTUM, SGD_NESTEROV
from .stable_adamw import STABLE_ADAMW

__all__ = [
    "ACCUMULATE",
    "ADAFACTOR",
    "ADAFACTOR_VECTOR",
    "ADAGRAD",
    "ADAM",
    "ADAMW",
    "ADAMW_AMSGRAD",
    "ADAM_AMSGRAD",
    "ADOPT",
    "AVERAGE",
    "CAUTIOUS_ADAMW",
    "CAUTIOUS_LION",
    "EXACT",
    "FIRST_MOMENT",
    "GRADIENT",
    "ITERATE",
    "LARGEST_STATISTIC",
    "LION",
    "MUON",
    "NADAM",
    "RADAM",
    "RMSPROP",
    "RMSPROP_CENTERED",
    "RMSPROP_CENTERED_MOMENTUM",
    "RMSPROP_MOMENTUM",
    "SCHEDULE_FREE_ADAMW",
    "SCHEDULE_FREE_SGD",
    "SECOND_MOMENT",
    "SGD",
    "SGD_MOMENTUM",
    "SGD_NESTEROV",
    "STABLE_ADAMW",
    "STATISTIC_UNIT",
    "STORE",
    "WEIGHTS",
    "Rule",
    "State",
    "lift",
]
