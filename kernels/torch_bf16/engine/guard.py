"""Whether a plan still fits: it knows all that takes part, in the memory where that was."""

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

__all__ = ["Found", "Guard"]

_DTYPE, _SHAPE, _GRADIENT = attrgetter("dtype"), attrgetter("shape"), attrgetter("grad")

# Parameters that are looked at together, several times in turn: what one look has brought into a
# processor's cache is still there for the next one.
_BLOCK = 256
_END = object()


class Found(NamedTuple):
    """The gradients of a step, one for each member of a plan.

    Attributes:
        gradients: this rank's part of each; None for a member that takes no part.
        addresses: int64, of each, 0 for None; None where a gradient is not contiguous, or negated
            when it is read. The same array as in the step before where they have not changed.
    """

    gradients: Sequence[Tensor | None]
    addresses: np.ndarray | None


class Guard:
    """What parameters, their gradients and their states are now, to compare later.

    Gradients are asked for what torch does not: it lets nobody assign one of another shape or on
    another device than its parameter.

    Args:
        shards: of parameters, most of which have gradients.
        states: the optimizer's state.
        dtypes: of the gradients.

    Attributes:
        taking_part: for each parameter, whether it takes part in the step; another list for another
            set of them.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        states: dict[Tensor, Any],
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
                    dtypes[first : first + _BLOCK],
                )
                for first in range(0, len(shards), _BLOCK)
                for some in [self._parameters[first : first + _BLOCK]]
            ]
            self.taking_part = [each.grad is not None for each in self._parameters]
        # What the last look found, for the step that follows it and no longer.
        self._found: list[Tensor | None] | None = None
        self._addresses: np.ndarray | None = None
        # The arrays of the blocks, and the one that they make.
        self._joined: tuple[list[np.ndarray | None], np.ndarray | None] = [], None
        self._there: list[list[bool]] = []

    def holds(self, parameters: Sequence[Tensor], states: dict[Tensor, Any]) -> bool:
        """Whether all that take part are known, and all tensors the same in the same memory.

        Args:
            parameters: all that may have a gradient; those that have one take part from now on.
            states: the optimizer's state.
        """
        with no_torch_function():
            return self._knows(parameters) and self._look(states)

    def intact(self, states: dict[Tensor, Any]) -> list[bool]:
        """For each parameter whether it and its states are what they were, where they were."""
        with no_torch_function():
            return [same for each in self._blocks for same in each.intact(states)]

    def gradients(self) -> Found:
        """This rank's part of each gradient, which may communicate; for the step that follows."""
        found, addresses = self._found, self._addresses
        self._found = self._addresses = None
        if found is None:
            pairs = zip(self._shards, self.taking_part, strict=True)
            found = [each.gradient() if there else None for each, there in pairs]
            present, addresses = [*compress(found, self.taking_part)], None
            if _readable(present):
                addresses = _spread(Addresses.of(present), present, self.taking_part)
        return Found(found, addresses)

    def _knows(self, parameters: Sequence[Tensor]) -> bool:
        """Whether none but the plan's has a gradient, and they come in its order."""
        if parameters is not self._candidates and not all_same(self._candidates, [*parameters]):
            numbers = {*map(id, self._parameters)}
            known = [id(each) in numbers for each in parameters]
            # In another order than the plan's they would be given each other's gradients.
            if not all_same([*compress(parameters, known)], self._parameters):
                return False
            pairs = zip(parameters, known, strict=True)
            self._strangers = [each for each, flag in pairs if not flag]
        self._candidates = parameters
        return all(map(is_, map(_GRADIENT, self._strangers), repeat(None)))

    def _look(self, states: dict[Tensor, Any]) -> bool:
        looks: list[_Gradients] = []
        self._found = self._addresses = None
        # What nobody was given nobody has put elsewhere, and no other plan has changed.
        plans = getattr(states, "plans", None)
        hidden = (
            isinstance(states, States)
            and states is self._states
            and not states.seen
            and plans == self._plans
        )
        own = () if hidden else self._own(states)
        for block in self._blocks:
            found = block.look(None if hidden else [*islice(own, len(block.parameters))])
            if found is None:
                return False
            looks.append(found)
        self._states, self._plans = states, plans
        there = [each.there for each in looks]
        if not all_same(there, self._there):
            self._there, flags = there, [*chain.from_iterable(there)]
            if flags != self.taking_part:
                self.taking_part = flags
        if all(each.usable for each in looks):
            self._found = [*chain.from_iterable([each.gradients for each in looks])]
            self._addresses = self._join([each.addresses for each in looks])
        return True

    def _join(self, addresses: list[np.ndarray | None]) -> np.ndarray | None:
        """Those of all blocks: the same array for the same ones; None where one is."""
        if not all_same(addresses, self._joined[0]):
            arrays = [each for each in addresses if each is not None]
            complete = len(arrays) == len(addresses)
            self._joined = addresses, np.concatenate(arrays) if complete else None
        return self._joined[1]

    def _own(self, states: dict[Tensor, Any]) -> Iterable[Any]:
        """The states of the parameters, in their order."""
        if len(states) == len(self._parameters) and all(map(is_, states, self._parameters)):
            return iter(dict.values(states))
        return (dict.get(states, each) for each in self._parameters)


