"""Options of a parameter group that are lists with an entry for each of its parameters.

A step reads them by the places of parameters, as ``zip(group["params"], group["param_names"])``
does. It may get only some of a group's parameters, and then gets their entries.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from numbers import Number
from typing import Any

from torch import Tensor

__all__ = ["ListOptions", "has_numbers", "names_of_lists"]


def names_of_lists(group: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str]:
    """The names of these options; one with a default, such as ``betas``, is one value.

    Args:
        group: the group.
        defaults: the optimizer's defaults.
    """
    return [
        name
        for name, each in group.items()
        if type(each) is list
        and len(each) == len(group["params"])
        and name != "params"
        and name not in defaults
    ]


def has_numbers(group: Mapping[str, Any], defaults: Mapping[str, Any]) -> bool:
    """Whether one of these options holds numbers, which may be no entries of parameters at all."""
    lists = (group[name] for name in names_of_lists(group, defaults))
    return any(isinstance(entry, Number) for each in lists for entry in each)


class ListOptions:
    """These options for some parameters of a group.

    Args:
        group: the group; not changed.
        defaults: the optimizer's defaults.
        ids: the ids of these parameters.

    Attributes:
        cut: the entries of these parameters, by the option's name.
    """

    def __init__(
        self, group: Mapping[str, Any], defaults: Mapping[str, Any], ids: Collection[int]
    ) -> None:
        parameters: list[Tensor] = group["params"]
        self._whole = {name: group[name] for name in names_of_lists(group, defaults)}
        # Most groups have no such option, and thousands of parameters.
        found = enumerate(parameters) if self._whole else ()
        self._places = [n for n, each in found if id(each) in ids]
        self.cut = {name: [each[n] for n in self._places] for name, each in self._whole.items()}

    def joined(self, after: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, list[Any]]:
        """The whole lists of which entries were written.

        Args:
            after: the options that a step which got copies of :attr:`cut` has left.
            others: whole lists with the entries that other calls have written.
        """
        written = {name: others[name] for name in self.cut if name in others}
        for name, entries in self.cut.items():
            if [*map(id, after[name])] != [*map(id, entries)]:
                written[name] = [*written.get(name, self._whole[name])]
                for place, each in zip(self._places, after[name], strict=True):
                    written[name][place] = each
        return written
