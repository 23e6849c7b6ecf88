"""The ranges of hyperparameters, for optimizers whose constructor torch does not have."""

from __future__ import annotations

from typing import Any

__all__ = ["check_ranges"]


def check_ranges(**given: Any) -> None:
    """Refuse hyperparameters out of range.

    Args:
        **given: ``betas``, a pair in [0, 1), and others, each a number that is at least 0.

    Raises:
        ValueError: one of them is out of range.
    """
    for name, value in given.items():
        if name == "betas":
            fits = len(value) == 2 and all(0.0 <= beta < 1.0 for beta in value)
            wanted = "two numbers, each at least 0 and below 1"
        else:
            fits, wanted = value >= 0.0, "a number of at least 0"
        if not fits:
            raise ValueError(f"{name}={value} must be {wanted}")
