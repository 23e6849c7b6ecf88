"""A recipe's options, from a kwargs handler or from the environment."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from accelerate.utils import KwargsHandler

import torch_bf16
from torch_bf16 import plugin_api

__all__ = ["BF16RecipeKwargs", "options_of"]


@dataclass
class BF16RecipeKwargs(KwargsHandler):
    """Options of a mode: ``Accelerator(kwargs_handlers=[BF16RecipeKwargs(...)])``.

    An option that is None comes from the environment (``BF16_WEIGHTS`` and so on), else from the
    mode.

    Args:
        weights, exp_avg, exp_avg_sq: replace formats of the mode's recipe, which
            :class:`torch_bf16.Recipe` explains.
        accumulate, reduce, offload, keep_fp32, seed, backend, vectors, compute: replace the
            recipe's other fields.
        release_gradients: take the step inside the backward pass, and free each gradient at once;
            cannot be combined with ``clip_grad_norm_`` and ``clip_grad_value_``. The last of
            ``gradient_accumulation_steps`` passes takes the step.
        release_max_norm, release_norm: clip released gradients; see
            :func:`torch_bf16.release_gradients`.

    Raises:
        ValueError: two options exclude each other.

    Example:
        >>> from accelerate import Accelerator
        >>> handler = BF16RecipeKwargs(weights="bf16+16", accumulate="fp32")
        >>> accelerator = Accelerator(mixed_precision="bf16-stochastic", kwargs_handlers=[handler])
    """

    weights: str | None = None
    exp_avg: str | None = None
    exp_avg_sq: str | None = None
    accumulate: str | None = None
    reduce: str | None = None
    offload: str | None = None
    keep_fp32: tuple[Any, ...] | None = None
    seed: int | None = None
    backend: str | None = None
    vectors: str | None = None
    compute: str | None = None
    release_gradients: bool | None = None
    release_max_norm: float | None = None
    release_norm: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.keep_fp32, Iterable) and not isinstance(self.keep_fp32, (str, type)):
            self.keep_fp32 = tuple(self.keep_fp32)
        # If it is None, the environment may still enable it.
        if self.release_gradients is not None:
            self.release()

    def to_kwargs(self) -> dict[str, Any]:
        """The options that are set, also by the defaults of a subclass, without fields of its own.

        Accelerate's method leaves out what equals a default.
        """
        names = [each.name for each in dataclasses.fields(BF16RecipeKwargs)]
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def over(self, other: BF16RecipeKwargs) -> BF16RecipeKwargs:
        """These options, with those that are None taken from ``other``."""
        return dataclasses.replace(other, **self.to_kwargs())

    def recipe(self, mode: str) -> torch_bf16.Recipe:
        """The mode's recipe with these options.

        Raises:
            ValueError: a format is unknown, or gradients that are not released would be clipped.
        """
        options = self.to_kwargs()
        plugin_api.release_options(options)
        return torch_bf16.get_recipe(mode, **options)

    def release(self) -> Any:
        """What gradients are released with; None if nothing is released."""
        return plugin_api.release_options(self.to_kwargs())


def options_of(accelerator: Any) -> BF16RecipeKwargs:
    """An Accelerator's options, with those that are None taken from the environment."""
    handler = getattr(accelerator, "_bf16_recipe_options", None)
    options = BF16RecipeKwargs(**plugin_api.options_from_environment())
    return (handler or BF16RecipeKwargs()).over(options)
