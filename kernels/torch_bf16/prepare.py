"""One call that casts a model and converts its optimizer by the same recipe."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar
from weakref import ref

import torch
from torch import nn

from .argument_checks import check_backend, check_module
from .engine.wrappers import held_optimizers
from .errors import suffix_errors, with_article
from .foreign.advice import refusal_of_holder
from .foreign.convert import convert
from .foreign.convertible import Conversion, check_conversion, check_roles, check_same
from .model.cast_modules import cast_recipes
from .model.casting import cast_model
from .model.kept_fp32 import fp32_parameters
from .model.vector_groups import separate_vectors
from .optim.optimizer import BF16Optimizer
from .optim.replaced import refuse_replaced
from .parameters import parameters_in, parameters_of
from .recipe import Recipe, get_recipe

__all__ = ["prepare", "prepare_for_deepspeed"]

# The fields of a recipe that determine a cast.
_CAST = ("weights", "vectors", "keep_fp32")

_M = TypeVar("_M", bound=nn.Module)
_O = TypeVar("_O", bound=torch.optim.Optimizer | Sequence[torch.optim.Optimizer])


def prepare(
    model: _M,
    optimizer: _O,
    recipe: str | Recipe = "bf16-stochastic",
    *,
    backend: str | None = None,
    roles: Mapping[str, str | None] | None = None,
    elementwise: bool = False,
) -> tuple[_M, _O]:
    """Cast a model and convert its optimizer by the same recipe, both in place.

    Does what :func:`cast_model` and :func:`convert` do in two calls; the objects stay the same.
    Call it before DDP or FSDP1 wraps the model, and after ``fully_shard``, which replaces the
    parameters: an optimizer that was made before it would train nothing.

    Args:
        model: cast to bf16; its parameters' names key the rounding noise.
        optimizer: one of ``torch.optim`` or of another library, or one of this package made with
            the same recipe; or a sequence of them.
        recipe: a name from :data:`torch_bf16.RECIPES` or a :class:`torch_bf16.Recipe`;
            ``get_recipe("bf16-stochastic", keep_fp32=("head",))`` is one with other fields.
        backend: name of the backend that takes the steps; None for the one that an
            optimizer of this package was made with, else the recipe's, else the best that works.
        roles: passed to :func:`convert` for each optimizer without a kernel.
        elementwise: passed to :func:`convert`, too.

    Returns:
        ``model`` and ``optimizer`` themselves.

    Raises:
        ValueError: an optimizer or the model was made for another recipe, or ``roles`` or
            ``elementwise`` is passed although every optimizer has a kernel; nothing has been
            changed. Or :func:`refuse_replaced`, :func:`cast_model` or :func:`convert` raises it.
        NotImplementedError: an optimizer cannot be converted: see :func:`convert`.

    Example:
        >>> model = torch.nn.Linear(4, 4)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> model, optimizer = torch_bf16.prepare(model, optimizer, "bf16-fp32-master")
        >>> model.weight.dtype, type(optimizer).__name__
        (torch.bfloat16, 'AdamW')
    """
    recipe = get_recipe(recipe)
    check_module("prepare", model)
    optimizers = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
    if not optimizers or len({*map(id, optimizers)}) < len(optimizers):
        raise ValueError(
            f"prepare was given {'one optimizer twice' if optimizers else 'no optimizer'}; pass "
            "each optimizer that trains the model once. cast_model(model, recipe) casts a model "
            "alone. Nothing was changed"
        )
    check_roles(roles)
    # Includes parameters that came in fp16: the cast widens them.
    in_fp32 = {id(parameter) for parameter in fp32_parameters(model, recipe).values()}
    # Optimizers that are converted already, also inside others, and what the rest becomes.
    ours: list[BF16Optimizer] = []
    conversions: list[tuple[torch.optim.Optimizer, Conversion]] = []
    for each in optimizers:
        kind = type(each).__name__
        if not isinstance(each, torch.optim.Optimizer):
            raise ValueError(
                refusal_of_holder("prepare", each)
                or f"prepare takes an optimizer or a sequence of them, not {kind}: make it first, "
                "for example torch.optim.AdamW(model.parameters())"
            )
        if isinstance(each, BF16Optimizer):
            check_same("prepare", recipe, each.recipe, f"the {kind} was made with")
            ours.append(each)
        elif (conversion := check_conversion("prepare", each, recipe, model, in_fp32)) is None:
            ours += held_optimizers(each)
        else:
            conversions.append((each, conversion))
    if (roles or elementwise) and all(each.fused for _, each in conversions):
        names = ", ".join(type(each).__name__ for each in optimizers)
        raise ValueError(
            f"roles={roles} and elementwise={elementwise} are for optimizers that step by their "
            f"own code, and {names} has a kernel or was converted before; leave them out. Nothing "
            "was changed"
        )
    check_backend(backend)
    own = {id(parameter) for parameter in parameters_in(model)}
    for each in optimizers:
        if own.isdisjoint(map(id, parameters_of(each))):
            raise ValueError(
                f"prepare was given {with_article(model)} and {with_article(each)} that has "
                "none of its parameters, so that nothing would train it; make the optimizer of "
                "model.parameters(). Nothing was changed"
            )
    refuse_replaced(optimizers)
    for cast in cast_recipes(model):
        check_same("prepare", recipe, cast, f"the {type(model).__name__} was cast by", _CAST)
    cast_model(model, recipe)
    for done, (each, conversion) in enumerate(conversions):
        options = {} if conversion.fused else {"roles": roles, "elementwise": elementwise}
        so_far = f"The model is cast by now, and {done} of {len(conversions)} optimizers converted"
        with suffix_errors(so_far):
            convert(each, recipe, model=model, backend=backend, **options)
    for each in ours:
        each._engine.model = ref(model)
        if backend is not None or each.backend is None:
            each.backend = recipe.backend if backend is None else backend
    return model, optimizer


def prepare_for_deepspeed(
    model: nn.Module | None,
    optimizer: torch.optim.Optimizer,
    recipe: str | Recipe = "bf16-stochastic",
    schedulers: Iterable[Any] = (),
) -> None:
    """Convert an optimizer for DeepSpeed's engine, which casts the model and flattens each group.

    Call it before the engine exists, which :func:`torch_bf16.attach` is then given.

    Args:
        model: the module that owns the parameters, or None; only read.
        optimizer: mutated; one that was converted before keeps its recipe.
        recipe: a name from :data:`torch_bf16.RECIPES` or a :class:`torch_bf16.Recipe`.
        schedulers: passed to :func:`torch_bf16.separate_vectors`.

    Raises:
        ValueError, NotImplementedError: as :func:`torch_bf16.convert` does, or parameters would
            have to stay in fp32; nothing has been changed.
    """
    recipe = get_recipe(recipe)
    # DeepSpeed makes adapters of peft bf16, too, as without a mode.
    staying = {} if model is None else fp32_parameters(model, recipe, adapters=False)
    if names := sorted(staying):
        raise NotImplementedError(
            f"{recipe.name!r} keeps {len(names)} parameters in float32 ({names[0]!r}; keep_fp32, "
            "batch norm, _keep_in_fp32_modules_strict), and DeepSpeed casts all to bfloat16. Train "
            "this model with FSDP2 or DDP. Nothing was changed"
        )
    if not held_optimizers(optimizer):
        convert(optimizer, recipe, model=model)
    separate_vectors(optimizer, schedulers)
