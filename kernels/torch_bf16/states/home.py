"""Where an optimizer keeps the states of a parameter: on its device, or in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_bf16.backends import Bus, bus_of
from torch_bf16.memory import TransposedOrder, as_it_lies
from torch_bf16.recipe import Recipe
from torch_bf16.rules import Rule
from torch_bf16.sharding import Shard

__all__ = ["SMALLEST", "Home", "order_of"]

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
        order: the order of planes in memory; None for row-major order.
    """

    shape: tuple[int, ...]
    device: torch.device
    bus: Bus | None = None
    order: TransposedOrder | None = None

    @classmethod
    def of(cls, shard: Shard, recipe: Recipe, order: TransposedOrder | None = None) -> Home:
        """Where a recipe keeps the states of a parameter, and the remainder of its weight.

        Args:
            shard: the parameter's shard.
            recipe: the recipe.
            order: as the attribute.

        Raises:
            NotImplementedError: the recipe offloads the states, which does not work with this
                parameter; the message begins with a verb.
        """
        shape, device = tuple(shard.memory.shape), shard.memory.device
        offloads = recipe.offload != "none" and shard.numel >= SMALLEST
        if not offloads or (bus := bus_of(device)) is None:
            return cls(shape, device, None, order)
        if shard.offload_obstacle:
            raise NotImplementedError(shard.offload_obstacle)
        return cls(shape, torch.device("cpu"), bus, order)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate a plane of zeros."""
        if self.order is not None:
            lying = self._zeros([shape[dim] for dim in self.order.dims], dtype)
            return self.order.back(lying)
        return self._zeros(shape, dtype)

    def _zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if self.bus is None:
            return torch.zeros(shape, dtype=dtype, device=self.device)
        return self.bus.zeros(shape, dtype)

    def put(self, plane: Tensor) -> Tensor:
        """Bring a plane here, in order and with the same bits; itself if it already is so."""
        if self.order is not None:
            lying = as_it_lies(plane, self.order)
            put = self._put(lying)
            return plane if put is lying else self.order.back(put)
        return self._put(plane)

    def _put(self, plane: Tensor) -> Tensor:
        if self.bus is None:
            return plane.to(self.device).contiguous()
        return self.bus.to_host(plane)


def order_of(shard: Shard, rule: Rule, recipe: Recipe) -> TransposedOrder | None:
    """The order in which kernels update a parameter and its states where they lie.

    None for row-major order: of a parameter in any other they update a copy. So they do if states
    are in blocks, which are neighbours in row-major order, and if a direction is computed from
    whole matrices.
    """
    order = shard.order
    if order is None or rule.stage_states:
        return None
    roles = ("weights", *(state.role for state in rule.states))
    dtype = shard.parameter.dtype
    formats = (recipe.format_of(role, shard.shape, dtype) for role in roles)
    return None if any(each.block > 1 for each in formats) else order
