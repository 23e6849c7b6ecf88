"""Refuses optimizers of parameters that their model has replaced."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from torch_bf16.engine.wrappers import held_optimizers
from torch_bf16.errors import StateMismatchError
from torch_bf16.sharding import bare_name, is_dtensor, places

from .optimizer import BF16Optimizer

__all__ = ["refuse_replaced"]


def refuse_replaced(
    optimizers: Iterable[torch.optim.Optimizer], others: Iterable[torch.optim.Optimizer] = ()
) -> None:
    """Refuse an optimizer whose model has replaced parameters that it trains.

    It would step for the old parameters, which get no gradients any more, and the new ones would
    never change: without any error, if the model still has some of the optimizer's parameters. Only
    new parameters with the name of an old one count: a parameter that was never in the model, or
    was removed from it, may be trained elsewhere or not at all.

    Args:
        optimizers: optimizers that are to take steps. Those of this package are checked, if
            ``prepare`` or ``convert`` was given their model.
        others: other optimizers, which may train the new parameters.

    Raises:
        StateMismatchError: parameters were replaced by trainable ones that no optimizer has.
    """
    optimizers = list(optimizers)
    groups = [g for each in (*optimizers, *others) for g in getattr(each, "param_groups", ())]
    trained = {id(p) for group in groups for p in group["params"]}
    for ours in (held for each in optimizers for held in held_optimizers(each)):
        replaced = [name for name, p in _replaced(ours) if p.requires_grad and id(p) not in trained]
        if replaced:
            kind, model = type(ours).__name__, type(ours._engine.model()).__name__
            raise StateMismatchError(
                f"{len(replaced)} parameters of the {model} ({replaced[0]!r} first) are no longer "
                f"those that this {kind} has: others have taken their places, and no optimizer "
                "that was prepared trains these. Make a new optimizer of model.parameters() and "
                "prepare it with the model, or add them by add_param_group; if another optimizer "
                "trains them, prepare both in one call. Nothing was changed"
            )


def _replaced(optimizer: BF16Optimizer) -> list[tuple[str, Tensor]]:
    """Names under which the model had the optimizer's parameters, with the parameters there now."""
    engine = optimizer._engine
    model = engine.model()
    # Under DeepSpeed the optimizer steps for flat tensors.
    if model is None or engine.host is not None:
        return []
    current = {bare_name(n): p for n, p in model.named_parameters(remove_duplicate=False)}
    alive = {id(p) for p in current.values()}
    known = zip(optimizer.param_groups, engine.names.known(optimizer.param_groups), strict=True)
    gone = [
        (p, name)
        for group, names in known
        for p, name in zip(group["params"], names, strict=True)
        if name in current and id(p) not in alive
    ]
    # From a forward pass to its backward pass, an FSDP2 model shows gathered parameters.
    gathers = any(is_dtensor(p) for p, _ in gone)
    sharded = {id(p) for p, _, _ in places()} if gathers else set()
    return [(name, current[name]) for p, name in gone if id(p) not in sharded]
