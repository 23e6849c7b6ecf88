"""``attach``: tells our optimizer inside a DeepSpeed engine what its flat tensors consist of."""

from __future__ import annotations

from typing import Any

import torch

from torch_bf16.engine.member import formats_of
from torch_bf16.errors import with_article
from torch_bf16.rules import ITERATE, STORE
from torch_bf16.sharding import (
    alias_masters,
    check_engine,
    register_flats,
    shard_of,
    watch_files,
)

from .optimizer import BF16Optimizer

__all__ = ["attach"]

# Options of a recipe with their defaults, and what DeepSpeed does instead.
_WITHOUT_EFFECT = {
    "accumulate": ("bf16_nearest", "adds micro-batches up by itself, in bf16"),
    "reduce": ("wrapper", "reduces gradients by itself"),
    "offload": (
        "none",
        "keeps states in host memory by zero_optimization.offload_optimizer of its configuration",
    ),
}


def attach(engine: Any) -> None:
    """Tell the optimizer inside a DeepSpeed engine what its flat tensors consist of.

    ZeRO 1, 2 and 3 lay parameters end to end and pass this rank's part to the optimizer; but
    formats follow from each parameter's shape, and noise from its name. The bf16 master copy that
    DeepSpeed keeps becomes an alias of the weights, which saves 2 bytes per parameter and rank.
    Call it after ``deepspeed.initialize``, before the first step and before ``load_checkpoint``;
    calling it again is harmless. See ``docs/deepspeed.md``.

    Args:
        engine: what ``deepspeed.initialize`` returned first; its optimizer's memory is changed.

    Raises:
        ValueError: the optimizer inside is not one of ours, DeepSpeed was not configured as
            :func:`deepspeed_config` does it, or is without ZeRO, where nothing has to be told.
        NotImplementedError: the engine, the optimizer or its recipe uses a feature that does not
            work under ZeRO. In both cases nothing has been changed.

    Example:
        >>> optimizer = torch_bf16.AdamW(torch_bf16.param_groups(model), lr=1e-4)
        >>> config = torch_bf16.deepspeed_config({"zero_optimization": {"stage": 2}})
        >>> engine, *_ = deepspeed.initialize(  # doctest: +SKIP
        ...     model=model, optimizer=optimizer, config=config
        ... )
        >>> torch_bf16.attach(engine)  # doctest: +SKIP
    """
    zero = check_engine(engine)
    optimizer = zero.optimizer
    _check_optimizer(optimizer)
    flats = register_flats(zero)
    for group in optimizer.param_groups:
        for flat in flats:
            formats_of(shard_of(flat), optimizer.rule_of_group(group), optimizer.recipe)
    alias_masters(zero)
    ours = optimizer._engine
    if ours.host is None:
        watch_files(engine, flats[0].device)
    ours.host = "DeepSpeed"
    ours.divided = (
        f"ZeRO-{engine.zero_optimization_stage()} divides that among {engine.dp_world_size} "
        "processes, and DeepSpeed adds up and clips gradients in bfloat16"
    )
    ours.invalidate()


def _check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    name, convert = type(optimizer).__name__, "torch_bf16.convert(optimizer, recipe, model=model)"
    if not isinstance(optimizer, BF16Optimizer):
        raise ValueError(
            f"attach found {with_article(optimizer)} inside DeepSpeed's engine, which is not "
            "torch_bf16's: give deepspeed.initialize(optimizer=...) torch_bf16.AdamW(...), or call "
            f"{convert} before it"
        )
    recipe = optimizer.recipe
    rules = [optimizer.rule_of_group(group) for group in optimizer.param_groups]
    if any(rule is STORE or rule.stage_states for rule in rules):
        raise NotImplementedError(
            f"{name} cannot step under DeepSpeed: it looks at whole matrices, or has a step of its "
            "own, and ZeRO cuts matrices anywhere. Use AdamW, Adam, Lion or SGD, or FSDP2"
        )
    if any(rule.statistic is not None for rule in rules):
        raise NotImplementedError(
            "cautious and update_clipping are not possible under DeepSpeed: they look at whole "
            "tensors, which ZeRO joins into one and cuts anywhere. Leave them out, or use FSDP2"
        )
    if any(state.role == ITERATE for rule in rules for state in rule.states):
        raise NotImplementedError(
            f"{name} cannot be evaluated under DeepSpeed: eval() replaces the weights by their "
            "averages, and this rank has only a part of them. Use AdamW, or FSDP2"
        )
    if recipe.keep_fp32:
        raise NotImplementedError(
            f"recipe {recipe.name!r} has keep_fp32={recipe.keep_fp32}, and DeepSpeed casts every "
            "parameter to bf16. Leave keep_fp32 out; vectors are exact all the same"
        )
    for option, (without, why) in _WITHOUT_EFFECT.items():
        if (asked := getattr(recipe, option)) != without:
            raise NotImplementedError(
                f"{option}={asked!r} of recipe {recipe.name!r} has no effect under DeepSpeed, "
                f"which {why}. Leave {option} out"
            )
    if optimizer._engine.release is not None:
        raise NotImplementedError(
            "gradients are released inside the backward pass, and DeepSpeed reduces them first. "
            "Call remove() on the release, or leave release_gradients out"
        )
