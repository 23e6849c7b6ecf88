"""Adding members to an enum that exists, so that every module that imported it sees them."""

from __future__ import annotations

from enum import Enum
from typing import Any

__all__ = ["add_alias", "add_member"]


def add_member(enum: type[Enum], name: str, value: str) -> Enum:
    """Add a member to an enum that mixes in ``str``, in place.

    Works on Python 3.10 to 3.13, whose enums keep their members in the same maps.

    Args:
        enum: mutated.
        name: of the member, an identifier.
        value: of the member.

    Returns:
        The new member, or the one that has this value already.

    Example:
        >>> class Colour(str, Enum):
        ...     RED = "red"
        >>> add_member(Colour, "BLUE", "blue") is Colour("blue") is Colour.BLUE
        True
    """
    maps: Any = enum
    if value in maps._value2member_map_:
        return maps._value2member_map_[value]
    member = str.__new__(maps, value)
    member._name_ = name
    member._value_ = value
    member._sort_order_ = len(maps._member_names_)
    member.__objclass__ = enum
    # The metaclass forbids to assign to members, and takes a name for one once it is in the map.
    type.__setattr__(enum, name, member)
    maps._member_names_.append(name)
    maps._member_map_[name] = member
    _map_value(maps, value, member)
    return member


def add_alias(enum: type[Enum], name: str, value: str, member: Enum) -> None:
    """Let a second name and value mean a member that exists. It is not listed.

    Args:
        enum: mutated.
        name: the second name, an identifier.
        value: the second value.
        member: what they mean.

    Example:
        >>> add_alias(Colour, "AZURE", "azure", Colour.BLUE)
        >>> Colour("azure")
        <Colour.BLUE: 'blue'>
    """
    maps: Any = enum
    if value not in maps._value2member_map_:
        type.__setattr__(enum, name, member)
        maps._member_map_[name] = member
        _map_value(maps, value, member)


def _map_value(maps: Any, value: str, member: Enum) -> None:
    maps._value2member_map_[value] = member
    if hasattr(maps, "_hashable_values_"):  # Python 3.13
        maps._hashable_values_.append(value)
