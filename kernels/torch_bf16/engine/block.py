"""Parameters that a guard checks together, in a few calls for all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, compress, repeat
from operator import attrgetter, eq, is_, is_not
from types import NoneType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torch_bf16.memory import TransposedOrder, as_it_lies
from torch_bf16.sharding import Parameters, unlike_memory

from .addresses import Addresses
from .member import Member
from .metadata import Metadata

__all__ = ["Block", "BlockGradients", "addresses_of_present", "readable"]

_DTYPE, _SHAPE, _LAYOUT = attrgetter("dtype"), attrgetter("shape"), attrgetter("layout")
_END = object()


class BlockGradients(NamedTuple):
    """The gradients of one block.

    Attributes:
        tensors: this rank's part of each gradient; None for a parameter without one.
        addresses: as in :class:`.guard.StepGradients`.
        usable: whether they can be read as they are: no collective still has to fill one, and none
            is wrapped by another library.
        present: for each parameter whether it has a gradient.
    """

    tensors: list[Any]
    addresses: np.ndarray | None
    usable: bool
    present: list[bool]


class Block:
    """Parameters that are checked together.

    Args:
        members: one for each parameter; most have gradients.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        self.parameters = parameters = [each.parameter for each in members]
        self._dtypes = [each.gradient_dtype for each in members]
        self._orders = [each.order for each in members]
        self._keys = keys = [each.keys for each in members]
        self._planned_values = [each.state[key] for each in members for key in each.keys]
        # Everything in the states, including what the step does not use, in the order of the dicts.
        self._values = [*_values([each.state for each in members]), _END]
        tensors = [isinstance(each, Tensor) for each in self._planned_values]
        # For each tensor in the states, the place of its parameter.
        owners = chain.from_iterable(repeat(n, len(each)) for n, each in enumerate(keys))
        self._owners = [*compress(owners, tensors)]
        self._many = Parameters(parameters, [*compress(self._planned_values, tensors)])
        contiguous = map(Tensor.is_contiguous, self._many.memory)
        self._scattered = [n for n, flag in enumerate(contiguous) if not flag]
        self._memory_addresses = Addresses.of(self._many.memory)
        self._planned_metadata = self._memory_metadata()
        self._shapes = self._planned_metadata[1]
        self._state_addresses = Addresses.of(self._many.state_memory)
        self._metadata, self._gradient_metadata = Metadata(), Metadata()
        # Made for the first step in which a gradient is missing.
        self._stand_ins: list[Tensor] | None = None
        # Of the last gradients: their addresses, which parameters had one, and the same addresses
        # with a 0 for each parameter that had none.
        self._last: tuple[Addresses, list[bool], np.ndarray | None] = Addresses(), [], None
        self._all_present = [True] * len(parameters)
        # Wrapper classes of gradients that planning has accepted; any other must be checked first.
        self._wrappers = unlike_memory({*map(type, self._many.gradients()[0])})[1]

    def check(self, states: list[Mapping[str, Any]] | None) -> BlockGradients | None:
        """The gradients, or None if a parameter or a state has changed or moved.

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
                return BlockGradients(gradients, addresses, True, self._all_present)
            return self._unusual_gradients(gradients, fitting)
        except (AttributeError, RuntimeError):
            # The gradient of a sharded parameter is a plain tensor, or one cannot tell its strides.
            return None

    def intact(self, states: dict[Tensor, Any]) -> list[bool]:
        """For each parameter whether neither it nor its states have changed or moved."""
        if not self._many.in_place():
            return [False] * len(self.parameters)
        *memory, strides = zip(self._memory_metadata(), self._planned_metadata, strict=True)
        memory.append((Addresses.of(self._many.memory).values, self._memory_addresses.values))
        states_at = Addresses.of(self._many.state_memory).values, self._state_addresses.values
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

    def _unusual_gradients(self, gradients: list[Any], fitting: bool) -> BlockGradients | None:
        """Check gradients one by one; returns None as :meth:`check` does."""
        kinds = {*map(type, gradients)}
        present, tensors, complete = self._all_present, gradients, gradients
        dtypes, shapes = self._dtypes, self._shapes
        if NoneType in kinds:
            present = [*map(is_not, gradients, repeat(None))]
            tensors, complete = [*compress(gradients, present)], self._fill_gaps(gradients)
            if fitting and complete and self._gradient_metadata.holds(complete):
                addresses = self._gradient_addresses(tensors, present)
                return BlockGradients(gradients, addresses, True, present)
            dtypes, shapes = [*compress(dtypes, present)], [*compress(shapes, present)]
        unsettled, wrappers = unlike_memory(kinds - {NoneType})
        usable = fitting and not unsettled and not wrappers
        if [*map(_DTYPE, tensors)] != dtypes or not wrappers <= self._wrappers:
            return None
        # torch refuses to assign another shape, but `p.grad.data = ...` is not checked.
        if usable and (
            [*map(_SHAPE, tensors)] != shapes or {*map(_LAYOUT, tensors)} - {torch.strided}
        ):
            return None
        addresses = None
        if usable and readable(tensors, compress(self._orders, present)):
            addresses = self._gradient_addresses(tensors, present)
            if complete:
                self._gradient_metadata.note(complete)
        return BlockGradients(gradients, addresses, usable, present)

    def _fill_gaps(self, gradients: list[Any]) -> list[Any]:
        """The gradients, with a weight in place of each that is missing.

        Empty if the weights are not what a kernel could read as gradients.
        """
        if self._stand_ins is None:
            memory = self._many.memory
            alike = self._planned_metadata[0] == self._dtypes and readable(memory, self._orders)
            self._stand_ins = [each.detach() for each in memory] if alike else []
        pairs = zip(gradients, self._stand_ins, strict=False)
        return [each if gradient is None else gradient for gradient, each in pairs]

    def _gradient_addresses(self, tensors: list[Any], present: list[bool]) -> np.ndarray | None:
        """The result of :func:`addresses_of_present`: the same array if no address has changed."""
        last, of_whom, addresses = self._last
        now = last.now(tensors)
        if now is not last or present != of_whom:
            addresses = addresses_of_present(now, tensors, present)
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


def readable(tensors: Sequence[Any], orders: Iterable[TransposedOrder | None]) -> bool:
    """Whether a kernel can read all of them in place, each in its order, or else row-major."""
    # A lazily negated view can be contiguous, but its memory has the opposite sign.
    return (
        all(map(Tensor.is_contiguous, map(as_it_lies, tensors, orders)))
        and not any(map(Tensor.is_neg, tensors))
        and not any(map(Tensor.is_conj, tensors))
    )


def addresses_of_present(
    where: Addresses, tensors: Sequence[Any], present: Sequence[bool]
) -> np.ndarray | None:
    """The addresses of gradients, with a 0 for each parameter whose ``present`` is False.

    None if a gradient has no memory of its own.
    """
    pointers = np.array(where.values, np.int64)
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
