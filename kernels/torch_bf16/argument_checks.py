"""Checks of arguments that several public functions share and that torch does not make."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any

from torch import Tensor, nn

from .errors import with_article

__all__ = [
    "BACKENDS",
    "COMPUTES",
    "check_backend",
    "check_compute",
    "check_max_norm",
    "check_module",
    "check_ranges",
    "check_release_norm",
    "is_number",
]

BACKENDS = ("cpu", "eager", "triton")
"""Names of the backends that users can request."""

COMPUTES = ("autocast", "fp32", "bf16")
"""The ways in which the operations of a model can compute."""

_NORMS = ("parameter", "last_step")


def check_backend(name: Any) -> None:
    """Raise unless ``name`` is None, for the best, or the name of a backend.

    Raises:
        ValueError: there is no backend of that name.
    """
    if name is not None and name not in BACKENDS:
        raise ValueError(f"unknown backend {name!r}; known backends: {', '.join(BACKENDS)}")


def check_compute(compute: Any) -> None:
    """Raise unless ``compute`` is one of :data:`COMPUTES`.

    Raises:
        ValueError: it is not.
    """
    if compute not in COMPUTES:
        raise ValueError(f"compute={compute!r} is unknown; use one of {', '.join(COMPUTES)}")


def check_module(function: str, module: Any) -> None:
    """Raise unless ``module`` is a module.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(module, nn.Module):
        raise ValueError(
            f"{function} was given {with_article(module)} and takes a torch.nn.Module: the "
            "model itself, not its parameters"
        )


def check_max_norm(max_norm: Any) -> None:
    """Raise unless ``max_norm`` is a positive number or None.

    Raises:
        ValueError: it is neither.
    """
    number = isinstance(max_norm, Real) and not isinstance(max_norm, bool)
    if max_norm is not None and not (number and float(max_norm) > 0.0):
        raise ValueError(
            f"max_norm={max_norm!r} must be a positive number, or None to clip nothing"
        )


def check_release_norm(norm: Any) -> None:
    """Raise unless ``norm`` names what released gradients are clipped by.

    Raises:
        ValueError: it names nothing that there is.
    """
    if norm not in _NORMS:
        raise ValueError(f"norm={norm!r} is unknown; use one of {', '.join(_NORMS)}")


def check_ranges(**hyperparameters: Any) -> None:
    """Raise if a hyperparameter is out of range.

    Args:
        **hyperparameters: ``betas``, a pair in [0, 1), and others, each a number that is at least
            0; tensors with one element count as numbers.

    Raises:
        ValueError: one of them is out of range or not a number.
    """
    for name, value in hyperparameters.items():
        if name == "betas":
            pair = isinstance(value, Sequence) and len(value) == 2 and all(map(is_number, value))
            fits = pair and all(0.0 <= beta < 1.0 for beta in value)
            wanted = "two numbers, each at least 0 and below 1"
        else:
            fits, wanted = is_number(value) and value >= 0.0, "a number of at least 0"
        if not fits:
            raise ValueError(f"{name}={value!r} must be {wanted}")


def is_number(value: Any) -> bool:
    """Whether a hyperparameter is a real number, or a tensor with one element."""
    return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, Real)
