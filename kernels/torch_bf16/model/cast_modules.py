"""The modules that ``cast_model`` has seen: what it called each, and by which recipe it cast it."""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from torch_bf16.recipe import Recipe

__all__ = [
    "cast_recipes",
    "is_of_cast_model",
    "name_in_cast_model",
    "note",
    "recipe_of",
    "trained_weights",
]


class _Cast(NamedTuple):
    name: str
    recipe: Recipe | None


# By module: torch converts no sharded parameter that has a weak reference. By its identity: modules
# of tensordict compare themselves number by number.
_known: WeakIdKeyDictionary = WeakIdKeyDictionary()


def note(model: nn.Module, recipe: Recipe, to_bf16: Container[int]) -> None:
    """Remember a model whose parameters of these ids are cast to bf16."""
    for name, sub in model.named_modules():
        cast = any(id(p) in to_bf16 for p in sub.parameters(recurse=False))
        before = _known.get(sub) or _Cast("", None)
        # A part may be cast by itself, before or after the model around it.
        longer = max(name, before.name, key=len)
        _known[sub] = _Cast(longer, recipe if cast else before.recipe)


def is_of_cast_model(module: nn.Module) -> bool:
    """Whether it or a part of it was in a model that was given to ``cast_model``."""
    return any(each in _known for each in module.modules())


def name_in_cast_model(module: nn.Module) -> str | None:
    """Its name in the model that was cast, the outermost of several; None if none was."""
    found = _known.get(module)
    return None if found is None else found.name


def recipe_of(module: nn.Module) -> Recipe | None:
    """By which the parameters of a module itself were cast; None if none was."""
    found = _known.get(module)
    return None if found is None else found.recipe


def cast_recipes(model: nn.Module) -> Iterator[Recipe]:
    """The recipes that the modules of a model were cast by."""
    for sub in model.modules():
        recipe = recipe_of(sub)
        # One that was made fp32 again can be cast by another.
        if recipe and any(p.dtype == torch.bfloat16 for p in sub.parameters(recurse=False)):
            yield recipe


def trained_weights() -> Iterator[tuple[str, nn.Parameter]]:
    """The bf16 weights of all cast models that are alive, with their names there."""
    for sub, cast in list(_known.items()):
        for name, p in sub.named_parameters(recurse=False):
            if p.requires_grad and p.dtype == torch.bfloat16:
                yield f"{cast.name}.{name}".removeprefix("."), p
