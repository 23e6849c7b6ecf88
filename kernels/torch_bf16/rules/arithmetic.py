"""The arithmetic that rules may use beyond ``+ - *``, each operation correctly rounded.

A rule calls these by module attribute (``arithmetic.sqrt``). A backend that lifts the rule swaps
this module for one with its own primitives; as written here a rule runs on Python floats. Division
is one of them because ``/`` is an approximation in some dialects, among them Triton's.
"""

from math import sqrt
from operator import truediv as div

__all__ = ["div", "sqrt"]
