"""Checks that a plan is still valid: the same parameters and states, in the same memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, compress, islice, repeat
from operator import attrgetter, is_
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from torch_bf16.sharding import all_same, no_torch_function

from .addresses import Addresses
from .block import Block, BlockGradients, addresses_of_present, readable
from .member import Member
from .states import States

__all__ = ["Guard", "StepGradients"]

_GRADIENT = attrgetter("grad")

# Parameters in a block: few enough that all checks of it run while its tensors are still in the
# processor's cache.
_PARAMETERS_IN_BLOCK = 256


class StepGradients(NamedTuple):
    """The gradients of a step, one for each member of a plan.

    Attributes:
        tensors: this rank's part of each gradient; None for a member without one.
        addresses: int64, one for each member, 0 for a member without a gradient. None if a kernel
            cannot read a gradient in place, because it is not contiguous, is lazily negated or
            conjugated, or has no memory of its own. The same array as in the last step if no
            address has changed.
    """

    tensors: Sequence[Tensor | None]
    addresses: np.ndarray | None


class Guard:
    """Records parameters, gradients and states as they are now, to compare with them later.

    Devices of gradients are not compared with those of their parameters: torch refuses to assign a
    gradient that differs.

    Args:
        members: one for each parameter; most have gradients.
        states: the optimizer's state, which has theirs.

    Attributes:
        is_active: for each parameter whether it has a gradient in this step. A different set of
            gradients gets a new list.
    """

    def __init__(self, members: Sequence[Member], states: dict[Tensor, Any]) -> None:
        self._shards, self._states = [each.shard for each in members], states
        self._orders = [each.order for each in members]
        self._replaced = getattr(states, "replaced", None)
        self._parameters = [each.parameter for each in members]
        self._candidates: Sequence[Tensor] = self._parameters
        self._strangers: list[Tensor] = []
        with no_torch_function():
            firsts = range(0, len(members), _PARAMETERS_IN_BLOCK)
            self._blocks = [Block(members[n : n + _PARAMETERS_IN_BLOCK]) for n in firsts]
            self.is_active = [each.grad is not None for each in self._parameters]
        # Found by the last check; kept only until the step that follows it.
        self._gradients: StepGradients | None = None
        # The address arrays of the blocks, and their concatenation.
        self._joined: tuple[list[np.ndarray | None], np.ndarray | None] = [], None
        self._present: list[list[bool]] = []

    def holds(self, parameters: Sequence[Tensor], states: dict[Tensor, Any]) -> bool:
        """Whether every parameter with a gradient is known and no tensor has changed or moved.

        Args:
            parameters: all that may have a gradient. Those that have one now are the new
                :attr:`is_active`.
            states: the optimizer's state.
        """
        with no_torch_function():
            return self._knows(parameters) and self._check(states)

    def intact(self, states: dict[Tensor, Any]) -> list[bool]:
        """For each parameter whether neither it nor its states have changed or moved."""
        with no_torch_function():
            return [same for each in self._blocks for same in each.intact(states)]

    def gradients(self) -> StepGradients:
        """This rank's part of each gradient, for the step that follows; may communicate."""
        gradients, self._gradients = self._gradients, None
        if gradients is None:
            pairs = zip(self._shards, self.is_active, strict=True)
            tensors = [shard.gradient() if flag else None for shard, flag in pairs]
            present, addresses = [*compress(tensors, self.is_active)], None
            if readable(present, compress(self._orders, self.is_active)):
                addresses = addresses_of_present(Addresses.of(present), present, self.is_active)
            gradients = StepGradients(tensors, addresses)
        return gradients

    def forget_gradients(self) -> None:
        """Drop the gradients that :meth:`holds` found, so that they can be freed."""
        self._gradients = None

    def _knows(self, parameters: Sequence[Tensor]) -> bool:
        """Whether only parameters of the plan have gradients, and come in the plan's order."""
        if parameters is not self._candidates and not all_same(self._candidates, [*parameters]):
            numbers = {*map(id, self._parameters)}
            known = [id(each) in numbers for each in parameters]
            # In a different order they would get each other's gradients.
            if not all_same([*compress(parameters, known)], self._parameters):
                return False
            pairs = zip(parameters, known, strict=True)
            self._strangers = [each for each, flag in pairs if not flag]
        self._candidates = parameters
        return all(map(is_, map(_GRADIENT, self._strangers), repeat(None)))

    def _check(self, states: dict[Tensor, Any]) -> bool:
        blocks: list[BlockGradients] = []
        self._gradients = None
        # States that were never handed out cannot have been moved, except by our own code.
        replaced = getattr(states, "replaced", None)
        hidden = (
            isinstance(states, States)
            and states is self._states
            and not states.seen
            and replaced == self._replaced
        )
        in_order = () if hidden else self._in_order(states)
        for block in self._blocks:
            some = None if hidden else [*islice(in_order, len(block.parameters))]
            gradients = block.check(some)
            if gradients is None:
                return False
            blocks.append(gradients)
        self._states, self._replaced = states, replaced
        present = [each.present for each in blocks]
        if not all_same(present, self._present):
            self._present, flags = present, [*chain.from_iterable(present)]
            if flags != self.is_active:
                self.is_active = flags
        if all(each.usable for each in blocks):
            of_blocks = [each.tensors for each in blocks]
            tensors = of_blocks[0] if len(of_blocks) == 1 else [*chain.from_iterable(of_blocks)]
            addresses = self._join([each.addresses for each in blocks])
            self._gradients = StepGradients(tensors, addresses)
        return True

    def _join(self, addresses: list[np.ndarray | None]) -> np.ndarray | None:
        """The addresses of all blocks, or None if a block has None; reuses the last array."""
        if not all_same(addresses, self._joined[0]):
            arrays = [each for each in addresses if each is not None]
            complete = len(arrays) == len(addresses)
            self._joined = addresses, np.concatenate(arrays) if complete else None
        return self._joined[1]

    def _in_order(self, states: dict[Tensor, Any]) -> Iterable[Any]:
        """The states of the parameters, in their order."""
        if len(states) == len(self._parameters) and all(map(is_, states, self._parameters)):
            return iter(dict.values(states))
        return (dict.get(states, each) for each in self._parameters)
