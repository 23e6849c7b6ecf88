"""``optimizer.state``, and whether anyone outside may hold one of its tensors."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["States", "set_seen"]


class States(defaultdict):
    """A dict of states that remembers whether it has ever given one away, or was changed.

    Kernels write where a state's tensors were when a step was planned. Moving one by
    ``state["exp_avg"].data = ...`` leaves no trace: to find that, a step must ask each tensor for
    its address, which takes longer than most of its other checks. Tensors that were given to no one
    need not be asked. Our own code reads and writes by ``dict.get(states, key)`` and the like,
    which is not noticed, and gives nothing away.

    Attributes:
        seen: whether somebody may hold a state or one of its tensors, or has put others here.
        plans: how many plans were made for the states, each of which counts their steps anew.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.seen, self.plans = False, 0
        super().__init__(*arguments, **named)
        self.seen = len(self) > 0

    # Without a method of its own dict(states) would copy past __getitem__.
    def __iter__(self) -> Iterator[Any]:
        return super().__iter__()

    def __reduce__(self) -> Any:
        # A copy has tensors of its own.
        return States, (self.default_factory,), None, None, iter(dict.items(self))


def set_seen(states: Any, seen: bool) -> None:
    """Say whether somebody may hold a tensor of these states; of other dicts that is not known."""
    if isinstance(states, States):
        states.seen = seen


def _noticing(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def noticing(self: States, *arguments: Any, **named: Any) -> Any:
        # An empty one has nothing to give away, or to lose.
        self.seen = self.seen or len(self) > 0
        try:
            return method(self, *arguments, **named)
        finally:
            self.seen = self.seen or len(self) > 0

    return noticing


for _name in (
    *("__getitem__", "__setitem__", "__delitem__", "get", "setdefault", "pop", "popitem"),
    *("update", "clear", "items", "values", "copy", "__copy__", "__or__", "__ror__", "__ior__"),
):
    setattr(States, _name, _noticing(getattr(defaultdict, _name)))
