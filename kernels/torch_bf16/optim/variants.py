"""Options of parameter groups that select a variant of the class's rule."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch_bf16 import rules
from torch_bf16.rules import Rule

__all__ = ["NONE", "OF_ADAMW", "OF_LION", "VARIANTS", "check_variant", "variant_of"]

VARIANTS = ("cautious", "update_clipping")
"""The names of these options."""

NONE: Mapping[str, Rule] = MappingProxyType({})
OF_ADAMW: Mapping[str, Rule] = MappingProxyType(
    {"cautious": rules.CAUTIOUS_ADAMW, "update_clipping": rules.STABLE_ADAMW}
)
OF_LION: Mapping[str, Rule] = MappingProxyType({"cautious": rules.CAUTIOUS_LION})

_CLASSES = {"cautious": "AdamW and Lion", "update_clipping": "AdamW"}


def variant_of(group: Mapping[str, Any], variants: Mapping[str, Rule]) -> Rule | None:
    """The rule for the option that a group sets; None if it sets none."""
    for name, rule in variants.items():
        if group.get(name):
            return rule
    return None


def check_variant(
    group: Mapping[str, Any], number: int, variants: Mapping[str, Rule], kind: str
) -> None:
    """Refuse an option that a class has no rule for.

    Args:
        group: a parameter group.
        number: the group's number, for messages.
        variants: the class's rules, by option.
        kind: name of the class, for messages.

    Raises:
        ValueError: an option is neither True nor False.
        NotImplementedError: the class has no rule for an option, or none for it together with the
            group's other options.
    """
    asked = [name for name in VARIANTS if group.get(name)]
    if not asked:
        return
    if others := [name for name in asked if not isinstance(group[name], bool)]:
        raise ValueError(
            f"{others[0]}={group[others[0]]!r} in parameter group {number} must be True or False: "
            "cautious and update_clipping are either on or off"
        )
    where = f"{' and '.join(f'{name}={group[name]!r}' for name in asked)} in parameter group"
    if unknown := [name for name in asked if name not in variants]:
        raise NotImplementedError(
            f"{where} {number}: {kind} has no rule for {unknown[0]}; {_CLASSES[unknown[0]]} of "
            "torch_bf16 support it"
        )
    if len(asked) > 1 or group.get("amsgrad"):
        more = "" if len(asked) > 1 else f" with amsgrad={group['amsgrad']!r}"
        raise NotImplementedError(
            f"{where} {number}{more}: there are rules for cautious, update_clipping and amsgrad, "
            "but for no two of them together. Leave one on, or use them in separate groups"
        )
