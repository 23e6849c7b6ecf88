"""Which options for gradients go together, and with what a Trainer does."""

from __future__ import annotations

from typing import Any

import torch_bf16

__all__ = ["check_release", "check_trainer"]

_NORMS = ("parameter", "last_step")


def check_release(
    recipe: torch_bf16.Recipe, release: bool, max_norm: float | None, norm: str
) -> None:
    """Refuse options of the plugin that cannot be meant, before anything is trained.

    Raises:
        ValueError: they exclude each other, or one has no such value.
    """
    if release and recipe.accumulate != "bf16_nearest":
        raise ValueError(
            f"release_gradients=True and accumulate={recipe.accumulate!r} exclude each other: a "
            "gradient that was released cannot be added to. Choose one of them"
        )
    if max_norm is not None and not release:
        raise ValueError(
            f"release_max_norm={max_norm} clips released gradients, and release_gradients=False; "
            "use the Trainer's gradient_clip_val, or fabric.clip_gradients"
        )
    number = isinstance(max_norm, (int, float)) and not isinstance(max_norm, bool)
    if max_norm is not None and not (number and max_norm > 0):
        raise ValueError(
            f"release_max_norm={max_norm!r} must be a positive number, or None to clip nothing"
        )
    if norm not in _NORMS:
        raise ValueError(f"release_norm={norm!r} is unknown; use one of {', '.join(_NORMS)}")


def check_trainer(trainer: Any) -> None:
    """Refuse what a Trainer would do to gradients that were released.

    Raises:
        NotImplementedError: it accumulates or clips.
    """
    if trainer.accumulate_grad_batches > 1:
        raise NotImplementedError(
            "release_gradients=True cannot be combined with accumulate_grad_batches="
            f"{trainer.accumulate_grad_batches}: the step of a batch runs inside its backward "
            "pass. Use larger batches, or accumulate='bf16_stochastic' without release"
        )
    if trainer.gradient_clip_val:
        raise NotImplementedError(
            "release_gradients=True cannot be combined with gradient_clip_val="
            f"{trainer.gradient_clip_val}: gradients are gone when the Trainer would clip them. "
            "Use BF16Precision(release_max_norm=..., release_norm='parameter' or 'last_step')"
        )
