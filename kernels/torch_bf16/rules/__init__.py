"""Update rules: arithmetic only, one element at a time, blind to how numbers are stored."""

from .adam import ADAM, ADAMW
from .rule import FIRST_MOMENT, SECOND_MOMENT, Rule, State, lift
from .sgd import SGD, SGD_MOMENTUM, SGD_NESTEROV

__all__ = [
    "ADAM",
    "ADAMW",
    "FIRST_MOMENT",
    "RULES",
    "SECOND_MOMENT",
    "SGD",
    "SGD_MOMENTUM",
    "SGD_NESTEROV",
    "Rule",
    "State",
    "lift",
]

RULES = {rule.name: rule for rule in (ADAMW, ADAM, SGD, SGD_MOMENTUM, SGD_NESTEROV)}
