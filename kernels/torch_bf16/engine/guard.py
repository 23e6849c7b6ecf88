"""Checks that a plan is still valid: the same parameters and states, in the same memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, compress, islice, repeat
from operator import attrgetter, eq, is_, is_not
from types import NoneType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torch_bf16.sharding import (
    Parameters,
    Shard,
    all_same,
    no_torch_function,
    unlike_memory,
)

from .addresses import Addresses
from .metadata import Metadata
from .states import States

__all__ = ["Guard", "StepGradients"]

_DTYPE, _SHAPE, _GRADIENT = attrgetter("dtype"), attrgetter("shape"), attrgetter("grad")

# Parameters that are checked together: all checks of a block run while its tensors are still in the
# processor's cache.
_BLOCK = 256
_END = object()


class StepGradients(NamedTuple):
    """The gradients of a step, one for each member of a plan.

    Attributes:
        tensors: this rank's part of each gradient; None for a member without one.
        addresses: int64, one for each member, 0 for a member without a gradient. None if a kernel
            cannot read a gradient in place, because it is not contiguous, is lazily negated or has
            no memory of its own. The same array as in the last step if no address has changed.
    """

    tensors: Sequence[Tensor | None]
    addresses: np.ndarray | None


class Guard:
    """Records parameters, gradients and states as they are now, to compare with them later.

    Shapes and devices of gradients are not compared with those of their parameters: torch refuses
    to assign a gradient that differs.

    Args:
        shards: one for each parameter; most have gradients.
        states: the optimizer's state.
        keys: for each parameter, the keys of its state that the step uses.
        dtypes: of the gradients, one for each parameter.

    Attributes:
        is_active: for each parameter whether it has a gradient in this step. A different set of
            gradients gets a new list.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        states: dict[Tensor, Any],
        keys: Sequence[tuple[str, ...]],
        dtypes: Sequence[torch.dtype],
    ) -> None:
        self._shards, self._states = list(shards), states
        self._plans = getattr(states, "plans", None)
        self._parameters = [each.parameter for each in shards]
        self._candidates: Sequence[Tensor] = self._parameters
        self._strangers: list[Tensor] = []
        with no_torch_function():
            self._blocks = [
                _Block(
                    some,
                    [dict.__getitem__(states, each) for each in some],
                    keys[here],
                    dtypes[here],
                )
                for first in range(0, len(shards), _BLOCK)
                for here in [slice(first, first + _BLOCK)]
                for some in [self._parameters[here]]
            ]
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
            return self._knows(parameters) and self._look(states)

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
            if _readable(present):
                addresses = _spread(Addresses.of(present), present, self.is_active)
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

    def _look(self, states: dict[Tensor, Any]) -> bool:
        blocks: list[_BlockGradients] = []
        self._gradients = None
        # States that were never handed out cannot have been moved, except by another plan.
        plans = getattr(states, "plans", None)
        hidden = (
            isinstance(states, States)
            and states is self._states
            and not states.seen
            and plans == self._plans
        )
        in_order = () if hidden else self._in_order(states)
        for block in self._blocks:
            some = None if hidden else [*islice(in_order, len(block.parameters))]
            gradients = block.look(some)
            if gradients is None:
                return False
            blocks.append(gradients)
        self._states, self._plans = states, plans
        present = [each.present for each in blocks]
        if not all_same(present, self._present):
            self._present, flags = present, [*chain.from_iterable(present)]
            if flags != self.is_active:
                self.is_active = flags
        if all(each.usable for each in blocks):
            tensors = [*chain.from_iterable([each.tensors for each in blocks])]
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


class _BlockGradients(NamedTuple):
    """The gradients of one block; see :class:`StepGradients`.

    Attributes:
        usable: whether they can be read as they are: no collective still has to fill one, and none
            is wrapped by another library.
        present: for each parameter whether it has a gradient.
    """

    tensors: list[Any]
    addresses: np.ndarray | None
    usable: bool
    present: list[bool]