class _Gradients(NamedTuple):
    """Those of one block; see :class:`Found`.

    Attributes:
        usable: whether they can be read as they are: no collective is under way that has still to
            fill one of them, and no other library has wrapped one.
        there: for each parameter whether it has one.
    """

    gradients: list[Any]
    addresses: np.ndarray | None
    usable: bool
    there: list[bool]


class _Block:
    """Some of the parameters.

    Args:
        parameters: in order.
        own: their states.
        dtypes: of their gradients.
    """

    def __init__(
        self,
        parameters: list[Tensor],
        own: Sequence[Mapping[str, Any]],
        dtypes: Sequence[torch.dtype],
    ) -> None:
        self.parameters, self._dtypes = parameters, list(dtypes)
        self._needed = [tuple(each) for each in own]
        self._kept = _values(own)
        # All that the states hold now, which may be more, or in another order.
        self._seen = [*self._kept, _END]
        tensors = [isinstance(each, Tensor) for each in self._kept]
        # Whose state each tensor beside the parameters is.
        owners = chain.from_iterable(repeat(n, len(each)) for n, each in enumerate(own))
        self._owners = [*compress(owners, tensors)]
        self._many = Parameters(parameters, [*compress(self._kept, tensors)])
        contiguous = map(Tensor.is_contiguous, self._many.memory)
        self._scattered = [n for n, flag in enumerate(contiguous) if not flag]
        self._memory_addresses = Addresses.of(self._many.memory)
        self._planned_metadata = self._memory_metadata()
        self._state_addresses = Addresses.of(self._many.kept)
        self._metadata, self._usual = Metadata(), Metadata()
        self._known: tuple[Addresses, list[bool], np.ndarray | None] = Addresses(), [], None
        self._everyone = [True] * len(parameters)
        # Those of other classes have not been checked.
        self._wrappers = unlike_memory({*map(type, self._many.gradients()[0])})[1]

    def look(self, own: list[Mapping[str, Any]] | None) -> _Gradients | None:
        """The gradients, where parameters and states are what they were; else None.

        None, too, where a gradient is of a kind that was not planned for.

        Args:
            own: the states; None where they cannot have changed.
        """
        if not self._memory_unchanged() or not (own is None or self._states_unchanged(own)):
            return None
        try:
            found, fitting = self._many.gradients()
            if fitting and self._usual.holds(found):
                addresses = self._gradient_addresses(found, self._everyone)
                return _Gradients(found, addresses, True, self._everyone)
            return self._unusual_gradients(found, fitting)
        except (AttributeError, RuntimeError):
            # A plain tensor for the gradient of a sharded parameter, or one that is sparse.
            return None

    def intact(self, states: dict[Tensor, Any]) -> list[bool]:
        """For each parameter whether it and its states are what they were."""
        if not self._many.in_place():
            return [False] * len(self.parameters)
        *memory, strides = zip(self._memory_metadata(), self._planned_metadata, strict=True)
        memory.append((Addresses.of(self._many.memory).numbers, self._memory_addresses.numbers))
        kept = Addresses.of(self._many.kept).numbers, self._state_addresses.numbers
        found = [*map(all, zip(*(map(eq, *each) for each in memory), strict=True))]
        for owners, (now, then) in ((self._scattered, strides), (self._owners, kept)):
            for owner, one, other in zip(owners, now, then, strict=False):
                found[owner] &= one == other
        kept = iter(self._kept)
        for n, (parameter, names) in enumerate(zip(self.parameters, self._needed, strict=True)):
            own = dict.get(states, parameter, {})
            same = [own.get(name) is next(kept) for name in names]
            found[n] &= all(same)
        return found

    def _memory_unchanged(self) -> bool:
        """Whether parameters are where they were, of the dtypes, shapes and strides of then."""
        planned = self._memory_addresses
        if not self._many.in_place() or planned.now(self._many.memory) is not planned:
            return False
        if not self._metadata.holds(self._many.memory):
            if self._memory_metadata() != self._planned_metadata:
                return False
            self._metadata.note(self._many.memory)
        return True

    def _unusual_gradients(self, found: list[Any], fitting: bool) -> _Gradients | None:
        """Gradients that are not the usual ones, looked at one by one; None as in :meth:`look`."""
        kinds = {*map(type, found)}
        there, present, dtypes = self._everyone, found, self._dtypes
        if NoneType in kinds:
            there = [*map(is_not, found, repeat(None))]
            present, dtypes = [*compress(found, there)], [*compress(dtypes, there)]
        unsettled, wrappers = unlike_memory(kinds - {NoneType})
        usable = fitting and not unsettled and not wrappers
        if [*map(_DTYPE, present)] != dtypes or not wrappers <= self._wrappers:
            return None
        addresses = None
        if usable and _readable(present):
            addresses = self._gradient_addresses(present, there)
            if there is self._everyone:
                self._usual.note(found)
        return _Gradients(found, addresses, usable, there)

    def _gradient_addresses(self, present: list[Any], there: list[bool]) -> np.ndarray | None:
        """See :func:`_spread`; the same array where they have not changed."""
        known, flags, addresses = self._known
        now = known.now(present)
        if now is not known or there != flags:
            addresses = _spread(now, present, there)
            self._known = now, there, addresses
        return addresses

    def _states_unchanged(self, own: list[Mapping[str, Any]]) -> bool:
        """Whether states hold the tensors that they held, where those were."""
        if not self._holds_the_same(own):
            return False
        # `state["exp_avg"].data = ...` keeps the tensor and frees the memory that kernels know.
        return self._state_addresses.now(self._many.kept) is self._state_addresses

    def _holds_the_same(self, own: list[Mapping[str, Any]]) -> bool:
        try:
            now = chain(chain.from_iterable(map(dict.values, own)), (_END,))  # pyright: ignore
            if all(map(is_, now, self._seen)):
                return True
        except TypeError:
            # A parameter without states, or with one of another class.
            if None in own:
                return False
        # Somebody may have added to the states, or put the same tensors into another dict.
        pairs = zip(own, self._needed, strict=True)
        found = (its.get(name) for its, names in pairs for name in names)
        if not all(map(is_, found, self._kept)):
            return False
        self._seen = [*_values(own), _END]
        return True

    def _memory_metadata(self) -> tuple[list[Any], ...]:
        """What parameters are in memory, in lists that follow those."""
        memory = self._many.memory
        return (
            [*map(_DTYPE, memory)],
            [*map(_SHAPE, memory)],
            [*map(Tensor.is_contiguous, memory)],
            [memory[n].stride() for n in self._scattered],
        )


def _readable(gradients: Sequence[Any]) -> bool:
    """Whether a kernel can read their memory as it is."""
    # A lazily negated view is contiguous, too, and its memory has the other sign.
    return all(map(Tensor.is_contiguous, gradients)) and not any(map(Tensor.is_neg, gradients))


def _spread(where: Addresses, gradients: Sequence[Any], there: Sequence[bool]) -> np.ndarray | None:
    """Where gradients are, and 0 for each parameter that has none, as ``there`` says.

    None where one has no memory.
    """
    pointers = np.array(where.numbers, np.int64)
    # A tensor without elements is at 0, too; what else is there has memory of another kind.
    if np.count_nonzero(pointers) < len(pointers) and any(
        gradients[n].numel() for n in np.flatnonzero(pointers == 0).tolist()
    ):
        return None
    if len(pointers) < len(there):
        addresses = np.zeros(len(there), np.int64)
        addresses[there] = pointers
        return addresses
    return pointers


def _values(states: Sequence[Mapping[str, Any]]) -> list[Any]:
    return [*chain.from_iterable([each.values() for each in states])]
