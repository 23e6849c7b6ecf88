"""Bytes of an optimizer that is there: what it holds, by role, and what a step moves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_bf16.parameters import parameters_of

from .foreign_states import extra_bits

__all__ = ["held_by_role", "held_bytes", "moved_bytes"]


def held_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of weights, gradients and states, as allocated on the device; shared bytes once."""
    parameters = parameters_of(optimizer)
    gradients = [p.grad for p in parameters if p.grad is not None]
    devices = {p.device for p in parameters}
    states = [each for each in _states(optimizer) if each.device in devices]
    return _sizes([*parameters, *gradients, *states])


def held_by_role(optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> dict[str, int]:
    """The same bytes by role; shared ones count for the first role that has them.

    Args:
        optimizer: the optimizer whose states count.
        parameters: the parameters of the whole model, with frozen ones.

    Returns:
        Bytes of ``"weights"``, ``"gradients"``, ``"moments"`` and ``"master"``, which is all that
        an optimizer keeps of weights beyond the parameter: masters, remainders, Kahan's sums.
    """
    weights = list(parameters)
    gradients = [p.grad for p in weights if p.grad is not None]
    roles = {"weights": weights, "gradients": gradients, "moments": [], "master": []}
    for state in optimizer.state.values():
        for name, value in dict(state).items():
            roles["master" if extra_bits(name) else "moments"] += _tensors([value])
    found, before = {}, []
    for role, tensors in roles.items():
        found[role] = _sizes(before + tensors) - _sizes(before)
        before += tensors
    return found


def moved_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes that a step must move: it reads gradients, and reads and writes weights and states."""
    parameters = parameters_of(optimizer)
    gradients = [p.grad for p in parameters if p.grad is not None]
    return _sizes(gradients) + 2 * _sizes([*parameters, *_states(optimizer)])


def _states(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return list(_tensors([dict(state) for state in optimizer.state.values()]))


def _tensors(value: Any) -> Iterator[Tensor]:
    """The plain tensors in a state: libraries nest them and wrap them in classes of their own."""
    # A tensor subclass has this method, which names the tensors that it is made of.
    if flatten := getattr(value, "__tensor_flatten__", None):
        yield from _tensors([getattr(value, name) for name in flatten()[0]])
    elif isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        yield from _tensors(list(vars(value).values()))


def _sizes(tensors: Sequence[Tensor]) -> int:
    parts = [
        part
        for each in tensors
        for part in ((each._indices(), each._values()) if each.is_sparse else (each,))
    ]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in parts}
    return sum(storage.nbytes() for storage in storages.values())
