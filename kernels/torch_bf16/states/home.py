"""Where an optimizer keeps the states of a parameter: on its device, or in host memory."""

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
"""Elements of the smallest parameter whose states go to the host.

States of smaller parameters take little memory, and launching a copy takes microseconds.
"""


@dataclass(frozen=True)
class Home:
    """A place for the planes of one parameter.

    Attributes:
        shape: shape of this rank's part of the parameter.
        device: the device that the planes are on.
        bus: copies planes to and from the host; None if they are on the parameter's own device.
    """

    shape: tuple[int, ...]
    device: torch.device
    bus: Bus | None = None

    @classmethod
    def of(cls, shard: Shard, recipe: Recipe) -> Home:
        """Where a recipe keeps the states of a parameter, and the remainder of its weight.

        Raises:
            NotImplementedError: the recipe offloads the states, which does not work with this
                parameter; the message begins with a verb.
        """
        shape, device = tuple(shard.memory.shape), shard.memory.device
        offloads = recipe.offload != "none" and shard.numel >= SMALLEST
        if not offloads or (bus := bus_of(device)) is None:
            return cls(shape, device)
        if shard.offload_obstacle:
            raise NotImplementedError(shard.offload_obstacle)
        return cls(shape, torch.device("cpu"), bus)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate a plane of zeros."""
        if self.bus is None:
            return torch.zeros(shape, dtype=dtype, device=self.device)
        return self.bus.zeros(shape, dtype)

    def put(self, plane: Tensor) -> Tensor:
        """Bring a plane here, contiguous and with the same bits; itself if it already is so."""
        if self.bus is None:
            return plane.to(self.device).contiguous()
        return self.bus.to_host(plane)
