"""Refuses optimizers of parameters that something else has replaced.

:func:`refuse_replaced` compares an optimizer with its model before it is used; a step compares it
when no parameter has a gradient (:func:`check_in_model`), and compares its groups with its states
when it makes a plan (:func:`check_replaced`).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torch_bf16.engine.wrappers import held_optimizers
from torch_bf16.errors import UNTOUCHED, Label, StateMismatchError
from torch_bf16.parameters import parameters_in, parameters_of
from torch_bf16.sharding import bare_name, gradients_of, is_dtensor, is_flat, places

if TYPE_CHECKING:
    from .optimizer import BF16Optimizer

__all__ = ["check_in_model", "check_replaced", "orphan_in", "refuse_replaced"]


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


def check_in_model(optimizer: BF16Optimizer) -> None:
    """Refuse a step without gradients if new parameters of the model have gradients instead.

    Args:
        optimizer: the optimizer; none of its parameters has a gradient.

    Raises:
        StateMismatchError: the model has new parameters, which the optimizer would not train.
    """
    model = optimizer._engine.model()
    if model is None:
        return
    own = {*map(id, parameters_of(optimizer))}
    parameters = [*parameters_in(model)]
    has_gradients = any(each is not None for each in gradients_of(parameters))
    if own.isdisjoint(map(id, parameters)) and has_gradients:
        raise StateMismatchError(
            f"no parameter of this {type(optimizer).__name__} has a gradient, and none belongs to "
            f"the {type(model).__name__} any more: its parameters were replaced, as fully_shard, "
            "to_empty and load_state_dict(assign=True) do, and no step would train the new ones. "
            f"Make the optimizer of the new ones, then call prepare() or convert(). {UNTOUCHED}"
        )


def orphan_in(states: Mapping[Any, Any], current: Container[int]) -> tuple[int, ...] | None:
    """The shape of a parameter that has a state and is in no group; None if there is none.

    Args:
        states: the optimizer's states.
        current: the ids of the parameters in its groups.
    """
    for each in states:
        # Under DeepSpeed, groups hold one flat tensor at a time.
        if id(each) not in current and isinstance(each, Tensor) and not is_flat(each):
            return tuple(each.shape)
    return None


def check_replaced(
    states: Mapping[Tensor, Any], labels: Mapping[Tensor, Label], orphan: tuple[int, ...] | None
) -> None:
    """Refuse a new parameter in place of an old one whose state is still in the optimizer.

    Args:
        states: the optimizer's states, which are only read.
        labels: the parameters that are about to take a step, and their labels.
        orphan: what :func:`orphan_in` has returned in this step.

    Raises:
        StateMismatchError: one of these parameters seems to have replaced another.
    """
    if orphan is None:
        return
    stateless = [label for each, label in labels.items() if not dict.get(states, each)]  # pyright: ignore
    if stateless:
        raise StateMismatchError(
            f"{stateless[0]()} has no optimizer state, while a parameter of shape {orphan} that "
            "has one is in no group any more. If the new one replaced it after the first step, put "
            "the old one back and write into it (p.copy_(...) under torch.no_grad()). If it was "
            "taken out on purpose, drop its state: del optimizer.state[old_parameter]"
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
