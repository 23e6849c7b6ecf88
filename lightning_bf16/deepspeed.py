"""The plugin's behaviour under DeepSpeed, whose engine casts the model, steps and clips."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.rank_zero import rank_zero_info
from torch.nn import Module

import torch_bf16
from torch_bf16 import plugin_api

if TYPE_CHECKING:
    from .precision import PrecisionMixin as _Base
else:
    _Base = object

__all__ = ["DeepSpeedMixin"]


class DeepSpeedMixin(_Base):
    """Precedes a plugin's mixin under ``DeepSpeedStrategy``; the connectors choose it."""

    def cast(self, module: Module) -> None:
        """Do nothing: the engine casts."""

    def forward_context(self) -> AbstractContextManager[Any]:
        """An empty context: DeepSpeed disables any autocast around its engine."""
        return nullcontext()

    def engine_context(self) -> AbstractContextManager[Any]:
        """The context that forward passes need inside the engine."""
        return super().forward_context()

    def prepare_for_engine(
        self, config: dict[str, Any], module: Module, optimizer: Any, scheduler: Any
    ) -> None:
        """Convert the optimizer, and prepare its groups for flattening, before the engine exists.

        Args:
            config: DeepSpeed's configuration; mutated.
            module: the model; only read.
            optimizer: the optimizer; mutated.
            scheduler: the optimizer's scheduler, or None; it is told about new groups.

        Raises:
            ValueError, NotImplementedError: something cannot be trained; nothing is changed.
        """
        complete = torch_bf16.deepspeed_config(config)
        schedulers = [] if scheduler is None else [scheduler]
        plugin_api.prepare_for_deepspeed(module, optimizer, self.recipe, schedulers)
        config.update(complete)

    def attach_engine(self, engine: Any) -> None:
        """Attach the engine, and log one line that says what is trained and how."""
        torch_bf16.attach(engine)
        self.carry_autocast(engine.module)
        rank_zero_info(str(torch_bf16.describe(engine.module, engine.optimizer.optimizer)))

    def add_optimizers(self, model: Module, optimizers: list[Any]) -> None:
        """Do nothing: :meth:`prepare_for_engine` has converted the only optimizer."""
