"""The average of a sharded model: copies of the parts that this rank holds, under their names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from torch_bf16.sharding import WRAPPERS, local, place_like, reshard

__all__ = ["ShardedAverage", "lying_in_place"]


class ShardedAverage(nn.Module):
    """Copies of a model's parameters and buffers in modules of the same names, without their code.

    FSDP2 refuses to be copied, because its modules gather by hooks of their own. Each rank copies
    what it holds. Tied weights stay tied; what only wraps a module leaves nothing in the names.

    Args:
        model: the model, sharded; not changed.
        dtype: of the copies of floating-point parameters; None for their own.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype | None) -> None:
        super().__init__()
        _fill(self, model, dtype, {id(model): self})

    def forward(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Refuse: only the model itself can gather its weights.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "the average of a sharded model has no forward pass of its own: compute by the model, "
            "within `with ema.swapped(model): ...`"
        )


def _fill(
    copy: nn.Module, module: nn.Module, dtype: torch.dtype | None, copies: dict[int, Any]
) -> None:
    for name, parameter in module._parameters.items():
        if parameter is not None and id(parameter) not in copies:
            memory = local(parameter).detach()
            cast = memory.dtype if dtype is None or not memory.is_floating_point() else dtype
            memory = memory.to(cast, memory_format=torch.contiguous_format, copy=True)
            placed = place_like(parameter, memory)
            copies[id(parameter)] = nn.Parameter(placed, parameter.requires_grad)
        copy.register_parameter(name, copies.get(id(parameter)))
    for name, buffer in module._buffers.items():
        persistent = name not in module._non_persistent_buffers_set
        if buffer is not None and id(buffer) not in copies:
            copies[id(buffer)] = buffer.detach().clone()
        copy.register_buffer(name, copies.get(id(buffer)), persistent)
    for name, child in module._modules.items():
        if child is None:
            continue
        if name in WRAPPERS:
            _fill(copy, child, dtype, copies)
            continue
        if id(child) not in copies:
            copies[id(child)] = nn.Module()
            _fill(copies[id(child)], child, dtype, copies)
        # Not register_module, which refuses the names of a module's methods.
        copy._modules[name] = copies[id(child)]


@contextmanager
def lying_in_place(pairs: Sequence[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Within the context each weight has the numbers of its average, in the memory that it has.

    FSDP2 gathers from that memory, whatever ``.data`` is assigned to a parameter.

    Args:
        pairs: DTensors, each with its average; the DTensors have their bits, and their versions,
            again afterwards.
    """
    weights = [local(weight) for weight, _ in pairs]
    aside = [weight.detach().clone() for weight in weights]
    try:
        for weight, (_, average) in zip(weights, pairs, strict=True):
            weight.data.copy_(local(average))
        yield
    finally:
        reshard(weight for weight, _ in pairs)
        for weight, own in zip(weights, aside, strict=True):
            weight.data.copy_(own)
