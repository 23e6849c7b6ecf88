"""Gradients that wait for others within a backward pass, so that one kernel call takes many."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from torch_bf16.sharding import local

__all__ = ["LIMIT", "Gathering", "Group", "Waiting"]

LIMIT = 32 << 20
"""Bytes of gradients that are worth a kernel call; about as many wait at most."""


class Group:
    """Parameters whose gradients are taken together.

    Attributes:
        members: in the order in which their gradients came first.
        size: bytes of their gradients; of :data:`LIMIT` or more where no other one joins them.
        made: what taking them has made, for the next time.
    """

    def __init__(self, *members: Tensor) -> None:
        self.members = list(members)
        self.size = 0
        self.made: Any = None


class Waiting:
    """What waits in one backward pass.

    Attributes:
        groups: for each the parameters that have come, and what was said of each.
        sizes: bytes of their gradients.
        streams: on which streams of a device they were made.
        total: bytes of all.
    """

    def __init__(self) -> None:
        self.groups: dict[Group, dict[Tensor, Any]] = defaultdict(dict)
        self.sizes: dict[Group, int] = defaultdict(int)
        self.streams: dict[Group, set[Any]] = defaultdict(set)
        self.total = 0


class Gathering:
    """Puts parameters into groups, which stay, and has each taken when its gradients are there.

    A group is taken as soon as all its gradients have come, where those are :data:`LIMIT` bytes;
    what is left is taken at the end of the pass, or earlier where more than twice as much waits. So
    the peak of memory does not grow with the model, and as gradients come in the same order at
    every pass, what was made for a group serves again.

    Args:
        take: called with a group, and what was said of each of its parameters that have come.
    """

    def __init__(self, take: Callable[[Group, dict[Tensor, Any]], None]) -> None:
        self._take = take
        self._group_of: dict[Tensor, tuple[Hashable, Group]] = {}
        self._open: dict[Hashable, Group] = {}
        # Passes of several threads may take the same group.
        self._lock = threading.RLock()

    def __iter__(self) -> Iterator[Group]:
        return iter({group: None for _, group in self._group_of.values()})

    def add(
        self, waiting: Waiting, parameter: Tensor, gradient: Tensor, said: Any, kind: Hashable
    ) -> None:
        """Let a gradient wait, and take what need not wait any longer.

        Args:
            waiting: that of the pass.
            parameter: whose gradient it is; not waiting already.
            gradient: in memory, dense.
            said: handed on.
            kind: what all gradients of a group have in common, beside their device.
        """
        memory = local(gradient)
        size = memory.nbytes
        with self._lock:
            group = self._of(parameter, (memory.device, kind), size)
            waiting.groups[group][parameter] = said
            waiting.sizes[group] += size
            waiting.total += size
            here = torch.cuda.current_stream(memory.device) if memory.is_cuda else None
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
            said = waiting.groups.pop(group)
            waiting.total -= waiting.sizes.pop(group)
            waiting.streams.pop(group, None)
            self._take(group, said)

    def finish(self, waiting: Waiting) -> None:
        """Take all that still waits."""
        for group in list(waiting.groups):
            self.take(waiting, group)

    def settle(self, parameter: Tensor, passes: Iterable[Waiting]) -> None:
        """Take what waits for a parameter, in whichever pass, before its next gradient."""
        known = self._group_of.get(parameter)
        if known is not None:
            for each in list(passes):
                if parameter in each.groups.get(known[1], ()):
                    self.take(each, known[1])

    def _of(self, parameter: Tensor, kind: Hashable, size: int) -> Group:
        known = self._group_of.get(parameter)
        if known is not None and known[0] == kind:
            return known[1]
        group = self._open.setdefault(kind, Group())
        group.members.append(parameter)
        group.size += size
        if group.size >= LIMIT:
            del self._open[kind]
        self._group_of[parameter] = kind, group
        return group
