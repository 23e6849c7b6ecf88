"""``optimizer.state``, which knows whether code outside may hold one of its tensors."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

__all__ = ["States", "holds_host_memory", "note_replaced", "set_seen"]


class States(defaultdict):
    """A dict of states that remembers whether it was changed or ever handed one out.

    Kernels write where a state's tensors were when a step was planned. Moving one by
    ``state["exp_avg"].data = ...`` leaves no trace: to detect that, a step must read each tensor's
    address, which takes longer than most of its other checks. Tensors that were never handed out
    need no such check. Our own code reads and writes by ``dict.get(states, key)`` and other methods
    of ``dict``, which bypass this class; it hands nothing out.

    Attributes:
        seen: whether code outside may hold a state or one of its tensors, or has put some here.
        replaced: how often our own code has replaced tensors of states, as each new plan does.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.seen, self.replaced = False, 0
        super().__init__(*arguments, **named)
        self.seen = len(self) > 0

    # Without this override, dict(states) would copy without calling __getitem__.
    def __iter__(self) -> Iterator[Any]:
        return super().__iter__()

    def __reduce__(self) -> Any:
        # Of tensors that nobody has seen, nobody has a copy either.
        return _copied, (self.default_factory, dict(dict.items(self)), self.seen)


def _copied(factory: Any, contents: dict[Any, Any], seen: bool) -> States:
    states = States(factory, contents)
    states.seen = seen
    return states


def set_seen(states: Any, seen: bool) -> None:
    """Set whether code outside may hold a tensor of these states; other dicts do not record it."""
    if isinstance(states, States):
        states.seen = seen


def holds_host_memory(states: Iterable[Any]) -> bool:
    """Whether a tensor of these states is in host memory, which whoever holds one can move."""
    dicts = (each for each in states if isinstance(each, Mapping))
    return any(
        isinstance(each, Tensor) and each.device.type == "cpu"
        for state in dicts
        for each in state.values()
    )


def note_replaced(states: Any) -> None:
    """Let plans look at these states again, because our own code has replaced some tensors."""
    if isinstance(states, States):
        states.replaced += 1


def _noticing(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def noticing(self: States, *arguments: Any, **named: Any) -> Any:
        # An empty dict has nothing to hand out or to lose.
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
