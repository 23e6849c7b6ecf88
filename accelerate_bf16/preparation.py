"""Our part of one call of ``Accelerator.prepare``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableSet, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import torch_bf16
from torch_bf16 import plugin_api

from ._patches import patches
from .models import is_wrapped, unwrap_model
from .optimizers import converted_optimizers, trained_models, unwrap_optimizer
from .recipe_options import BF16RecipeKwargs
from .refusals import refuse_release_under_deepspeed, refuse_wrapped
from .sharding import fp32_groups

__all__ = ["Preparation"]


class Preparation:
    """Converts optimizers and casts models in one outermost call of ``prepare``.

    Args:
        mode: a name from :data:`accelerate_bf16.MODES`.
        prepared_models: models that were prepared before; a new optimizer may own their parameters.
        prepared_optimizers: optimizers that were prepared before; they may own the parameters of a
            new model.
        options: replace fields of the mode's recipe.
        other_models: wrapped models that were freed, or prepared by other Accelerators; a new
            optimizer may own their parameters, too.
        set_up: optimizers for which :meth:`setup_training` has set up all there is; it adds to
            them.
        matched: entries of ``keep_fp32`` that match something in models of earlier calls, also in
            those that were freed; :meth:`take` adds to them.
    """

    def __init__(
        self,
        mode: str,
        prepared_models: Iterable[nn.Module] = (),
        prepared_optimizers: Iterable[Optimizer] = (),
        options: BF16RecipeKwargs | None = None,
        other_models: Sequence[nn.Module] = (),
        set_up: MutableSet[Any] | None = None,
        matched: set[Any] | None = None,
    ) -> None:
        self.mode = mode
        self._set_up = set() if set_up is None else set_up
        self._matched = set() if matched is None else matched
        self._other_models = other_models
        self._options = options or BF16RecipeKwargs()
        self._recipe = self._options.recipe(mode)
        self._models = _unique(map(unwrap_model, prepared_models))
        self._optimizers: list[Any] = _unique(map(unwrap_optimizer, prepared_optimizers))
        self._cast: list[nn.Module] = []
        self._converted: list[Any] = []
        self._with_fp32_adapters: list[nn.Module] = []
        self._recipes: dict[int, torch_bf16.Recipe] = {}
        self._newly_trained: list[tuple[Any, list[nn.Module]]] = []
        self._engines: list[Any] = []

    def run(self, new_models: Sequence[nn.Module], new_optimizers: Iterable[Optimizer]) -> None:
        """Convert optimizers and cast models, in place, unless this was done before.

        Optimizers come first, while nothing has been changed: if one cannot be converted, the
        models stay in fp32. Existing state is converted at the optimizer's next step.
        """
        self.take(new_models, new_optimizers)
        for model in self._uncast(new_models):
            plugin_api.refuse_uncastable(model, self._recipe_for(model))
        self.convert()
        self.cast(new_models)

    def take(self, new_models: Sequence[nn.Module], new_optimizers: Iterable[Optimizer]) -> None:
        """Take note of what is prepared, or refuse it; nothing of it is changed."""
        for model in new_models:
            inner = plugin_api.unwrap_compiled(model)
            dtypes = {p.dtype for p in plugin_api.parameters_in(unwrap_model(model))}
            ours = any(inner is plugin_api.unwrap_compiled(m) for m in self._other_models)
            if not ours and (not is_wrapped(model) or torch.bfloat16 not in dtypes):
                refuse_wrapped(self.mode, inner)
        self._models = _unique([*self._models, *map(unwrap_model, new_models)])
        optimizers = list(map(unwrap_optimizer, new_optimizers))
        if homeless := set().union(*map(plugin_api.parameters_of, optimizers)):
            homeless.difference_update(*(plugin_api.parameters_in(each) for each in self._models))
        if homeless:
            others = map(unwrap_model, self._other_models)
            found = [m for m in others if not homeless.isdisjoint(plugin_api.parameters_in(m))]
            self._models = _unique([*self._models, *found])
        self._optimizers = _unique([*self._optimizers, *optimizers])
        self._refuse_unmatched()
        plugin_api.refuse_unconvertible(
            (optimizer, self._recipe, module) for optimizer, module in self._unconverted()
        )

    def convert(self) -> None:
        """Convert optimizers, the second part of :meth:`run`; fp32 models can then be sharded."""
        for optimizer, module in self._unconverted():
            torch_bf16.convert(optimizer, self._recipe, model=module)
            # One that trains only fp32 parameters may have stayed as it was.
            if plugin_api.held_optimizers(optimizer):
                self._converted.append(optimizer)

    def cast(self, new_models: Iterable[nn.Module]) -> None:
        """Cast models, the last part of :meth:`run`."""
        for model in self._uncast(new_models):
            was_prepared = getattr(model, "_is_accelerate_prepared", False)
            dtypes = [p.dtype for p in plugin_api.parameters_in(model)]
            torch_bf16.cast_model(model, self._recipe_for(model))
            patches.keep(
                plugin_api.warn_unconverted(
                    model,
                    f"The model was prepared with mixed_precision={self.mode!r}: give the "
                    "optimizer to accelerator.prepare, too",
                ),
                model,
            )
            if not was_prepared or dtypes != [p.dtype for p in plugin_api.parameters_in(model)]:
                self._cast.append(model)

    def cast_before_loading(self, model: nn.Module) -> None:
        """Cast a model that has bf16 weights already, so that it can load fp32 ones exactly.

        A model without bf16 weights loads them exactly as it is. Nothing is reported or converted.
        """
        dtypes = {p.dtype for p in plugin_api.parameters_in(model)}
        if torch.bfloat16 in dtypes and not is_wrapped(model):
            bare = unwrap_model(model)
            torch_bf16.cast_model(bare, self._recipe_for(bare))

    def convert_for_deepspeed(
        self,
        new_models: Sequence[nn.Module],
        new_optimizers: Sequence[Optimizer],
        schedulers: Sequence[Any],
    ) -> None:
        """Convert optimizers, and prepare their groups for flattening, or refuse.

        Args:
            new_models: models; only read, because DeepSpeed casts them.
            new_optimizers: optimizers; converted in place.
            schedulers: the optimizers' schedulers; they are told about new groups.
        """
        refuse_release_under_deepspeed(self.mode, self._options.release_gradients)
        self.take(new_models, new_optimizers)
        optimizers = list(map(unwrap_optimizer, new_optimizers))
        trained = trained_models(optimizers, self._models)
        for optimizer, its in zip(optimizers, trained, strict=True):
            model = _naming_module(its)
            plugin_api.prepare_for_deepspeed(model, optimizer, self._recipe, schedulers)

    def add_engine(self, engine: Any) -> None:
        """Record an attached engine to report; its optimizer now has DeepSpeed's parameters."""
        self._engines.append(engine)
        self._optimizers, self._converted = [], []

    def fp32_groups(self, new_models: Iterable[nn.Module]) -> list[nn.Module]:
        """The modules of unsharded models that FSDP2 must shard separately."""
        groups = []
        for model in map(unwrap_model, new_models):
            staying = plugin_api.fp32_parameters(model, self._recipe_for(model))
            groups += fp32_groups(self.mode, model, staying)
        return groups

    def optimizers_of(self, model: nn.Module) -> list[Optimizer]:
        """The optimizers that update a parameter of a model."""
        trained = trained_models(self._optimizers, [model])
        return [each for each, its in zip(self._optimizers, trained, strict=True) if its]

    def compute_for(self, model: nn.Module) -> str:
        """The recipe's ``compute`` for a model."""
        return self._recipe_for(unwrap_model(model)).compute

    def setup_training(self, wrapped: Sequence[nn.Module], steps: int, *, sync_each: bool) -> None:
        """Set up accumulation, reduction, release and train modes for new models and optimizers.

        Args:
            wrapped: all models as ``prepare`` returned them.
            steps: the accelerator's ``gradient_accumulation_steps``.
            sync_each: whether every micro-batch is reduced; FSDP2 hides passes that are not.
        """
        release = self._options.release()
        self._newly_trained = [*self._find_newly_trained()]
        # The last wrapper of each, the accelerator's own if it has one.
        by_model = {id(unwrap_model(each)): each for each in (*self._other_models, *wrapped)}
        for optimizer, bare_models in self._newly_trained:
            # Of optimizers that the accelerator has freed, or of another accelerator.
            parameters = chain.from_iterable(plugin_api.parameters_in(each) for each in bare_models)
            plugin_api.end_releases(parameters, keep=self._optimizers)
            for model in bare_models:
                torch_bf16.follow(model, optimizer)
            models = [by_model[id(each)] for each in bare_models if id(each) in by_model]
            if not models:
                continue
            model = models[0] if len(models) == 1 else nn.ModuleList(models)
            if release is not None:
                shows_last = hasattr(models[0], "set_requires_gradient_sync") and not sync_each
                release = replace(release, accumulation_steps=1 if shows_last else steps)
            torch_bf16.setup_gradients(model, optimizer, release)
            self._set_up.add(optimizer)

    def newly_trained_compute(self) -> str | None:
        """The recipe's ``compute`` for the models of the last optimizer that was set up, if any."""
        last = [optimizer for optimizer, _ in self._newly_trained][-1:]
        return self._recipe_of(last).compute if last else None

    def report(self) -> Iterator[tuple[Any, str]]:
        """Yield a line for each optimizer that was set up, and for each untrained model.

        Each with the object that it is about: an engine, an optimizer or a model.
        """
        for engine in self._engines:
            yield engine, self._line(torch_bf16.describe(engine.module, engine.optimizer.optimizer))
        untrained = [m for m in self._cast if any(True for _ in plugin_api.parameters_in(m))]
        for optimizer, trained in self._newly_trained:
            untrained = [each for each in untrained if each not in trained]
            for ours in plugin_api.held_optimizers(optimizer):
                line = self._line(torch_bf16.describe(trained, ours))
                if any(each in self._with_fp32_adapters for each in trained):
                    line += (
                        "; adapters stay float32 as peft made them, autocast_adapter_dtype=False "
                        "makes them bfloat16"
                    )
                yield ours, line
        of_converted = trained_models(self._converted, self._models)
        for optimizer, its in zip(self._converted, of_converted, strict=True):
            if not its:
                yield (
                    optimizer,
                    f"mixed_precision={self.mode}: {type(optimizer).__name__} holds parameters of "
                    "no prepared model; prepare that, too: its weights become bf16 then",
                )
        for model in untrained:
            # A reference model, for example, which has neither moments nor gradients.
            described = replace(torch_bf16.describe(model, self._recipe), trained=0)
            frozen = not any(each.requires_grad for each in plugin_api.parameters_in(model))
            yield model, self._line(described) + (", frozen" if frozen else ", no optimizer yet")

    def _find_newly_trained(self) -> Iterator[tuple[Any, list[nn.Module]]]:
        """Yield each new optimizer, or one with new models, and all bare models that it trains.

        An optimizer that the user created as ours is new, too, though nothing converts it.
        """
        ours = [each for each in self._optimizers if plugin_api.held_optimizers(each)]
        for optimizer, its in zip(ours, trained_models(ours, self._models), strict=True):
            trained = [*its.values()]
            if trained and (optimizer not in self._set_up or set(trained) & set(self._cast)):
                yield optimizer, trained

    def _uncast(self, new_models: Iterable[nn.Module]) -> list[nn.Module]:
        """Bare models that this call has not cast; the cast of a wrapped one was an earlier one."""
        bare = _unique(unwrap_model(each) for each in new_models if not is_wrapped(each))
        return [each for each in bare if each not in self._cast]

    def _unconverted(self) -> list[tuple[Any, nn.Module | None]]:
        """Optimizers that nothing has converted yet, with the modules that name their noise."""
        new = [each for each in self._optimizers if not plugin_api.held_optimizers(each)]
        trained = trained_models(new, self._models)
        return [(each, _naming_module(its)) for each, its in zip(new, trained, strict=True)]

    def _refuse_unmatched(self) -> None:
        """Raise if an entry of ``keep_fp32`` matches in no model, and one of them is trained."""
        trainers: dict[int, list[Any]] = {number: [] for number in range(len(self._models))}
        trained = trained_models(self._optimizers, self._models)
        for optimizer, its in zip(self._optimizers, trained, strict=True):
            for number in its:
                trainers[number].append(optimizer)
        # An optimizer that the user created as ours has entries of its own.
        recipes = {
            self._models[number]: self._recipe_of(optimizers)
            for number, optimizers in trainers.items()
            if optimizers
        }
        asked = {key: None for recipe in recipes.values() for key in recipe.keep_fp32}
        everywhere = torch_bf16.get_recipe(self._recipe, keep_fp32=tuple(asked))
        for model in self._models if asked else ():
            self._matched.update(plugin_api.matched_patterns(model, everywhere))
        for model, recipe in recipes.items():
            plugin_api.refuse_unmatched(model, recipe, self._matched)

    def _recipe_for(self, model: nn.Module) -> torch_bf16.Recipe:
        """A model's recipe, with what it has of ``keep_fp32``: what no model has was refused."""
        if id(model) not in self._recipes:
            recipe = self._recipe_of(self.optimizers_of(model))
            keep = plugin_api.matched_patterns(model, recipe)
            self._recipes[id(model)] = torch_bf16.get_recipe(recipe, keep_fp32=keep)
            # Looked up before sharding.
            if plugin_api.fp32_adapters(model):
                self._with_fp32_adapters.append(model)
        return self._recipes[id(model)]

    def _recipe_of(self, optimizers: Iterable[Any]) -> torch_bf16.Recipe:
        # An optimizer that the user created as ours keeps its recipe, and the model follows it.
        recipes = (each.recipe for each in converted_optimizers(optimizers))
        return next(recipes, self._recipe)

    def _line(self, described: torch_bf16.Description) -> str:
        # The recipe's name is worth showing only if the user's optimizer brought another recipe.
        name = torch_bf16.get_recipe(self.mode).name
        return f"mixed_precision={self.mode}: {str(described).removeprefix(f'{name}: ')}"


def _unique(items: Iterable) -> list:
    return list({id(item): item for item in items}.values())


def _naming_module(trained: dict[int, nn.Module]) -> nn.Module | None:
    """A module whose parameter names key the noise of an optimizer of these models, or None."""
    if trained.keys() <= {0}:
        return trained.get(0)
    # The number distinguishes two models of one class, which must not draw the same noise.
    return nn.ModuleDict({f"model_{number}": each for number, each in trained.items()})
