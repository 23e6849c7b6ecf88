"""Members of the enums in which Accelerate and transformers keep names."""

from __future__ import annotations

from enum import Enum
from typing import Any

from bf16_autoload import Patches

__all__ = ["add_member"]


def add_member(
    patches: Patches, enum: type[Enum], value: str, unpickled_as: Enum | None = None
) -> Any:
    """Add a member to an enum that mixes in ``str``, visible to every module that imported it.

    Works on Python 3.10 to 3.14, whose enums keep their members in the same maps.

    Args:
        patches: records the changes, to remove the member again.
        enum: the enum; mutated, unless it already has the value.
        value: the member's value, from which its name is made.
        unpickled_as: a member that takes its place in what is unpickled where we are not installed,
            which would be an error otherwise.
    """
    maps: Any = enum
    if value in maps._value2member_map_:
        return maps._value2member_map_[value]
    name = value.upper().replace("-", "_")
    member: Any = str.__new__(maps, value)
    member._name_ = name
    member._value_ = value
    member._sort_order_ = len(maps._member_names_)
    member.__objclass__ = enum
    if unpickled_as is not None:
        # Copies and pickles look it up on the member, not on the class.
        member.__reduce_ex__ = lambda protocol: (getattr, (enum, name, unpickled_as))
    patches.append(maps._member_names_, name)
    # Set before the name is in the map: the metaclass forbids assigning to names in it.
    patches.set(enum, name, member)
    patches.add(maps._member_map_, name, member)
    patches.add(maps._value2member_map_, value, member)
    if hasattr(maps, "_hashable_values_"):  # Python 3.13
        patches.append(maps._hashable_values_, value)
    return member
