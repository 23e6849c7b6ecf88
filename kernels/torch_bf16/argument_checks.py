"""Checks of arguments that several public functions share and that torch does not make."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any

from torch import Tensor, nn

__all__ = [
    "BACKENDS",
    "COMPUTES",
    "check_backend",
    "check_compute",
    "check_max_norm",
    "check_module",
    "check_ranges",
]

BACKENDS = ("cpu", "eager", "triton")
"""Names of the backends that can be asked for."""

COMPUTES = ("autocast", "fp32", "bf16")
"""What the operations of a model can compute in."""


def check_backend(name: Any) -> None:
    """Refuse what is not a backend's name.

    Raises:
        ValueError: there is no backend of that name.
    """
    if name not in BACKENDS:
        raise ValueError(f"unknown backend {name!r}; known backends: {', '.join(BACKENDS)}")


def check_compute(compute: Any) -> None:
    """Refuse what is not a way for a model to compute.

    Raises:
        ValueError: there is no such way.
    """
    if compute not in COMPUTES:
        raise ValueError(f"compute={compute!r} is unknown; use one of {', '.join(COMPUTES)}")


def check_module(function: str, module: Any) -> None:
    """Refuse what is not a module.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(module, nn.Module):
        raise ValueError(
            f"{function} was given a {type(module).__name__} and takes a torch.nn.Module: the "
            "model itself, not its parameters"
        )


def check_max_norm(max_norm: Any) -> None:
    """Refuse a bound of a norm that is not a positive number.

    Raises:
        ValueError: it is neither that nor None.
    """
    number = isinstance(max_norm, Real) and not isinstance(max_norm, bool)
    if max_norm is not None and not (number and float(max_norm) > 0.0):
        raise ValueError(
            f"max_norm={max_norm!r} must be a positive number, or None to clip nothing"
        )


def check_ranges(**given: Any) -> None:
    """Refuse hyperparameters out of range.

    Args:
        **given: ``betas``, a pair in [0, 1), and others, each a number that is at least 0; tensors
            with one element are numbers, too.

    Raises:
        ValueError: one of them is out of range, or no number.
    """
    for name, value in given.items():
        if name == "betas":
            pair = isinstance(value, Sequence) and len(value) == 2 and all(map(_is_number, value))
            fits = pair and all(0.0 <= beta < 1.0 for beta in value)
            wanted = "two numbers, each at least 0 and below 1"
        else:
            fits, wanted = _is_number(value) and value >= 0.0, "a number of at least 0"
        if not fits:
            raise ValueError(f"{name}={value!r} must be {wanted}")


def _is_number(value: Any) -> bool:
    return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, Real)
