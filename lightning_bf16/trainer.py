"""What a Trainer's plugin adds to the shared mixin: optimizers, steps and clipping."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info
from torch.nn import Module
from torch.optim import Optimizer

import torch_bf16
from torch_bf16 import plugin_api

from ._patches.fp32_outputs import Fp32Outputs
from ._patches.private_attributes import cast_lottery_tickets, widen_averages
from .precision import PrecisionMixin
from .train_modes import TrainModesMixin, switch_modes

__all__ = ["TrainerMixin"]


def _step_context(step: str) -> Callable[[Any], AbstractContextManager[None]]:
    """The plugin's context method for one kind of step, whose results become fp32."""

    @contextmanager
    def context(self: Any) -> Iterator[None]:
        outputs = nullcontext() if self._outputs is None else self._outputs.patch(step)
        with outputs, plugin_api.inside_step(), self.forward_context():
            yield

    return context


class TrainerMixin(PrecisionMixin):
    __doc__ = PrecisionMixin.__doc__

    _advice = (
        "Return it from configure_optimizers, and step what self.optimizers() gives; before a run "
        "in another precision, call model.float()"
    )
    _place = "self.trainer.precision_plugin"
    _train_modes: type[TrainModesMixin]
    _accumulation_scheduler: type
    _replicas: type | tuple[()] = ()  # the strategy that sends weights before an evaluation
    _outputs: Fp32Outputs | None = None
    _trainer: Any = None
    _evaluates = False
    _trained: Sequence[Any] = ()  # optimizers of this fit; until it makes them, of the last one
    # Those of the last fit, while its module lives, which may be fitted again.
    _earlier: MutableMapping[Module, Sequence[Any]] | None = None
    _own_seed: int | None = None

    def convert_module(self, module: Module) -> Module:
        """Cast the parameters to bf16, in place, and log that outside of training."""
        trainer = _trainer_of(module)
        stage = None if trainer is None or trainer.state.fn is None else trainer.state.fn.value
        if self.release is not None and stage == "fit":
            _check_trainer(trainer)
        before = [p.dtype for p in plugin_api.parameters_in(module)]
        self._outputs = Fp32Outputs(module, getattr(self, "engine_context", nullcontext))
        self._trainer = trainer if stage == "fit" else None
        self._evaluates = stage not in (None, "fit")
        if stage == "fit" and self._earlier is not None:
            self._trained = self._earlier.pop(module, ())
        if stage == "fit" and self._own_seed is not None:  # an earlier fit was resumed
            self.recipe = torch_bf16.get_recipe(self.recipe, seed=self._own_seed)
        super().convert_module(module)
        if trainer is not None:
            cast_lottery_tickets(trainer)
        if stage == "fit":
            widen_averages(trainer)
        if self._evaluates and before != [p.dtype for p in plugin_api.parameters_in(module)]:
            rank_zero_info(
                f"{self.mode}: trainer.{stage} casts the parameters of your module to bf16 in "
                "place, and they stay so; pass copy.deepcopy(model) to keep the fp32 ones"
            )
        return module

    def recipe_for(self, module: Module) -> torch_bf16.Recipe:
        """The whole recipe: a Trainer trains one module."""
        return self.recipe

    def connect(
        self, model: Module, optimizers: list[Any], lr_schedulers: list[Any]
    ) -> tuple[Module, list[Any], list[Any]]:
        """Convert the optimizers: the model is already wrapped, and no state is loaded yet."""
        trainer = self._trainer
        self.sync_masters(model, getattr(trainer, "strategy", None))
        if self._evaluates:  # these are the optimizers of an earlier fit
            strategy = getattr(_trainer_of(model), "strategy", None)
            if isinstance(strategy, self._replicas):
                # It has sent the weights of rank 0 without a wrapper, which counts as a write.
                torch_bf16.sync_masters(model)
            return model, optimizers, lr_schedulers
        earlier, self._trained = self._trained, []
        self.add_optimizers(model, optimizers)
        # The strategy has let go of them already, and the new ones start from their masters.
        del earlier
        return model, optimizers, lr_schedulers

    def add_optimizers(self, model: Module, optimizers: list[Any]) -> None:
        """Convert optimizers, and set up the gradients and the train modes of what they train.

        Args:
            model: the module as wrapped by the strategy.
            optimizers: optimizers of this fit; mutated.
        """
        self.convert_optimizers(optimizers)
        self.setup_gradients(model, optimizers)
        if self._trainer is not None:
            switch_modes(self._trainer, optimizers, self._train_modes)
        self.announce(optimizers)
        known = [each for each in optimizers if isinstance(each, Optimizer)]
        self._trained = [*self._trained, *known]

    def accumulation_steps(self) -> int:
        """The largest ``accumulate_grad_batches``; after fewer passes ``step()`` steps."""
        if self.release_accumulation_steps is not None or self._trainer is None:
            return super().accumulation_steps()
        trainer, kind = self._trainer, self._accumulation_scheduler
        schedulers = [each for each in trainer.callbacks if isinstance(each, kind)]
        every = [n for each in schedulers for n in each.scheduling.values()]
        return max([trainer.accumulate_grad_batches, *every])

    def optimizer_step(self, optimizer: Any, model: Any, closure: Any, **kwargs: Any) -> Any:
        """Add an optimizer that a hook created after ``connect``, before its first step."""
        if isinstance(optimizer, Optimizer) and optimizer not in self._trained:
            self.add_optimizers(model, [optimizer])
        return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)

    def clip_grad_by_norm(self, optimizer: Any, clip_val: int | float) -> None:
        """Clip by the fp32 norm of this optimizer's gradients.

        The coefficient is passed to the step, which scales gradients as it reads them: they stay
        unclipped in memory. In manual optimization, where a step may be skipped, gradients are
        scaled in place.
        """
        self.refuse_released(optimizer)
        trainer = self._trainer
        automatic = trainer is None or trainer.lightning_module.automatic_optimization
        if automatic and isinstance(optimizer, torch_bf16.BF16Optimizer):
            torch_bf16.clip_next_step(optimizer, clip_val)
        else:
            torch_bf16.clip_grad_norm_(self.main_params(optimizer), clip_val)

    def clip_grad_by_value(self, optimizer: Any, clip_val: int | float) -> None:
        """Clip each element, as Lightning does; gradients that were released are refused."""
        self.refuse_released(optimizer)
        plugin_api.refuse_released(self.main_params(optimizer))  # by the program itself
        torch_bf16.scale_gradients(plugin_api.held_optimizers(optimizer))
        super().clip_grad_by_value(optimizer, clip_val)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Adopt the saved seed for this fit; an evaluation, which also loads it, takes no step."""
        if self._evaluates:
            return
        if self._own_seed is None:
            self._own_seed = self.recipe.seed
        super().load_state_dict(state_dict)

    def teardown(self) -> None:
        """End releases: after the fit a backward pass must not take steps. Let go of the module."""
        if self._trainer is not None:
            trained = map(plugin_api.parameters_of, self._trainer.optimizers)
            plugin_api.end_releases(chain.from_iterable(trained))
        modules = self._live_modules()
        if self._trained and modules:
            self._earlier = weakref.WeakKeyDictionary({modules[-1]: self._trained})
        self._trained, self._outputs, self._trainer = (), None, None
        super().teardown()

    train_step_context = _step_context("training_step")
    val_step_context = _step_context("validation_step")
    test_step_context = _step_context("test_step")
    predict_step_context = _step_context("predict_step")

    def __getstate__(self) -> dict[str, Any]:
        held = {"_outputs": None, "_trainer": None, "_trained": (), "_earlier": None}
        return {**super().__getstate__(), **held}


def _check_trainer(trainer: Any) -> None:
    """Refuse a Trainer that would clip gradients after they were released."""
    if trainer.gradient_clip_val:
        raise NotImplementedError(
            "release_gradients=True cannot be combined with gradient_clip_val="
            f"{trainer.gradient_clip_val}: gradients are gone when the Trainer would clip them. "
            "Use BF16Precision(release_max_norm=..., release_norm='parameter' or 'last_step'). "
            "Nothing was cast"
        )


def _trainer_of(module: Module) -> Any:
    """The Trainer that a module belongs to, or None."""
    try:
        return module.trainer
    except (AttributeError, RuntimeError):  # no LightningModule, or one without a Trainer
        return None
