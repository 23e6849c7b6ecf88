"""Replacing parts of a host, and putting them back."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from types import ModuleType
from typing import Any

__all__ = ["Patches", "temporarily"]

_ABSENT: Any = object()


class Patches:
    """What was replaced or added in a host.

    Every method does nothing where its patch is in place, and :meth:`undo` takes all of them back.

    Example:
        >>> import textwrap
        >>> patches = Patches()
        >>> patches.replace(textwrap, "dedent", lambda old: lambda text: old(text).upper())
        >>> textwrap.dedent("  hello")
        'HELLO'
        >>> patches.undo()
        >>> textwrap.dedent("  hello")
        'hello'
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self._hooks: set[Any] = set()

    def replace(self, module: ModuleType, path: str, make: Callable[[Any], Any]) -> None:
        """Replace a method of a class, or a function wherever it was imported by name.

        Args:
            module: where the class or the function is defined; mutated.
            path: ``"Class.method"`` or ``"function"``; a method may be inherited.
            make: gets the original and returns what replaces it.
        """
        *classes, name = path.split(".")
        owner = functools.reduce(getattr, classes, module)
        original = getattr(owner, name)
        if getattr(original, "_replaced_by", None) is self:
            return
        replacement: Any = functools.wraps(original)(make(original))
        replacement._replaced_by = self
        if not classes:
            _rebind(name, original, replacement)
            self._undo.append(functools.partial(_rebind, name, replacement, original))
            return
        before = vars(owner).get(name, _ABSENT)
        setattr(owner, name, replacement)

        def undo() -> None:
            # What somebody else has put there since is theirs to take away.
            if vars(owner).get(name) is replacement:
                delattr(owner, name) if before is _ABSENT else setattr(owner, name, before)

        self._undo.append(undo)

    def add_member(self, enum: type[Enum], name: str, value: str) -> Enum:
        """Add a member to an enum that mixes in ``str``, so that all who imported it see it.

        Works on Python 3.10 to 3.13, whose enums keep their members in the same maps.

        Args:
            enum: mutated.
            name: of the member, an identifier.
            value: of the member.

        Returns:
            The new member, or the one that has this value already.
        """
        maps: Any = enum
        if value in maps._value2member_map_:
            return maps._value2member_map_[value]
        member = str.__new__(maps, value)
        member._name_ = name
        member._value_ = value
        member._sort_order_ = len(maps._member_names_)
        member.__objclass__ = enum
        maps._member_names_.append(name)
        self._undo.append(functools.partial(maps._member_names_.remove, name))
        self.add_alias(enum, name, value, member)
        return member

    def add_alias(self, enum: type[Enum], name: str, value: str, member: Enum) -> None:
        """Let a second name and value mean a member of an enum. It is not listed.

        Args:
            enum: mutated.
            name: the second name, an identifier.
            value: the second value.
            member: what they mean.
        """
        maps: Any = enum
        if value in maps._value2member_map_:
            return
        # The metaclass refuses to assign to a member, which a name in the map is.
        type.__setattr__(enum, name, member)
        self._undo.append(functools.partial(type.__delattr__, enum, name))
        self.add_entry(maps._member_map_, name, member)
        self.add_entry(maps._value2member_map_, value, member)
        if hasattr(maps, "_hashable_values_"):  # Python 3.13
            maps._hashable_values_.append(value)
            self._undo.append(functools.partial(maps._hashable_values_.remove, value))

    def add_entry(self, table: dict[Any, Any], key: Any, value: Any) -> None:
        """Add an entry to a dictionary that has none under this key.

        Args:
            table: mutated.
            key: of the entry.
            value: of the entry.
        """
        if key not in table:
            table[key] = value
            self._undo.append(functools.partial(table.pop, key, None))

    def add_hook(self, register: Callable[[Any], Any], function: Any) -> None:
        """Register a hook for the whole process, once.

        Args:
            register: takes the hook and returns a handle with ``remove``.
            function: the hook.
        """
        if function not in self._hooks:
            self._hooks.add(function)
            self._undo.append(register(function).remove)

    def undo(self) -> None:
        """Put everything back, the last change first."""
        while self._undo:
            self._undo.pop()()
        self._hooks.clear()


@contextmanager
def temporarily(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, an attribute has another value.

    Args:
        owner: mutated, and restored.
        name: of the attribute.
        value: what it is inside.

    Example:
        >>> from types import SimpleNamespace
        >>> state = SimpleNamespace(mode="bf16")
        >>> with temporarily(state, "mode", "no"):
        ...     state.mode
        'no'
        >>> state.mode
        'bf16'
    """
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _rebind(name: str, old: Any, new: Any) -> None:
    for holder in list(sys.modules.values()):
        if isinstance(holder, ModuleType) and vars(holder).get(name) is old:
            setattr(holder, name, new)
