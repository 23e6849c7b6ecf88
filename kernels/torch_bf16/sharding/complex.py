"""Complex parameters, which a step updates as pairs of real numbers, like ``torch.optim``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from .local import as_real, local
from .shard import Shard

__all__ = ["ComplexShard"]


class ComplexShard(Shard):
    """A complex parameter that is not sharded.

    Its memory, gradient and shape, and the states that :meth:`take` reads, are those of
    ``torch.view_as_real``; state dicts and ``optimizer.state`` have complex states, as in torch.
    """

    @property
    def memory(self) -> Tensor:
        return as_real(local(self.parameter).detach())

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return (*self.parameter.shape, 2)

    def gradient(self) -> Tensor:
        return as_real(super().gradient())

    def take(self, saved: Tensor) -> Tensor:
        return as_real(super().take(saved))

    def place(self, memory: Tensor, shape: Sequence[int] | None = None) -> Tensor:
        return torch.view_as_complex(memory)
