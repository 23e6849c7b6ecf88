"""The modules that ``cast_model`` has seen: what it called each, and by which recipes."""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from torch_bf16.recipe import Recipe

__all__ = [
    "bf16_weights",
    "cast_recipe",
    "cast_recipes",
    "is_of_cast_model",
    "name_in_cast_model",
    "note",
    "stored_by",
    "trained_weights",
]


class _Cast(NamedTuple):
    """What is known of a module.

    Attributes:
        name: in the outermost model that was cast.
        cast_by: what made bf16 of parameters that it had in fp32; None where they came in bf16.
        stored_by: the last that its bf16 parameters, cast or not, are stored by.
    """

    name: str = ""
    cast_by: Recipe | None = None
    stored_by: Recipe | None = None


# By module: torch converts no sharded parameter that has a weak reference. By its identity: modules
# of tensordict compare themselves number by number.
_known: WeakIdKeyDictionary = WeakIdKeyDictionary()


def note(
    model: nn.Module, recipe: Recipe, to_bf16: Container[int], in_bf16: Container[int]
) -> None:
    """Remember a model whose parameters are stored by a recipe from now on.

    Args:
        model: all of whose modules are remembered.
        recipe: of the cast.
        to_bf16: ids of parameters that are cast.
        in_bf16: ids of those that are bf16 already. They follow the recipe like the others: fp32
            weights that are loaded later may have masters now.
    """
    for name, sub in model.named_modules():
        own = [id(p) for p in sub.parameters(recurse=False)]
        before = _known.get(sub) or _Cast()
        cast = any(each in to_bf16 for each in own)
        stored = cast or any(each in in_bf16 for each in own)
        _known[sub] = _Cast(
            # A part may be cast by itself, before or after the model around it.
            max(name, before.name, key=len),
            recipe if cast else before.cast_by,
            recipe if stored else before.stored_by,
        )


def is_of_cast_model(module: nn.Module) -> bool:
    """Whether it or a part of it was in a model that was given to ``cast_model``."""
    return any(each in _known for each in module.modules())


def name_in_cast_model(module: nn.Module) -> str | None:
    """Its name in the model that was cast, the outermost of several; None if none was."""
    found = _known.get(module)
    return None if found is None else found.name


def cast_recipe(module: nn.Module) -> Recipe | None:
    """The recipe by which parameters of a module itself were cast from fp32; None if none were.

    Parameters that were bf16 before :func:`cast_model` have not been cast.

    Example:
        >>> model = torch_bf16.cast_model(torch.nn.Sequential(torch.nn.Linear(4, 4)))
        >>> torch_bf16.cast_recipe(model[0]).name, torch_bf16.cast_recipe(model)
        ('bf16-stochastic', None)
    """
    found = _known.get(module)
    return None if found is None else found.cast_by


def stored_by(module: nn.Module) -> Recipe | None:
    """By which the bf16 parameters of a module itself are stored; None if it was in no cast."""
    found = _known.get(module)
    return None if found is None else found.stored_by


def cast_recipes(model: nn.Module) -> Iterator[Recipe]:
    """The recipes that the modules of a model were cast by."""
    for sub in model.modules():
        recipe = cast_recipe(sub)
        # One that was made fp32 again can be cast by another.
        if recipe and any(p.dtype == torch.bfloat16 for p in sub.parameters(recurse=False)):
            yield recipe


def bf16_weights() -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """All bf16 weights of cast models: name in the model, owning module, name there, and weight."""
    for sub, cast in list(_known.items()):
        for name, p in sub.named_parameters(recurse=False):
            if p.dtype == torch.bfloat16:
                yield f"{cast.name}.{name}".removeprefix("."), sub, name, p


def trained_weights() -> Iterator[tuple[str, nn.Parameter]]:
    """The bf16 weights of all cast models that are alive, with their names there."""
    for name, _, _, p in bf16_weights():
        if p.requires_grad:
            yield name, p
