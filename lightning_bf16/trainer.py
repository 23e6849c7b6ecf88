"""The Trainer's part of the plugin body: optimizers, steps and clipping."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info
from torch.nn import Module

import torch_bf16

from ._host import is_placeholder, keep_averages_exact, makes_equal, stage_of, trainer_of
from .fp32_results import Fp32Results
from .precision import PrecisionBody, unwrapped

__all__ = ["TrainerBody"]


class TrainerBody(PrecisionBody):
    """Stands in front of FSDPPrecision and HalfPrecision of a Trainer."""

    _results: Fp32Results | None = None
    _trainer: Any = None

    def convert_module(self, module: Module) -> Module:
        """Cast the parameters to bf16, in place, and say so where nobody asked for training."""
        stage = stage_of(module)
        before = [p.dtype for p in module.parameters()]
        self._results = Fp32Results(module)
        self._trainer = trainer_of(module) if stage == "fit" else None
        keep_averages_exact(module)
        super().convert_module(module)
        if stage not in (None, "fit") and before != [p.dtype for p in module.parameters()]:
            rank_zero_info(
                f"{self.mode}: trainer.{stage} casts the parameters of your module to bf16 in "
                "place, and they stay so; hand over copy.deepcopy(model) to keep the fp32 ones"
            )
        return module

    def connect(
        self, model: Module, optimizers: list[Any], lr_schedulers: list[Any]
    ) -> tuple[Module, list[Any], list[Any]]:
        """Convert the optimizers: the model is wrapped by now, and no state is loaded yet."""
        self.gradients.check_trainer(self._trainer)
        trainer = self._trainer
        self.sync_replicas(model, trainer is not None and makes_equal(trainer.strategy))
        converted = self.convert_optimizers(optimizers, is_placeholder)
        self.attach(model, optimizers)
        self.announce(converted)
        return model, optimizers, lr_schedulers

    def clip_grad_by_norm(self, optimizer: Any, clip_val: int | float) -> None:
        """Clip by the fp32 norm of this optimizer's gradients.

        The coefficient is handed to the step, which multiplies as it reads: gradients stay
        unclipped in memory. In manual optimization, where a step may be skipped, they are scaled
        in place.
        """
        if isinstance(optimizer, torch_bf16.BF16Optimizer) and unwrapped(optimizer) is optimizer:
            torch_bf16.clip_grad_norm_(optimizer, clip_val)
        else:
            self.clip_in_place(optimizer, clip_val)

    @contextmanager
    def train_step_context(self) -> Iterator[None]:
        """Around ``training_step``."""
        with self._step_context("training_step"):
            yield

    @contextmanager
    def val_step_context(self) -> Iterator[None]:
        """Around ``validation_step``."""
        with self._step_context("validation_step"):
            yield

    @contextmanager
    def test_step_context(self) -> Iterator[None]:
        """Around ``test_step``."""
        with self._step_context("test_step"):
            yield

    @contextmanager
    def predict_step_context(self) -> Iterator[None]:
        """Around ``predict_step``."""
        with self._step_context("predict_step"):
            yield

    @contextmanager
    def _step_context(self, step: str) -> Iterator[None]:
        # Without autocast what forward returns may go on into another bf16 layer, so it stays bf16.
        methods = (step,) if self.compute == "bf16" else (step, "forward")
        results = nullcontext() if self._results is None else self._results.of(*methods)
        with results, self.forward_context():
            yield

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_results": None, "_trainer": None}