class _Block:
    """Parameters that are checked together; arguments as for :class:`Guard`."""

    def __init__(
        self,
        parameters: list[Tensor],
        states: Sequence[Mapping[str, Any]],
        keys: Sequence[tuple[str, ...]],
        dtypes: Sequence[torch.dtype],
    ) -> None:
        self.parameters, self._dtypes, self._keys = parameters, list(dtypes), keys
        pairs = zip(states, keys, strict=True)
        self._planned_values = [state[key] for state, some in pairs for key in some]
        # Everything in the states, including what the step does not use, in the order of the dicts.
        self._values = [*_values(states), _END]
        tensors = [isinstance(each, Tensor) for each in self._planned_values]
        # For each tensor in the states, the place of its parameter.
        owners = chain.from_iterable(repeat(n, len(each)) for n, each in enumerate(keys))
        self._owners = [*compress(owners, tensors)]
        self._many = Parameters(parameters, [*compress(self._planned_values, tensors)])
        contiguous = map(Tensor.is_contiguous, self._many.memory)
        self._scattered = [n for n, flag in enumerate(contiguous) if not flag]
        self._memory_addresses = Addresses.of(self._many.memory)
        self._planned_metadata = self._memory_metadata()
        self._state_addresses = Addresses.of(self._many.state_memory)
        # torch has compared the shape of each gradient with its parameter's.
        self._metadata, self._gradient_metadata = Metadata(), Metadata(shapes=False)
        # Of the last gradients: their addresses, which parameters had one, and the same addresses
        # with a 0 for each parameter that had none.
        self._last: tuple[Addresses, list[bool], np.ndarray | None] = Addresses(), [], None
        self._all_present = [True] * len(parameters)
        # Wrapper classes of gradients that planning has accepted; any other must be checked first.
        self._wrappers = unlike_memory({*map(type, self._many.gradients()[0])})[1]

    def look(self, states: list[Mapping[str, Any]] | None) -> _BlockGradients | None:
        """Return the gradients, or None if a parameter or a state has changed or moved.

        Also None if a gradient is of a kind that was not planned for.

        Args:
            states: one for each parameter; None if they cannot have changed.
        """
        if not self._memory_unchanged() or not (states is None or self._states_unchanged(states)):
            return None
        try:
            gradients, fitting = self._many.gradients()
            if fitting and self._gradient_metadata.holds(gradients):
                addresses = self._gradient_addresses(gradients, self._all_present)
                return _BlockGradients(gradients, addresses, True, self._all_present)
            return self._unusual_gradients(gradients, fitting)
        except (AttributeError, RuntimeError):
            # The gradient of a sharded parameter is a plain tensor, or a gradient is sparse.
            return None

    def intact(self, states: dict[Tensor, Any]) -> list[bool]:
        """For each parameter whether neither it nor its states have changed or moved."""
        if not self._many.in_place():
            return [False] * len(self.parameters)
        *memory, strides = zip(self._memory_metadata(), self._planned_metadata, strict=True)
        memory.append((Addresses.of(self._many.memory).numbers, self._memory_addresses.numbers))
        states_at = Addresses.of(self._many.state_memory).numbers, self._state_addresses.numbers
        flags = [*map(all, zip(*(map(eq, *each) for each in memory), strict=True))]
        for owners, (now, then) in ((self._scattered, strides), (self._owners, states_at)):
            for owner, one, other in zip(owners, now, then, strict=False):
                flags[owner] &= one == other
        planned = iter(self._planned_values)
        for n, (parameter, keys) in enumerate(zip(self.parameters, self._keys, strict=True)):
            state = dict.get(states, parameter, {})
            same = [state.get(key) is next(planned) for key in keys]
            flags[n] &= all(same)
        return flags

    def _memory_unchanged(self) -> bool:
        """Whether no parameter has moved or changed its dtype, shape or strides."""
        planned = self._memory_addresses
        if not self._many.in_place() or planned.now(self._many.memory) is not planned:
            return False
        if not self._metadata.holds(self._many.memory):
            if self._memory_metadata() != self._planned_metadata:
                return False
            self._metadata.note(self._many.memory)
        return True

    def _unusual_gradients(self, gradients: list[Any], fitting: bool) -> _BlockGradients | None:
        """Check gradients one by one; returns None as :meth:`look` does."""
        kinds = {*map(type, gradients)}
        present, tensors, dtypes = self._all_present, gradients, self._dtypes
        if NoneType in kinds:
            present = [*map(is_not, gradients, repeat(None))]
            tensors, dtypes = [*compress(gradients, present)], [*compress(dtypes, present)]
        unsettled, wrappers = unlike_memory(kinds - {NoneType})
        usable = fitting and not unsettled and not wrappers
        if [*map(_DTYPE, tensors)] != dtypes or not wrappers <= self._wrappers:
            return None
        addresses = None
        if usable and _readable(tensors):
            addresses = self._gradient_addresses(tensors, present)
            if present is self._all_present:
                self._gradient_metadata.note(gradients)
        return _BlockGradients(gradients, addresses, usable, present)

    def _gradient_addresses(self, tensors: list[Any], present: list[bool]) -> np.ndarray | None:
        """The result of :func:`_spread`: the same array if no address has changed."""
        last, of_whom, addresses = self._last
        now = last.now(tensors)
        if now is not last or present != of_whom:
            addresses = _spread(now, tensors, present)
            self._last = now, present, addresses
        return addresses

    def _states_unchanged(self, states: list[Mapping[str, Any]]) -> bool:
        """Whether the states hold the same tensors, in the same memory."""
        if not self._values_unchanged(states):
            return False
        # `state["exp_avg"].data = ...` keeps the tensor but frees the memory that kernels write.
        return self._state_addresses.now(self._many.state_memory) is self._state_addresses

    def _values_unchanged(self, states: list[Mapping[str, Any]]) -> bool:
        try:
            now = chain(chain.from_iterable(map(dict.values, states)), (_END,))  # pyright: ignore
            if all(map(is_, now, self._values)):
                return True
        except TypeError:
            # A parameter without a state, or whose state is not a dict.
            if None in states:
                return False
        # Entries may have been added, or the same tensors put into another dict.
        pairs = zip(states, self._keys, strict=True)
        now = (state.get(key) for state, keys in pairs for key in keys)
        if not all(map(is_, now, self._planned_values)):
            return False
        self._values = [*_values(states), _END]
        return True

    def _memory_metadata(self) -> tuple[list[Any], ...]:
        """Dtypes, shapes and contiguity; strides of those that were not contiguous when planned."""
        memory = self._many.memory
        return (
            [*map(_DTYPE, memory)],
            [*map(_SHAPE, memory)],
            [*map(Tensor.is_contiguous, memory)],
            [memory[n].stride() for n in self._scattered],
        )


def _readable(gradients: Sequence[Any]) -> bool:
    """Whether a kernel can read all of them in place."""
    # A lazily negated view can be contiguous, but its memory has the opposite sign.
    return all(map(Tensor.is_contiguous, gradients)) and not any(map(Tensor.is_neg, gradients))


def _spread(where: Addresses, tensors: Sequence[Any], present: Sequence[bool]) -> np.ndarray | None:
    """The addresses of gradients, with a 0 for each parameter whose ``present`` is False.

    None if a gradient has no memory of its own.
    """
    pointers = np.array(where.numbers, np.int64)
    # An empty tensor has address 0; any other tensor at 0 is a wrapper without memory of its own.
    if np.count_nonzero(pointers) < len(pointers) and any(
        tensors[n].numel() for n in np.flatnonzero(pointers == 0).tolist()
    ):
        return None
    if len(pointers) < len(present):
        addresses = np.zeros(len(present), np.int64)
        addresses[present] = pointers
        return addresses
    return pointers


def _values(states: Sequence[Mapping[str, Any]]) -> list[Any]:
    return [*chain.from_iterable([each.values() for each in states])]
