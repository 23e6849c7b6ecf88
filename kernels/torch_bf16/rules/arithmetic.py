"""The arithmetic that rules may use beyond ``+ - * /``.

A rule calls these by module attribute (``arithmetic.sqrt``). A backend that lifts the rule swaps
this module for one with its own primitives; as written here a rule runs on Python floats.
"""

from math import sqrt

__all__ = ["sqrt"]
