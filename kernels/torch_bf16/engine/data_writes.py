"""Writes through ``p.data``, which raise no version.

The remainder of an exact master means nothing beside other numbers than those that the last step
wrote. torch counts writes to a parameter, but not those to what ``p.data`` hands out. So the first
time that ``.data`` of a weight with a remainder is read or assigned after a step, the lower byte of
each of its numbers is put aside, and the next step drops the remainders of those that differ, of
all numbers where most do. Steps before which nobody asks for ``.data`` cost nothing.

What was put aside tells what later writes have changed that do raise the version, too: SAM takes
``p.data.clone()``, moves the weight, and puts the numbers back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from torch_bf16.sharding import Shard, is_dtensor, local, version_of
from torch_bf16.torch_patches import is_enabled

__all__ = ["REMAINDERS", "DataWatch", "drop_remainders", "note_step", "restore", "touched"]

REMAINDERS = frozenset({"remainder16", "remainder8"})
"""Keys of a state whose bits mean nothing beside another weight."""

_DATA: Any = torch.Tensor.data
_intercepted: set[type] = set()
# By id: a weak reference would keep torch.utils.swap_tensors from exchanging the parameter.
_watches: WeakValueDictionary[int, DataWatch] = WeakValueDictionary()
_touched: WeakSet[DataWatch] = WeakSet()


class DataWatch:
    """What a weight was when its ``.data`` was first asked for after a step.

    It lasts as long as somebody holds it.

    Attributes:
        version: of the parameter then.
    """

    def __init__(self, parameter: Tensor) -> None:
        self._parameter = parameter
        self._bytes: Tensor | None = None
        self.version = -1
        self._aliases: list[TensorWeakRef] = []

    @classmethod
    def of(cls, shard: Shard, state: Mapping[str, Any]) -> DataWatch | None:
        """The watch over a weight; None if its state has no remainder, or it cannot be watched.

        Args:
            shard: of the parameter.
            state: the optimizer's of it.
        """
        parameter = shard.parameter
        plain = issubclass(type(parameter), nn.Parameter)
        # FSDP1 assigns the data of its parameters several times in each step.
        known = shard.can_gather and (plain or is_dtensor(parameter))
        if not known or REMAINDERS.isdisjoint(state) or not is_enabled("parameter_data"):
            return None
        kind: Any = nn.Parameter if plain else type(parameter)
        if kind not in _intercepted:
            _intercepted.add(kind)
            kind.data = property(_read, _assign)
        found = _watches.get(id(parameter))
        if found is None:
            found = _watches[id(parameter)] = cls(parameter)
        return found

    def touch(self, alias: Tensor | None = None) -> None:
        """Put the lower bytes aside, if that was not done since the last step.

        Args:
            alias: what is handed out, by which the weight can be written as long as it lives.
        """
        if self._bytes is None:
            self._note()
            _touched.add(self)
        if alias is not None:
            self._aliases = [*self._living(), TensorWeakRef(alias)]

    def knows(self, version: int) -> bool:
        """Whether the bytes were put aside while the parameter had the version that a step left."""
        comparable = self._bytes is not None and self._parameter.dtype == torch.bfloat16
        return comparable and self.version == version

    def changed(self) -> Tensor | None:
        """Which numbers were written since, bool; None where none can have been."""
        then = self._bytes
        now = None if then is None else self._lower_bytes()
        if then is None or now is None or now.shape != then.shape:
            return None
        changed = now != then.to(now.device)
        # A GPU would have to be waited for.
        if changed.is_cpu and not changed.any():
            return None
        # Unrelated numbers have the same lower byte once in 256.
        return changed | (2 * changed.count_nonzero() > changed.numel())

    def note_step(self) -> None:
        """Begin anew: at once where an alias lives, through which it can be written unasked."""
        self._aliases, self._bytes = self._living(), None
        if self._aliases:
            self._note()
        else:
            _touched.discard(self)

    def _note(self) -> None:
        self._bytes, self.version = self._lower_bytes(), version_of(self._parameter)

    def _living(self) -> list[TensorWeakRef]:
        return [each for each in self._aliases if each() is not None]

    def _lower_bytes(self) -> Tensor | None:
        memory = local(self._parameter).detach()
        return memory.view(torch.int16).to(torch.uint8) if memory.dtype == torch.bfloat16 else None


def drop_remainders(
    parameters: Iterable[Tensor],
    states: dict[Tensor, Any],
    snapshots: Mapping[Tensor, Any],
    count: bool,
) -> int:
    """Drop the remainders of what was written through ``.data`` since the last step.

    Args:
        parameters: those of the step that is about to be taken.
        states: the optimizer's; written in place.
        snapshots: what the last step left of them; their ``version`` becomes the present one where
            the writes since then are known number by number.
        count: whether to wait for the device and say how many parameters got other numbers than 0.
    """
    found = []
    for parameter in parameters if _touched else ():
        watch, snapshot = _watches.get(id(parameter)), snapshots.get(parameter)
        changed = None if watch is None else watch.changed()
        if watch is not None and snapshot is not None and watch.knows(snapshot.version):
            snapshot.version = version_of(parameter)
        if changed is not None:
            # Zeros are a mask's, which nobody wants to hear about.
            found.append(changed & (local(parameter) != 0))
            state = dict.get(states, parameter, {})
            for key in REMAINDERS.intersection(state):
                remainder = local(state[key])
                remainder.masked_fill_(changed.to(remainder.device), 0)
    return sum(bool(each.any()) for each in found) if count else 0


def touched(parameters: Iterable[Tensor]) -> bool:
    """Whether ``.data`` of one of these was asked for since the last step."""
    return any(_watches.get(id(each)) in _touched for each in parameters) if _touched else False


def note_step(parameters: Iterable[Tensor]) -> None:
    """Note that a step has written these parameters."""
    for parameter in parameters if _touched else ():
        watch = _watches.get(id(parameter))
        if watch is not None:
            watch.note_step()


def restore() -> None:
    """Give ``.data`` back as torch has it; writes are not noticed until the next plan is made.

    Example:
        >>> restore()
        >>> "data" in vars(torch.nn.Parameter)
        False
    """
    while _intercepted:
        del _intercepted.pop().data  # pyright: ignore[reportAttributeAccessIssue]


def _read(parameter: Tensor) -> Tensor:
    alias = _DATA.__get__(parameter)
    watch = _watches.get(id(parameter))
    if watch is not None:
        watch.touch(alias)
    return alias


def _assign(parameter: Tensor, value: Tensor) -> None:
    watch = _watches.get(id(parameter))
    if watch is not None:
        watch.touch()
    _DATA.__set__(parameter, value)
