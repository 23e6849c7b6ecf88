"""Detects which numbers of a weight were written between two steps.

The remainder of an exact master is valid only beside the very number that the last step wrote.
torch counts writes to a parameter, but not writes to the tensor that ``p.data`` returns. So the
first time after a step that ``.data`` of a weight with a remainder is read or assigned, the lower
byte of each number of the weight is saved. The next step drops the remainders of the numbers that
are zero by then or whose lower byte differs, or all of them if most of the others differ. If nobody
reads ``.data``, this costs nothing.

The saved bytes also show which numbers were changed by writes that do raise the version: SAM takes
``p.data.clone()``, moves the weight, and restores it. ``p.copy_()`` saves them, too: an evaluation
may copy an average into the model, also by ``load_state_dict``, and then the trained weights back.
So does DDP, which sends one rank's weights to all: a rank that has them keeps its masters.
If a weight is written in another way before any bytes are saved, they are saved after each step
from then on, until nobody has written the weight for some steps: a program may clamp a weight after
each step, and LookSAM and Lookahead write it at every fifth or tenth.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from torch_bf16.backends.host_copy import HostCopy
from torch_bf16.sharding import Shard, is_dtensor, local, version_of
from torch_bf16.torch_patches import is_enabled

from .intercepted_writes import intercept, observe

__all__ = [
    "REMAINDERS",
    "Counting",
    "DataWatch",
    "WriteCounts",
    "note_step",
    "touched",
    "zero_written",
]

REMAINDERS = frozenset({"remainder16", "remainder8"})
"""Keys of a state whose bits are meaningless once the weight is written."""

_touched: WeakSet[DataWatch] = WeakSet()

# Steps without a write after which a weight is no longer followed.
_IDLE_STEPS = 32
# Writes that change more than this part of the numbers are no clamp, and no SAM that rounds.
_FEW_NUMBERS = 1 / 16
# A blend moves numbers by few bf16 spacings; what is loaded instead is farther away.
_NEAR = 16


class WriteCounts(NamedTuple):
    """How many parameters something else wrote between two steps.

    Attributes:
        through_data: parameters written through ``.data``, which does not raise the version.
        in_place: parameters written otherwise; 0 if only few of their numbers changed.
        nearby: those of them most of whose changed numbers moved by few bf16 spacings.
    """

    through_data: int
    in_place: int
    nearby: int


class Counting:
    """Counts of written numbers, which a GPU may still be at: the host does not wait for them.

    Args:
        through_data: of each parameter written through ``.data``, how many numbers have changed.
        in_place: of each parameter written otherwise.
        nearby: of each of these, those that moved by few bf16 spacings.
        size: numbers of the parameters whose version was raised.
    """

    def __init__(
        self, through_data: list[Tensor], in_place: list[Tensor], nearby: list[Tensor], size: int
    ) -> None:
        self._lengths, self._size = (len(through_data), len(in_place)), size
        counts = [*through_data, *in_place, *nearby]
        # On a GPU if one is there: the host does not wait for a copy to it.
        places = sorted({each.device for each in counts}, key=lambda device: device.type == "cpu")
        here = [each.to(places[0], non_blocking=True) for each in counts]
        self._counts = HostCopy(torch.stack(here)) if here else None

    @property
    def is_done(self) -> bool:
        """Whether the counts are known."""
        return self._counts is None or self._counts.is_there

    def read(self) -> WriteCounts:
        """The counts; waits until they are known."""
        counts = [] if self._counts is None else self._counts.read().tolist()
        n, m = self._lengths
        through, placed, near = counts[:n], counts[n : n + m], counts[n + m :]
        if sum(placed) <= _FEW_NUMBERS * self._size:
            placed = near = []
        mostly_near = [2 * few > all_ for few, all_ in zip(near, placed, strict=True)]
        return WriteCounts(sum(map(bool, through)), sum(map(bool, placed)), sum(mostly_near))


class DataWatch:
    """The lower bytes of a weight when a program first asked to write it after a step.

    A watch lasts as long as that optimizer holds it.

    Attributes:
        version: the parameter's version when the bytes were saved, or when a step compared them.
    """

    def __init__(self, parameter: Tensor) -> None:
        self._parameter = parameter
        self._bytes: Tensor | None = None
        self.version = -1
        self._was_changed = False
        self._aliases: list[TensorWeakRef] = []
        self._followed = 0
        self._observation = observe(parameter, self)

    @classmethod
    def of(
        cls, shard: Shard, state: Mapping[str, Any], watch: DataWatch | None = None
    ) -> DataWatch | None:
        """The watch over a weight; None if its state has no remainder, or it cannot be watched.

        Args:
            shard: the parameter's shard.
            state: the parameter's state in the optimizer.
            watch: the optimizer's current watch, if any; returned if it can still be used.
        """
        parameter = shard.parameter
        plain = issubclass(type(parameter), nn.Parameter)
        # FSDP1 assigns the data of its parameters several times in each step.
        watchable = shard.can_gather and (plain or is_dtensor(parameter))
        if not watchable or REMAINDERS.isdisjoint(state) or not is_enabled("parameter_data"):
            return None
        intercept(nn.Parameter if plain else type(parameter))
        return watch or cls(parameter)

    def touch(self, alias: Tensor | None = None) -> None:
        """Save the lower bytes, unless this was done since the last step.

        Args:
            alias: the tensor that ``.data`` returns: while it lives, it can write the weight.
        """
        if self._bytes is None:
            self._note()
            _touched.add(self)
        if alias is not None:
            self._aliases = [*self._live_aliases(), TensorWeakRef(alias)]

    def follow_writes(self) -> None:
        """Save the lower bytes after each step, until ``_IDLE_STEPS`` have gone without a write."""
        self._followed = _IDLE_STEPS
        _touched.add(self)

    def note_writes(self, raised: bool, changed: bool) -> None:
        """Note whether there was a write since the last step, for :meth:`follow_writes`.

        Args:
            raised: whether the version was raised.
            changed: whether numbers have changed.
        """
        if self._followed:
            self._followed = _IDLE_STEPS if raised else self._followed - 1
        self._was_changed = changed

    @property
    def expects_writes(self) -> bool:
        """Whether writes are followed, or there was one before the last step.

        On a GPU perhaps only a read of ``.data``: the host does not wait to learn it.
        """
        return self._followed > 0 or self._was_changed

    def knows(self, version: int) -> bool:
        """Whether the bytes were saved while the parameter had this version, left by a step."""
        comparable = self._bytes is not None and self._parameter.dtype == torch.bfloat16
        return comparable and self.version == version

    def changed(self) -> Tensor | None:
        """A mask of the numbers written since the bytes were saved; None if none can have been."""
        then = self._bytes
        now = None if then is None else self.lower_bytes()
        if then is None or now is None or now.shape != then.shape:
            return None
        changed = now != then.to(now.device)
        # Not on a GPU, because the host would have to wait for it.
        if changed.is_cpu and not changed.any():
            return None
        # A mask makes most numbers zero, and leaves the others as they are. Of unrelated numbers
        # one in 256 has the same lower byte, so if most others changed, all did.
        others = local(self._parameter) != 0
        most = 2 * (changed & others).count_nonzero() > others.count_nonzero()
        return changed | ~others | most

    def moved_little(self) -> Tensor:
        """A mask of the numbers that are few bf16 spacings away from those saved.

        A lower byte tells it up to a multiple of 256 spacings. Without saved bytes none is.
        """
        now, then = self.lower_bytes(), self._bytes
        if now is None or then is None:
            return torch.zeros_like(local(self._parameter), dtype=torch.bool)
        apart = (now - then.to(now.device)).view(torch.int8).short()
        return apart.abs() <= _NEAR

    def note_step(self) -> None:
        """Drop the bytes; save new ones at once if an alias lives, which can write unnoticed."""
        self._aliases, self._bytes = self._live_aliases(), None
        if self._aliases or self._followed:
            self._note()
        elif not self._was_changed:  # the next step notes whether there was another write
            _touched.discard(self)

    def _note(self) -> None:
        self._bytes, self.version = self.lower_bytes(), version_of(self._parameter)

    def _live_aliases(self) -> list[TensorWeakRef]:
        return [each for each in self._aliases if each() is not None]

    def lower_bytes(self) -> Tensor | None:
        """A copy of the lower bytes that the weight has now; None if it is no longer bf16."""
        memory = local(self._parameter).detach()
        return memory.view(torch.int16).to(torch.uint8) if memory.dtype == torch.bfloat16 else None


def zero_written(
    parameters: Iterable[Tensor],
    states: dict[Tensor, Any],
    snapshots: Mapping[Tensor, Any],
    count: bool,
    count_in_place: bool,
) -> tuple[bool, Counting]:
    """Zero the remainders of numbers that are known to have been written since the last step.

    Args:
        parameters: the parameters that are about to take a step.
        states: the optimizer's states; written in place.
        snapshots: the parameters' snapshots. If it is known which numbers were written, the
            snapshot's ``version`` is set to the current one.
        count: whether to count those written through ``.data``.
        count_in_place: the same for others.

    Returns:
        Whether a version was raised, perhaps by a write that changed nothing, and how many were
        written; zeros where they are not counted. Numbers that are zero now do not count, nor in
        place the largest and the smallest: they come from masks and clamps, which need no warning.
    """
    through_data, in_place, nearby, size, any_raised = [], [], [], 0, False
    for parameter in parameters if _touched else ():
        snapshot = snapshots.get(parameter)
        if snapshot is None or snapshot.data not in _touched:
            continue
        watch = snapshot.data
        version, changed = version_of(parameter), watch.changed()
        raised = version != snapshot.version
        watch.note_writes(raised, changed is not None)
        if watch.knows(snapshot.version):
            # The bytes stay, if the step leaves the weight alone.
            snapshot.version = watch.version = version
        size += local(parameter).numel() if raised else 0
        any_raised |= raised
        if changed is None:
            continue
        if count_in_place if raised else count:
            weight = local(parameter)
            moved = changed & (weight != 0)
            if not raised:
                through_data.append(moved.count_nonzero())
            else:
                if weight.numel():  # a clamp puts numbers on its bounds
                    low, high = weight.aminmax()
                    moved &= (weight != low) & (weight != high)
                in_place.append(moved.count_nonzero())
                nearby.append((moved & watch.moved_little()).count_nonzero())
        state = dict.get(states, parameter, {})
        for key in REMAINDERS.intersection(state):
            remainder = local(state[key])
            remainder.masked_fill_(changed.to(remainder.device), 0)
    return any_raised, Counting(through_data, in_place, nearby, size)


def touched(watches: Iterable[DataWatch | None]) -> bool:
    """Whether one of these watches may have seen a write since the last step."""
    return any(each in _touched for each in watches) if _touched else False


def note_step(watches: Iterable[DataWatch | None]) -> None:
    """Note that a step has written the weights of these watches."""
    for each in watches if _touched else ():
        if each is not None:
            each.note_step()
