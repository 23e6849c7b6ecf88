"""The modules that ``cast_model`` has seen: what it called each, and by which recipes."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from torch_bf16.locks import fork_safe_lock
from torch_bf16.recipe import Recipe

__all__ = [
    "bf16_weights",
    "cast_models",
    "cast_recipe",
    "cast_recipes",
    "is_of_cast_model",
    "kept_ids",
    "name_in_cast_model",
    "note",
    "recast_ids",
    "stored_by",
]


class _Cast(NamedTuple):
    """What is known about the cast of a module.

    Attributes:
        name: the module's name in the outermost model that was cast.
        cast_by: the recipe that cast its fp32 parameters; None if they were bf16 before.
        stored_by: the latest recipe by which its bf16 parameters, cast or not, are stored.
        cast: the names in the module of the parameters that were cast.
        kept: those of the parameters that ``keep_fp32`` of a recipe named, or the model itself.
    """

    name: str = ""
    cast_by: Recipe | None = None
    stored_by: Recipe | None = None
    cast: frozenset[str] = frozenset()
    kept: frozenset[str] = frozenset()


# By module: torch does not convert a sharded parameter that has a weak reference. By identity:
# modules of tensordict compare element by element.
_known: WeakIdKeyDictionary = WeakIdKeyDictionary()
_lock = fork_safe_lock()


def note(
    model: nn.Module,
    recipe: Recipe,
    to_bf16: Container[int],
    in_bf16: Container[int],
    asked: Container[int],
) -> None:
    """Remember a model whose parameters are stored by a recipe from now on.

    Args:
        model: the model; all of its modules are remembered.
        recipe: the recipe of the cast.
        to_bf16: ids of the parameters that are cast.
        in_bf16: ids of the parameters that are bf16 already. They follow the recipe like the
            others: fp32 weights that are loaded later may then have masters.
        asked: ids of the parameters that the recipe, or the model itself, keeps in fp32.
    """
    for name, sub in model.named_modules():
        own = {key: id(p) for key, p in sub.named_parameters(recurse=False)}
        before = _known.get(sub) or _Cast()
        cast = {key for key, each in own.items() if each in to_bf16}
        stored = cast or any(each in in_bf16 for each in own.values())
        known = _Cast(
            # A part may be cast on its own, before or after the model around it.
            max(name, before.name, key=len),
            recipe if cast else before.cast_by,
            recipe if stored else before.stored_by,
            before.cast | cast,
            before.kept | {key for key, each in own.items() if each in asked},
        )
        with _lock:
            _known[sub] = known


def _all() -> list[tuple[nn.Module, _Cast]]:
    with _lock:
        return [*_known.items()]


def is_of_cast_model(module: nn.Module) -> bool:
    """Whether a module or a part of it was in a model that ``cast_model`` has seen."""
    return any(each in _known for each in module.modules())


def name_in_cast_model(module: nn.Module) -> str | None:
    """A module's name in the outermost model that was cast; None if it was in none."""
    cast = _known.get(module)
    return None if cast is None else cast.name


def cast_recipe(module: nn.Module) -> Recipe | None:
    """The recipe by which parameters of a module itself were cast from fp32; None if none were.

    Parameters that were bf16 before :func:`cast_model` have not been cast.

    Example:
        >>> model = torch_bf16.cast_model(torch.nn.Sequential(torch.nn.Linear(4, 4)))
        >>> plugin_api.cast_recipe(model[0]).name, plugin_api.cast_recipe(model)
        ('bf16-stochastic', None)
    """
    return (_known.get(module) or _Cast()).cast_by


def stored_by(module: nn.Module) -> Recipe | None:
    """The recipe by which a module's own bf16 parameters are stored; None if it was in no cast."""
    return (_known.get(module) or _Cast()).stored_by


def cast_recipes(model: nn.Module) -> Iterator[Recipe]:
    """The recipes that the modules of a model were cast by."""
    for sub in model.modules():
        recipe = cast_recipe(sub)
        # A module that was made fp32 again can be cast by another recipe.
        if recipe and any(p.dtype == torch.bfloat16 for p in sub.parameters(recurse=False)):
            yield recipe


def bf16_weights() -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """All bf16 weights of cast models: name in the model, owning module, name there, and weight."""
    for sub, cast in _all():
        for name, p in sub.named_parameters(recurse=False):
            if p.dtype == torch.bfloat16:
                yield f"{cast.name}.{name}".removeprefix("."), sub, name, p


def cast_models() -> Iterator[nn.Module]:
    """The outermost models that were cast."""
    return (sub for sub, cast in _all() if not cast.name)


def recast_ids() -> set[int]:
    """Ids of the weights that ``cast_model`` has cast to bf16 and something has made fp32 again."""
    return _fp32_ids(lambda known: known.cast)


def kept_ids() -> set[int]:
    """Ids of the fp32 weights that ``keep_fp32`` of a recipe has named, or their model itself."""
    return _fp32_ids(lambda known: known.kept)


def _fp32_ids(names: Callable[[_Cast], Container[str]]) -> set[int]:
    return {
        id(p)
        for sub, known in _all()
        for name, p in sub.named_parameters(recurse=False)
        if p.dtype == torch.float32 and name in names(known)
    }
