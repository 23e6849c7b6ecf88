"""Update rules: arithmetic only, one element at a time, blind to how numbers are stored."""

from .accumulate import ACCUMULATE
from .adagrad import ADAGRAD
from .adam import ADAM, ADAMW
from .adopt import ADOPT
from .amsgrad import ADAM_AMSGRAD, ADAMW_AMSGRAD
from .average import AVERAGE
from .descent import ADAFACTOR, ADAFACTOR_VECTOR, MUON
from .lion import LION
from .nadam import NADAM
from .radam import RADAM
from .rmsprop import RMSPROP, RMSPROP_CENTERED, RMSPROP_CENTERED_MOMENTUM, RMSPROP_MOMENTUM
from .rule import EXACT, FIRST_MOMENT, GRADIENT, SECOND_MOMENT, WEIGHTS, Rule, State, lift
from .sgd import SGD, SGD_MOMENTUM, SGD_NESTEROV
from .store import STORE

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
    "EXACT",
    "FIRST_MOMENT",
    "GRADIENT",
    "LION",
    "MUON",
    "NADAM",
    "RADAM",
    "RMSPROP",
    "RMSPROP_CENTERED",
    "RMSPROP_CENTERED_MOMENTUM",
    "RMSPROP_MOMENTUM",
    "RULES",
    "SECOND_MOMENT",
    "SGD",
    "SGD_MOMENTUM",
    "SGD_NESTEROV",
    "STORE",
    "WEIGHTS",
    "Rule",
    "State",
    "lift",
]

RULES = {
    rule.name: rule
    for rule in (
        *(ADAMW, ADAM, SGD, SGD_MOMENTUM, SGD_NESTEROV, ACCUMULATE, AVERAGE, MUON, STORE),
        *(ADAMW_AMSGRAD, ADAM_AMSGRAD, NADAM, RADAM, ADOPT, LION, ADAGRAD),
        *(RMSPROP, RMSPROP_MOMENTUM, RMSPROP_CENTERED, RMSPROP_CENTERED_MOMENTUM),
    )
}
