"""Gradients that wait for others within a backward pass, so that one kernel call takes many."""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import Tensor

__all__ = ["LIMIT", "Gathering", "Group", "Waiting"]

LIMIT = 32 << 20
"""Bytes of gradients that are worth a kernel call; about as many wait at most.

Measured with 96 matrices of 2 MiB: at the peak 32 MiB of a pass's gradients are in memory, where 2
are if none waits, and 192 if all do.
"""


class Group:
    """Parameters whose gradients are taken together.

    Attributes:
        members: in the order in which their gradients came first.
        size: bytes of their gradients; of :data:`LIMIT` or more where no other one joins them.
        made: what was made to take them, kept for the next time.
    """

    def __init__(self, *members: Tensor) -> None:
        self.members = list(members)
        self.size = 0
        self.made: Any = None


class Waiting:
    """What waits in one backward pass.

    Attributes:
        groups: for each what was said of its members that have come, by their numbers.
        sizes: bytes of their gradients.
        streams: on which streams those were made.
        total: bytes of all.
    """

    def __init__(self) -> None:
        self.groups: dict[Group, dict[int, Any]] = defaultdict(dict)
        self.sizes: dict[Group, int] = defaultdict(int)
        self.streams: dict[Group, set[Any]] = defaultdict(set)
        self.total = 0


class Gathering:
    """Puts parameters into groups, which stay, and has each taken when its gradients are there.

    A group of :data:`LIMIT` bytes or more is taken as soon as all its gradients have arrived; the
    rest at the end of the pass, or earlier if more than twice as much waits. So the peak of memory
    does not grow with the model, and because gradients arrive in the same order in every pass, what
    was made for a group can be used again.

    Args:
        take: called with a group, and what was said of its members that have arrived, by number.
    """

    def __init__(self, take: Callable[[Group, dict[int, Any]], None]) -> None:
        self._take = take
        # By id, because it takes torch a microsecond to hash a tensor; groups keep them alive.
        self._place: dict[int, tuple[Hashable, Group, int]] = {}
        self._waiting: dict[int, weakref.ref[Waiting]] = {}
        self._open: dict[Hashable, Group] = {}
        # Passes of several threads may take the same group.
        self._lock = threading.RLock()

    def __iter__(self) -> Iterator[Group]:
        return iter({group: None for _, group, _ in self._place.values()})

    def add(
        self, waiting: Waiting, parameter: Tensor, gradient: Tensor, payload: Any, kind: Hashable
    ) -> None:
        """Let a gradient wait, and take what need not wait any longer.

        Args:
            waiting: that of the pass.
            parameter: whose gradient it is; :meth:`settle` comes first.
            gradient: in memory, dense.
            payload: handed on to what takes the group.
            kind: what all gradients of a group have in common, beside their device.
        """
        device, size = gradient.device, gradient.nbytes
        with self._lock:
            group, number = self._place_of(parameter, (device, kind), size)
            waiting.groups[group][number] = payload
            waiting.sizes[group] += size
            waiting.total += size
            self._waiting[id(parameter)] = weakref.ref(waiting)
            here = torch.cuda.current_stream(device) if device.type == "cuda" else None
            waiting.streams[group].add(here)
            full = waiting.sizes[group] >= max(group.size, LIMIT)
            ready = list(waiting.groups) if waiting.total > 2 * LIMIT else [group] * full
            for each in ready:
                # Other streams are waited for at the end of the pass, which autograd sees to.
                if waiting.streams[each] == {here}:
                    self.take(waiting, each)

    def take(self, waiting: Waiting, group: Group) -> None:
        """Take what waits in a group."""
        with self._lock:
            payloads = waiting.groups.pop(group)
            waiting.total -= waiting.sizes.pop(group)
            del waiting.streams[group]
            for number in payloads:
                del self._waiting[id(group.members[number])]
            self._take(group, payloads)

    def finish(self, waiting: Waiting) -> None:
        """Take all that still waits."""
        for group in list(waiting.groups):
            self.take(waiting, group)

    def waits(self, parameter: Tensor) -> Waiting | None:
        """That of the pass in which a parameter waits, if it does in one that has not failed."""
        reference = self._waiting.get(id(parameter))
        return None if reference is None else reference()

    def settle(self, parameter: Tensor) -> None:
        """Take what waits for a parameter, in whichever pass, before its next gradient."""
        waiting = self.waits(parameter)
        if waiting is not None:
            self.take(waiting, self._place[id(parameter)][1])

    def _place_of(self, parameter: Tensor, kind: Hashable, size: int) -> tuple[Group, int]:
        place = self._place.get(id(parameter))
        if place is not None and place[0] == kind:
            return place[1], place[2]
        group = self._open.setdefault(kind, Group())
        number = len(group.members)
        group.members.append(parameter)
        group.size += size
        if group.size >= LIMIT:
            del self._open[kind]
        self._place[id(parameter)] = kind, group, number
        return group, number
