"""What happens to gradients: summed in a format of their own, or released inside backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.nn import Module

import torch_bf16

__all__ = ["GradientOptions"]

_NORMS = ("parameter", "last_step")


@dataclass(frozen=True)
class GradientOptions:
    """The plugin's options for gradients, beside the recipe's ``accumulate``.

    Attributes:
        release: whether steps run inside the backward pass.
        max_norm: how released gradients are clipped.
        norm: which norm that is.
    """

    release: bool
    max_norm: float | None
    norm: str

    def check(self, recipe: torch_bf16.Recipe) -> None:
        """Refuse what cannot be meant, before anything is trained.

        Raises:
            ValueError: options that exclude each other.
        """
        if not isinstance(self.release, bool):
            raise ValueError(f"release_gradients={self.release!r} must be True or False")
        if self.release and recipe.accumulate != "bf16":
            raise ValueError(
                f"release_gradients=True and accumulate={recipe.accumulate!r} exclude each other: "
                "a gradient that was released cannot be added to. Choose one of them"
            )
        if self.max_norm is not None and not self.release:
            raise ValueError(
                f"release_max_norm={self.max_norm} clips released gradients, and "
                "release_gradients=False; use the Trainer's gradient_clip_val, or "
                "fabric.clip_gradients"
            )
        number = isinstance(self.max_norm, (int, float)) and not isinstance(self.max_norm, bool)
        if self.max_norm is not None and not (number and self.max_norm > 0):
            raise ValueError(
                f"release_max_norm={self.max_norm!r} must be a positive number, or None to clip "
                "nothing"
            )
        if self.norm not in _NORMS:
            raise ValueError(
                f"release_norm={self.norm!r} is unknown; use one of {', '.join(_NORMS)}"
            )

    def check_trainer(self, trainer: Any) -> None:
        """Refuse what a Trainer would do to gradients that are gone.

        Raises:
            NotImplementedError: it accumulates or clips.
        """
        if not self.release or trainer is None:
            return
        if trainer.accumulate_grad_batches > 1:
            raise NotImplementedError(
                f"release_gradients=True cannot be combined with accumulate_grad_batches="
                f"{trainer.accumulate_grad_batches}: the step of a batch runs inside its backward "
                "pass. Use larger batches, or accumulate='bf16_stochastic' without release"
            )
        if trainer.gradient_clip_val:
            raise NotImplementedError(
                f"release_gradients=True cannot be combined with gradient_clip_val="
                f"{trainer.gradient_clip_val}: gradients are gone when the Trainer would clip "
                "them. Use BF16Precision(release_max_norm=..., release_norm='parameter' or "
                "'last_step')"
            )

    def attach(self, module: Module, optimizer: Any) -> None:
        """Apply them to one optimizer of a module that the strategy has wrapped."""
        if self.release:
            torch_bf16.release_gradients(module, optimizer, max_norm=self.max_norm, norm=self.norm)
        elif optimizer.recipe.accumulate != "bf16":
            torch_bf16.accumulate_gradients(module, optimizer)
