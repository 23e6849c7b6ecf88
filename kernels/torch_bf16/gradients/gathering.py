"""Gradients that wait for others within a backward pass, so that one kernel call takes many."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import Tensor

from torch_bf16.locks import fork_safe_lock

__all__ = ["LIMIT", "Gathering", "Group", "Waiting", "most_at_once"]

LIMIT = 32 << 20
"""Bytes of gradients that are worth a kernel call; at most about as many wait.

Measured with 96 matrices of 2 MiB: at the peak 32 MiB of a pass's gradients are in memory, instead
of 2 MiB if none waits, and 192 MiB if all do.
"""


def most_at_once(total: float, largest: float, waiting: int = LIMIT) -> float:
    """The most bytes of gradients in memory at a time, if each is freed once it was taken.

    Args:
        total: bytes of all gradients.
        largest: bytes of the largest one, which joins a group that is not full yet.
        waiting: bytes of a full group; 0 if none waits.
    """
    return min(total, largest + waiting)


class Group:
    """Parameters whose gradients are taken together.

    Attributes:
        members: the parameters, in the order in which their gradients first arrived.
        size: bytes of their gradients; from :data:`LIMIT` on, no other parameter joins the group.
        made: objects made to take the gradients, such as plans, kept for reuse.
    """

    def __init__(self, *members: Tensor) -> None:
        self.members = list(members)
        self.size = 0
        self.made: Any = None


class Waiting:
    """The gradients that wait in one backward pass.

    Attributes:
        groups: for each group the payloads of waiting gradients, by number of the member.
        sizes: for each group the bytes of its waiting gradients.
        streams: for each group the streams that computed them.
        total: bytes of all waiting gradients.
    """

    def __init__(self) -> None:
        self.groups: dict[Group, dict[int, Any]] = defaultdict(dict)
        self.sizes: dict[Group, int] = defaultdict(int)
        self.streams: dict[Group, set[Any]] = defaultdict(set)
        self.total = 0


class Gathering:
    """Puts parameters into lasting groups, and takes each group when its gradients are there.

    A group of :data:`LIMIT` bytes or more is taken as soon as all its gradients have arrived; the
    rest at the end of the pass, or earlier if more than twice as much waits. So the peak of memory
    does not grow with the model, and because gradients arrive in the same order in every pass, the
    objects made for a group can be reused.

    Args:
        take: called with a group, and the payloads of its members that have arrived, by number.
    """

    def __init__(self, take: Callable[[Group, dict[int, Any]], None]) -> None:
        self._take = take
        # By id, because it takes torch a microsecond to hash a tensor; groups keep them alive.
        self._place: dict[int, tuple[Hashable, Group, int]] = {}
        self._waiting: dict[int, weakref.ref[Waiting]] = {}
        self._open: dict[Hashable, Group] = {}
        # Passes of several threads may take the same group.
        self._lock = fork_safe_lock()

    def __iter__(self) -> Iterator[Group]:
        return iter({group: None for _, group, _ in self._place.values()})

    def add(
        self, waiting: Waiting, parameter: Tensor, gradient: Tensor, payload: Any, kind: Hashable
    ) -> None:
        """Let a gradient wait, and take the groups that need not wait any longer.

        Args:
            waiting: the waiting gradients of this pass.
            parameter: the parameter of the gradient; call :meth:`settle` for it first.
            gradient: a dense tensor in memory.
            payload: passed on to the function that takes the group.
            kind: property that all gradients of a group share, besides their device.
        """
        device, size = gradient.device, gradient.nbytes
        with self._lock:
            group, number = self._place_of(parameter, (device, kind), size)
            waiting.groups[group][number] = payload
            waiting.sizes[group] += size
            waiting.total += size
            self._waiting[id(parameter)] = weakref.ref(waiting)
            stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
            waiting.streams[group].add(stream)
            full = waiting.sizes[group] >= max(group.size, LIMIT)
            ready = list(waiting.groups) if waiting.total > 2 * LIMIT else [group] * full
            for each in ready:
                # At the end of the pass, autograd has synchronised with the other streams.
                if waiting.streams[each] == {stream}:
                    self.take(waiting, each)

    def take(self, waiting: Waiting, group: Group) -> None:
        """Take the waiting gradients of a group."""
        with self._lock:
            payloads = waiting.groups.pop(group)
            waiting.total -= waiting.sizes.pop(group)
            del waiting.streams[group]
            for number in payloads:
                # Of an earlier gathering, if parameters have left their optimizer within this pass.
                self._waiting.pop(id(group.members[number]), None)
            self._take(group, payloads)

    def finish(self, waiting: Waiting) -> None:
        """Take all gradients that still wait."""
        for group in list(waiting.groups):
            self.take(waiting, group)

    def waits(self, parameter: Tensor) -> Waiting | None:
        """The waiting gradients of the pass in which this parameter's waits; None if it does not.

        A pass that has failed no longer counts.
        """
        reference = self._waiting.get(id(parameter))
        return None if reference is None else reference()

    def settle(self, parameter: Tensor) -> None:
        """Take the waiting gradient of a parameter, of any pass, before its next gradient."""
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
