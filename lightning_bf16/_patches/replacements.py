"""Attributes of a host that ours stand in for, and what was there before."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

__all__ = ["Replacements", "replacements"]

_ABSENT = object()


class Replacements:
    """Replaces attributes, each of them once, and puts back what was there.

    Example:
        >>> class Host:
        ...     name = "host"
        >>> replacements = Replacements()
        >>> replacements.replace(Host, "name", lambda before: before + ", and ours")
        >>> Host.name
        'host, and ours'
        >>> replacements.undo()
        >>> Host.name
        'host'
    """

    def __init__(self) -> None:
        # With their owners, so that the identity of one is never that of another.
        self._made: dict[tuple[int, str], tuple[Any, Any, Any]] = {}
        self._active = True

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Let ``make(before)`` stand in for an attribute; a second call changes nothing.

        After :meth:`undo` it waits for :meth:`redo`.
        """
        if (id(owner), name) not in self._made:
            before, after = vars(owner).get(name, _ABSENT), make(getattr(owner, name))
            self._made[id(owner), name] = owner, before, after
            if self._active:
                setattr(owner, name, after)

    def wrap(self, owner: type, name: str, around: Callable[..., Any]) -> None:
        """Let ``around(self, original, *args)`` stand in for a method of a class."""

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def method(self: Any, *args: Any, **kwargs: Any) -> Any:
                return around(self, functools.partial(original, self), *args, **kwargs)

            return method

        self.replace(owner, name, make)

    def undo(self) -> None:
        """Put back what was there, the last replacement first."""
        self._active = False
        for (_, name), (owner, before, _) in reversed(self._made.items()):
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

    def redo(self) -> None:
        """Replace again what was undone."""
        if not self._active:
            self._active = True
            for (_, name), (owner, _, after) in self._made.items():
                setattr(owner, name, after)


replacements = Replacements()
"""Those in classes and types of Lightning, which :func:`lightning_bf16.unregister` undoes."""
