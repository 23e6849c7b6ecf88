"""What happens to an optimizer: it becomes ours, and stays the same object."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.optim import Optimizer

import torch_bf16

from .recipe_options import BF16RecipeKwargs

__all__ = ["attach", "convert", "inner", "make_states", "ours", "owns"]


def inner(optimizer: Optimizer) -> Optimizer:
    """The user's optimizer, below Accelerate's wrapper and no other."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


def ours(optimizers: Iterable[Optimizer]) -> list[torch_bf16.BF16Optimizer]:
    """Those among some optimizers, prepared or bare, that were converted."""
    found = map(inner, optimizers)
    return [each for each in found if isinstance(each, torch_bf16.BF16Optimizer)]


def convert(
    optimizer: Optimizer, recipe: str | torch_bf16.Recipe, models: Sequence[nn.Module]
) -> bool:
    """Convert an optimizer in place, unless it is one of ours already.

    Args:
        optimizer: mutated.
        recipe: how it shall store its numbers.
        models: the bare models known so far, in the order in which they were prepared. The names of
            their parameters key the rounding noise; an optimizer that is prepared before its model
            counts positions instead.

    Returns:
        Whether there was anything to do.

    Raises:
        NotImplementedError: there is no fused update for its class; nothing has been changed.
        ValueError: a parameter cannot be trained; nothing has been changed.
    """
    if isinstance(optimizer, torch_bf16.BF16Optimizer):
        return False
    torch_bf16.convert(optimizer, recipe, model=_named(optimizer, models))
    return True


def attach(
    optimizer: Optimizer, models: Sequence[nn.Module], options: BF16RecipeKwargs, steps: int
) -> None:
    """Let gradients be summed or released as asked, now that models are wrapped.

    Args:
        optimizer: one of ours.
        models: as ``prepare`` returned them, all that the optimizer trains.
        options: of the accelerator.
        steps: its ``gradient_accumulation_steps``.

    Raises:
        NotImplementedError: gradients cannot be released there.
        ValueError: they cannot be summed there in that format.
    """
    ours: Any = optimizer
    model = models[0] if len(models) == 1 else nn.ModuleList(models)
    if not options.release_gradients:
        if ours.recipe.accumulate != "bf16_nearest":
            torch_bf16.accumulate_gradients(model, optimizer)
        return
    if steps > 1:
        raise NotImplementedError(
            f"release_gradients=True cannot be combined with gradient_accumulation_steps={steps}: "
            "the step of a batch runs inside its backward pass. Use larger batches, or "
            "accumulate='bf16_stochastic' without release"
        )
    torch_bf16.release_gradients(
        model,
        optimizer,
        max_norm=options.release_max_norm,
        norm=options.release_norm or "parameter",
    )


def make_states(optimizer: Optimizer, model: nn.Module) -> None:
    """Give an optimizer the states that its first step would make, unless it has stepped.

    Args:
        optimizer: mutated.
        model: wrapped by FSDP1, on every rank.
    """
    own = inner(optimizer)
    if not own.state:
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        # It takes a step of no length first, as it does for FSDP2.
        get_optimizer_state_dict(model, own)


def owns(optimizer: Optimizer, model: nn.Module) -> bool:
    """Whether an optimizer updates a parameter of a model."""
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return any(id(parameter) in own for parameter in model.parameters())


def _named(optimizer: Optimizer, models: Sequence[nn.Module]) -> nn.Module | None:
    """A module that names the parameters of an optimizer, whatever models they are from."""
    owned = {number: each for number, each in enumerate(models) if owns(optimizer, each)}
    if not owned:
        return None
    if owned.keys() == {0}:
        return models[0]
    # The number tells apart two models of one class, which must not draw the same noise.
    return nn.ModuleDict({f"model_{number}": each for number, each in owned.items()})
