"""Where an optimizer keeps the numbers of a parameter: beside it, or in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_bf16.backends import Bus, bus_of
from torch_bf16.recipe import Recipe
from torch_bf16.sharding import Shard

__all__ = ["SMALLEST", "Home"]

SMALLEST = 1 << 16
"""Elements of a parameter whose states go to the host.

The states of smaller ones take next to nothing, and launching a copy takes microseconds.
"""


@dataclass(frozen=True)
class Home:
    """A place for the planes of one parameter.

    Attributes:
        shape: of what this rank holds of it.
        device: where the planes are.
        bus: that leads there; None where it is the parameter's own device.
    """

    shape: tuple[int, ...]
    device: torch.device
    bus: Bus | None = None

    @classmethod
    def of(cls, shard: Shard, recipe: Recipe) -> Home:
        """Where a recipe keeps the states of a parameter, and the remainder of its weight.

        Raises:
            NotImplementedError: it would be host memory, which does not work here; the message
                begins with a verb.
        """
        memory = shard.memory
        shape = tuple(memory.shape)
        if recipe.offload == "none" or shard.numel < SMALLEST:
            return cls(shape, memory.device)
        bus = bus_of(memory.device)
        if bus is None:
            return cls(shape, memory.device)
        if shard.offload_obstacle:
            raise NotImplementedError(shard.offload_obstacle)
        return cls(shape, torch.device("cpu"), bus)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A new plane."""
        if self.bus is None:
            return torch.zeros(shape, dtype=dtype, device=self.device)
        return self.bus.zeros(shape, dtype)

    def put(self, plane: Tensor) -> Tensor:
        """A contiguous plane there with the same bits: itself if it is one already."""
        if self.bus is None:
            return plane.to(self.device).contiguous()
        return self.bus.to_host(plane)
