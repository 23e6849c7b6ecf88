"""One call of ``Accelerator.prepare``, from our side."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn
from torch.optim import Optimizer

import torch_bf16

from . import optimizers
from .models import bare
from .refusals import refuse_wrapped

__all__ = ["Preparation"]


class Preparation:
    """What one outermost call of ``prepare`` does to models and optimizers.

    Args:
        mode: a name from :data:`accelerate_bf16.MODES`.
        known_models: those that were prepared before, whose parameters a new optimizer may own.
        known_optimizers: likewise, which may own those of a new model.

    Example:
        >>> preparation = Preparation("bf16-stochastic")
        >>> preparation.run([model], [optimizer])
        >>> [line] = preparation.proofs()
        >>> line
        'mixed_precision=bf16-stochastic: 20 parameters (20 bfloat16), ...'
    """

    def __init__(
        self,
        mode: str,
        known_models: Iterable[nn.Module] = (),
        known_optimizers: Iterable[Optimizer] = (),
    ) -> None:
        self.mode = mode
        self._models = _unique(map(bare, known_models))
        self._optimizers = _unique(map(optimizers.inner, known_optimizers))
        self._cast: list[nn.Module] = []
        self._converted: list[Optimizer] = []

    def run(self, new_models: Iterable[nn.Module], new_optimizers: Iterable[Optimizer]) -> None:
        """Convert optimizers and cast models, in place. What was done before is not done again.

        Optimizers go first, while nothing has been changed: one that cannot be converted leaves the
        models in fp32. State that they have already follows the cast at their next step.

        Raises:
            NotImplementedError: an optimizer has no fused update, or a model is sharded.
            ValueError: a parameter cannot be trained, or a model is wrapped by DDP.
        """
        new_models = list(new_models)
        for model in new_models:
            refuse_wrapped(self.mode, model)
        self._models = _unique([*self._models, *map(bare, new_models)])
        self._optimizers = _unique([*self._optimizers, *map(optimizers.inner, new_optimizers)])
        for optimizer in self._optimizers:
            if optimizers.convert(optimizer, self.mode, self._models):
                self._converted.append(optimizer)
        for model in _unique(map(bare, new_models)):
            if not any(model is each for each in self._cast):
                torch_bf16.cast_module(model, self._recipe_of(model))
                self._cast.append(model)

    def proofs(self) -> Iterator[str]:
        """One line for each optimizer with something new to train, and each new model without."""
        silent = [each for each in self._cast if any(True for _ in each.parameters())]
        for optimizer in self._optimizers:
            trained = [each for each in self._models if optimizers.owns(optimizer, each)]
            if trained and (optimizer in self._converted or set(trained) & set(self._cast)):
                silent = [each for each in silent if each not in trained]
                yield self._line(torch_bf16.describe(trained, optimizer))
            elif not trained and optimizer in self._converted:
                yield (
                    f"mixed_precision={self.mode}: {type(optimizer).__name__} holds parameters of "
                    "no prepared model; they become bf16 when their model is prepared"
                )
        for model in silent:
            yield self._line(torch_bf16.describe(model, self.mode))

    def _line(self, described: str) -> str:
        # The recipe's own name is news only where the user's optimizer brought another one.
        name = torch_bf16.get_recipe(self.mode).name
        return f"mixed_precision={self.mode}: {described.removeprefix(f'{name}: ')}"

    def _recipe_of(self, model: nn.Module) -> str | torch_bf16.Recipe:
        # An optimizer that the user made as one of ours keeps its recipe, and the model follows.
        for optimizer in self._optimizers:
            if optimizers.owns(optimizer, model):
                return optimizer.recipe  # pyright: ignore
        return self.mode


def _unique(items: Iterable) -> list:
    return list({id(item): item for item in items}.values())
