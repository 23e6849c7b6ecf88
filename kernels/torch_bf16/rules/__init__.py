"""Update rules: arithmetic only, one element at a time, blind to how numbers are stored."""

from .accumulate import ACCUMULATE
from .adam import ADAM, ADAMW
from .rule import FIRST_MOMENT, GRADIENT, SECOND_MOMENT, WEIGHTS, Rule, State, lift
from .sgd import SGD, SGD_MOMENTUM, SGD_NESTEROV

__all__ = [
    "ACCUMULATE",
    "ADAM",
    "ADAMW",
    "FIRST_MOMENT",
    "GRADIENT",
    "RULES",
    "SECOND_MOMENT",
    "SGD",
    "SGD_MOMENTUM",
    "SGD_NESTEROV",
    "WEIGHTS",
    "Rule",
    "State",
    "lift",
]

RULES = {rule.name: rule for rule in (ADAMW, ADAM, SGD, SGD_MOMENTUM, SGD_NESTEROV, ACCUMULATE)}
