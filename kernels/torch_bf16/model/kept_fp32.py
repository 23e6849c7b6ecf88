"""Which parts of a model stay in fp32 when the rest is cast."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from torch_bf16.argument_checks import check_module
from torch_bf16.parameters import parameters_in
from torch_bf16.recipe import Recipe, get_recipe
from torch_bf16.sharding import local, without_wrappers

from .declared_fp32 import declared_fp32
from .fp32_adapters import fp32_adapters

__all__ = [
    "fp32_parameters",
    "is_castable",
    "is_narrow",
    "kept",
    "matched_patterns",
    "refuse_unmatched",
    "staying_ids",
]

_NamedModule = tuple[str, nn.Module]
_NamedParameter = tuple[str, nn.Parameter]


def fp32_parameters(
    model: nn.Module, recipe: str | Recipe = "bf16-stochastic", *, adapters: bool = True
) -> dict[str, nn.Parameter]:
    """The parameters that are fp32 after :func:`cast_model`, by name.

    Args:
        model: the model; only read.
        recipe: a name from :data:`torch_bf16.RECIPES` or a :class:`torch_bf16.Recipe`.
        adapters: whether peft's fp32 adapters are among them (:func:`fp32_adapters`).

    Raises:
        ValueError: ``model`` is not a module, a parameter is lazy, or a pattern of ``keep_fp32``
            matches nothing.

    Example:
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        >>> sorted(fp32_parameters(net))
        ['1.bias', '1.weight']
    """
    check_module("fp32_parameters", model)
    asked = kept(get_recipe(recipe), model, adapters=adapters)[1]
    staying, to_fp32 = staying_ids(model, asked), {id(p) for p in asked if is_narrow(p)}
    return {
        name: p
        for name, p in model.named_parameters()
        if id(p) in to_fp32 or (id(p) in staying and p.dtype == torch.float32)
    }


def matched_patterns(
    model: nn.Module, recipe: str | Recipe = "bf16-stochastic"
) -> tuple[str | type, ...]:
    """The entries of ``recipe.keep_fp32`` that match something in a model.

    :func:`cast_model` refuses the others. One recipe may be for several models, of which a part
    alone has what an entry names: ``get_recipe(recipe, keep_fp32=...)`` with the result casts each.

    Raises:
        ValueError: ``model`` is not a module.

    Example:
        >>> recipe = get_recipe("bf16-stochastic", keep_fp32=("head", torch.nn.LayerNorm))
        >>> matched_patterns(torch.nn.ModuleDict({"head": torch.nn.Linear(4, 4)}), recipe)
        ('head',)
    """
    check_module("matched_patterns", model)
    modules, named = _names(model)
    keys = get_recipe(recipe).keep_fp32
    return tuple(key for key in keys if any(_matches(key, modules, named)))


def refuse_unmatched(
    model: nn.Module, recipe: str | Recipe, elsewhere: Collection[str | type] = ()
) -> None:
    """Refuse an entry of ``recipe.keep_fp32`` that matches nothing in a model, nor in another.

    For programs that cast several models by one recipe, each by the entries that
    :func:`matched_patterns` finds in it.

    Args:
        model: the model that is to be cast.
        recipe: a name from :data:`torch_bf16.RECIPES` or a :class:`torch_bf16.Recipe`.
        elsewhere: entries that match something in other models.

    Raises:
        ValueError: ``model`` is not a module, or an entry matches nothing.
    """
    recipe = get_recipe(recipe)
    found = {*matched_patterns(model, recipe), *elsewhere} if recipe.keep_fp32 else ()
    for key in recipe.keep_fp32:
        if key not in found:
            raise ValueError(
                f"{_unmatched(key, model)}. If another model has it, prepare or set up that one "
                "first"
            )


def kept(
    recipe: Recipe, module: nn.Module, *, adapters: bool = True
) -> tuple[list[nn.Module], list[nn.Parameter]]:
    """The modules that compute in fp32, and all parameters, theirs included, that stay in fp32."""
    _check_initialised(module)
    in_fp32: list[nn.Module] = []
    asked = fp32_adapters(module) if adapters else []
    modules, named = _names(module)
    for key in (*recipe.keep_fp32, *declared_fp32(module)):
        matches, parameters = _matches(key, modules, named)
        if not matches and not parameters:
            raise ValueError(_unmatched(key, module))
        in_fp32 += matches
        asked += [*parameters, *(p for sub in matches for p in parameters_in(sub))]
    return in_fp32, asked


def staying_ids(module: nn.Module, asked: Iterable[nn.Parameter]) -> set[int]:
    """Ids of the parameters that a cast to bf16 leaves out, those that were asked for included."""
    staying = {id(p) for p in asked}
    for sub in module.modules():
        metric = any(base.__module__.split(".")[0] == "torchmetrics" for base in type(sub).__mro__)
        # Its kernels take gains in fp32 or in the dtype of the input, and no rule of autocast
        # reaches them.
        synced = isinstance(sub, nn.SyncBatchNorm)
        # Not the flag track_running_stats, which can be switched off later, as by Lightning's
        # BaseFinetuning.
        has_statistics = isinstance(sub, _NormBase) and sub.running_mean is not None
        if metric or synced or has_statistics:
            staying.update(id(p) for p in parameters_in(sub))
    return staying


def is_castable(parameter: Tensor) -> bool:
    """Whether a parameter is an ordinary tensor of floats, which can be cast."""
    # Quantised weights of other libraries are Parameters or subclasses that pretend to be floats.
    return type(local(parameter)) in (Tensor, nn.Parameter) and parameter.is_floating_point()


def is_narrow(parameter: Tensor) -> bool:
    """Whether a parameter is an ordinary tensor of 16-bit floats."""
    return is_castable(parameter) and parameter.dtype in (torch.bfloat16, torch.float16)


def _check_initialised(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if is_lazy(parameter):
            raise ValueError(
                f"parameter {name!r} is not initialised yet and would come out as float32. Give it "
                "its shape before the model is cast: run the module once on made-up input, with "
                "hosts at the end of its __init__, or name the number of its inputs "
                "(LazyLinear(8) -> Linear(16, 8))"
            )


def _names(module: nn.Module) -> tuple[list[_NamedModule], list[_NamedParameter]]:
    modules = [(without_wrappers(name), sub) for name, sub in module.named_modules()]
    return modules, [(without_wrappers(name), p) for name, p in module.named_parameters()]


def _matches(
    key: str | type,
    modules: Iterable[_NamedModule],
    parameters: Iterable[_NamedParameter],
) -> tuple[list[nn.Module], list[nn.Parameter]]:
    if isinstance(key, type):
        return [sub for _, sub in modules if isinstance(sub, key)], []
    matches = [sub for name, sub in modules if fnmatchcase(name, key)]
    return matches, [p for name, p in parameters if fnmatchcase(name, key)]


def _unmatched(key: str | type, module: nn.Module) -> str:
    modules, named = _names(module)
    known = [name for name, _ in modules if name]
    what = "modules" if known else "parameters"
    known = known or [name for name, _ in named]
    shown = known if len(known) <= 20 else [*known[:20], "..."]
    return (
        f"keep_fp32={key!r} matches no module of {type(module).__name__} and none of its "
        f"parameters; its {what} are {', '.join(shown) or 'none'}"
    )
