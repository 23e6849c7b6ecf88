"""Whether an optimizer's step combines numbers of different parameters, observed as it runs.

A user's ``step`` is never called just to find out, because its counters and prints would show it.
Its first real calls are followed, operation by operation: which parameters' numbers are in each
tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from .contents import snapshot, within

__all__ = ["Meetings"]


class Meetings(TorchDispatchMode):
    """Follows one call of ``step``. In doubt parameters count as coupled, which costs only memory.

    Parameters are coupled if an operation takes numbers of two of them, if Python reads numbers of
    one before the step writes another, or if the call leaves data outside their states that a call
    for only one of them would not leave.

    Args:
        members: the arguments of the call: for each parameter the number of its group, the
            parameter with its gradient, and its state.
        current: returns the options of each group, by its number, and the attributes, as they are
            now.

    Attributes:
        couples: whether parameters are coupled.
    """

    def __init__(
        self, members: Sequence[tuple[int, nn.Parameter, Mapping[str, Any]]], current: Any
    ) -> None:
        super().__init__()
        self.couples = False
        self._current = current
        self._groups = [number for number, _, _ in members]
        self._parameters = [parameter for _, parameter, _ in members]
        self._before = [parameter.detach().clone() for parameter in self._parameters]
        # Weak references: while they exist, no other storage gets the same address.
        self._owners: dict[StorageWeakRef, set[int]] = {}
        self._weights: dict[StorageWeakRef, int] = {}
        self._met: dict[int, tuple[int, Any]] = {}
        self._read: set[int] = set()
        self._unwritten: set[int] = set()
        self._written: set[int] = set()
        for number, (_, parameter, state) in enumerate(members):
            self._weights[_storage(parameter)] = number
            alike = [e for e in state.values() if getattr(e, "shape", None) == parameter.shape]
            for each in (parameter, parameter.grad, *(alike if parameter.ndim else ())):
                if isinstance(each, Tensor):
                    self._mark(each, {number})
        self._left = {key: (each, snapshot(each)) for key, each in self._entries()}

    def finish(self, shared: Mapping[Any, Any]) -> None:
        """Check what the call has left; ``shared`` are its states under keys of no parameter."""
        couples = False
        for key, each in self._entries():
            before, numbers = self._left.get(key, (None, None))
            differs = numbers != snapshot(each)
            # An object that was written in place is there for the next call, too.
            couples |= differs and (each is before or self._depends(each))
        couples |= any(map(self._depends, shared.values()))
        for number, parameter in enumerate(self._parameters):
            if self._weights.get(_storage(parameter)) != number:  # p.data = ...
                couples |= self._of(parameter) != {number} or self._unwritten - {number} != set()
            elif number not in self._written:
                # Code outside torch has written it, and what that code read is unknown.
                couples |= not torch.equal(parameter, self._before[number])
        self.couples |= couples

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and note whose numbers it has read and written."""
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if not self.couples:
            self._follow(func._schema, args, kwargs, made)
        return made

    def _follow(self, schema: Any, args: Any, kwargs: Mapping[str, Any], made: Any) -> None:
        named = zip(schema.arguments, args, strict=False)
        passed = [*named, *((a, kwargs[a.name]) for a in schema.arguments if a.name in kwargs)]
        read = [each for _, each in passed]
        written = [each for a, each in passed if a.alias_info is not None and a.alias_info.is_write]
        if schema.name.startswith(("aten::_foreach_", "aten::_fused_")):
            # One operation for each row of its lists.
            rows = max((len(each) for each in read if isinstance(each, (list, tuple))), default=0)
            for row in range(rows):
                self._operate(
                    *([_in_row(e, row) for e in each] for each in (read, written, [made]))
                )
        else:
            self._operate(read, written, [made])

    def _operate(self, read: list[Any], written: list[Any], made: list[Any]) -> None:
        owners = self._of(read)
        self.couples |= len(owners) > 1
        for number in owners:
            self._meet(number)
        for each in within(written):
            self._mark(each, owners)
            number = self._weights.get(_storage(each))
            if number is not None:
                self._written.add(number)
                self.couples |= self._unwritten - {number} != set()
                self._unwritten.discard(number)
        results = [*within(made)]
        for each in results:
            self._mark(each, owners)
        if not results and not written:  # its result went to Python
            self._read |= owners
            self._unwritten |= owners

    def _meet(self, number: int) -> None:
        """Compare the options and attributes that each parameter of a group meets at its turn."""
        if number not in self._met:
            group = self._groups[number]
            now = [
                (key, snapshot(each)) for key, each in self._entries() if key[0] in (group, None)
            ]
            others = [entries for owner, entries in self._met.values() if owner == group]
            self.couples |= any(now != entries for entries in others)
            self._met[number] = group, now

    def _depends(self, value: Any) -> bool:
        """Whether a value that a call has left may depend on numbers of parameters."""
        counts = value is None or isinstance(value, (str, bool, int))
        return not counts and bool(self._read or self._of(value))

    def _entries(self) -> Iterator[tuple[tuple[int | None, str], Any]]:
        options, attributes = self._current()
        for number, group in options.items():
            yield from (((number, key), each) for key, each in group.items() if key != "params")
        yield from (((None, key), each) for key, each in attributes.items())

    def _of(self, value: Any) -> set[int]:
        owners = set()
        for each in within(value):
            if isinstance(each, Tensor):
                owners |= self._owners.get(_storage(each), set())
        return owners

    def _mark(self, tensor: Tensor, owners: set[int]) -> None:
        if owners:
            self._owners[_storage(tensor)] = self._of(tensor) | owners


def _storage(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def _in_row(value: Any, row: int) -> Any:
    if isinstance(value, (list, tuple)):
        return value[row] if row < len(value) else None
    return value
