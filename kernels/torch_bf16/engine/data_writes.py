"""Writes through ``p.data``, which raise no version.

The remainder of an exact master means nothing beside other numbers than those that the last step
wrote. torch counts writes to a parameter, but not those to what ``p.data`` hands out. So the first
time that ``.data`` of a weight with a remainder is read or assigned after a step, the lower byte of
each of its numbers is put aside, and the next step drops the remainders of those that differ, of
all numbers where most do. Steps before which nobody asks for ``.data`` cost nothing.

What was put aside tells what later writes have changed that do raise the version, too: SAM takes
``p.data.clone()``, moves the weight, and puts the numbers back. So a weight that was written by
such a write, without which nothing had been put aside, is watched until a step comes before which
nobody has written it: a program may clamp a weight after each step.
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
# Those of all optimizers that have a parameter, by its id: a weak reference to it would keep
# torch.utils.swap_tensors from exchanging it.
_watches: WeakValueDictionary[int, WeakSet[DataWatch]] = WeakValueDictionary()
_touched: WeakSet[DataWatch] = WeakSet()


class DataWatch:
    """What a weight was when its ``.data`` was first asked for after an optimizer's step.

    It lasts as long as that optimizer holds it.

    Attributes:
        version: of the parameter then.
    """

    def __init__(self, parameter: Tensor) -> None:
        self._parameter = parameter
        self._bytes: Tensor | None = None
        self.version = -1
        self._aliases: list[TensorWeakRef] = []
        self._follows_writes = False
        self._others = _watches.setdefault(id(parameter), WeakSet())
        self._others.add(self)

    @classmethod
    def of(
        cls, shard: Shard, state: Mapping[str, Any], watch: DataWatch | None = None
    ) -> DataWatch | None:
        """The watch over a weight; None if its state has no remainder, or it cannot be watched.

        Args:
            shard: of the parameter.
            state: the optimizer's of it.
            watch: the optimizer's so far, which goes on.
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
        return watch or cls(parameter)

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

    def follow_writes(self) -> None:
        """Put the lower bytes aside at each step, until nobody writes the weight after one."""
        self._follows_writes = True
        _touched.add(self)

    def forget_writes(self, unless: bool) -> None:
        """Stop that, unless there was such a write since the last step."""
        self._follows_writes &= unless

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
        if self._aliases or self._follows_writes:
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
    """Drop the remainders of numbers that were written since the last step, where they are known.

    Args:
        parameters: those of the step that is about to be taken.
        states: the optimizer's; written in place.
        snapshots: what the last step left of them; their ``version`` becomes the present one where
            the writes since then are known number by number.
        count: whether to wait for the device and say how many parameters got other numbers than 0
            by writes that raised no version, through ``.data``.
    """
    found = []
    for parameter in parameters if _touched else ():
        snapshot = snapshots.get(parameter)
        if snapshot is None or snapshot.data not in _touched:
            continue
        watch = snapshot.data
        version, changed = version_of(parameter), watch.changed()
        raised = version != snapshot.version
        watch.forget_writes(unless=raised)
        if watch.knows(snapshot.version):
            snapshot.version = version
        if changed is None:
            continue
        if not raised:
            # Zeros are a mask's, which nobody wants to hear about.
            found.append(changed & (local(parameter) != 0))
        state = dict.get(states, parameter, {})
        for key in REMAINDERS.intersection(state):
            remainder = local(state[key])
            remainder.masked_fill_(changed.to(remainder.device), 0)
    return sum(bool(each.any()) for each in found) if count else 0


def touched(watches: Iterable[DataWatch | None]) -> bool:
    """Whether there may have been writes since the last step that one of these has seen."""
    return any(each in _touched for each in watches) if _touched else False


def note_step(watches: Iterable[DataWatch | None]) -> None:
    """Note that a step has written what these watch."""
    for each in watches if _touched else ():
        if each is not None:
            each.note_step()


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
    for watch in _watches.get(id(parameter), ()):
        watch.touch(alias)
    return alias


def _assign(parameter: Tensor, value: Tensor) -> None:
    for watch in _watches.get(id(parameter), ()):
        watch.touch()
    _DATA.__set__(parameter, value)
