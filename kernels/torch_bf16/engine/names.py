"""The names of an optimizer's parameters: keys of the noise, and labels in messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from torch import Tensor, nn

from torch_bf16.sharding import WRAPPERS, bare_name, is_flat
from torch_bf16.sharding.zero_redundancy import ZeroNames

__all__ = ["ParameterNames"]


class ParameterNames:
    """The names of an optimizer's parameters, as far as they are known.

    Attributes:
        given: names in a model, for groups without ``param_names``; never changed in place.
        zero: names from a ``ZeroRedundancyOptimizer`` around this optimizer; it has the parameters
            of all ranks.
    """

    def __init__(self) -> None:
        self.given: dict[Tensor, str] = {}
        self.zero: ZeroNames | None = None
        self._places: list[Tensor] = []

    def give(
        self, parameters: Sequence[Tensor], model: nn.Module | None, *, keep: bool = False
    ) -> None:
        """Name parameters as a model does; those that have a name by now keep it.

        What the model does not have takes the name of the parameter whose place it takes: programs
        that add and remove rows, as Gaussian splatting does, put new parameters there.

        Args:
            parameters: all parameters of the optimizer.
            model: the model that has them, if it is alive.
            keep: whether to keep the names of other parameters, too.
        """
        names, others = self.given, self.given if keep or model is None else {}
        if not all(each in names for each in parameters):
            names = ({} if model is None else dict(names_in(model))) | names
            for old, new in () if keep else self._replaced(parameters):
                names.setdefault(new, self.given[old])
                others = {each: name for each, name in others.items() if each is not old}
        known = others | {each: names[each] for each in parameters if each in names}
        if known != self.given:
            self.given = known
        self._places = [*parameters]

    def keys(self, groups: Sequence[Mapping[str, Any]]) -> dict[int, str]:
        """The key of every parameter's noise, by the parameter's id.

        It is the bare name, or the position among all parameters. Where models with names alike
        are trained together, later ones draw other noise: ``weight``, ``weight#2``.
        """
        parameters = chain.from_iterable(each["params"] for each in groups)
        pairs = zip(parameters, chain.from_iterable(self.known(groups)), strict=True)
        keys: dict[int, str] = {}
        counts: Counter[str] = Counter()
        for place, (each, name) in enumerate(pairs):
            if name is None:
                keys[id(each)] = f"#{place}"
            else:
                counts[name] += 1
                keys[id(each)] = name if counts[name] == 1 else f"{name}#{counts[name]}"
        return keys

    def known(self, groups: Sequence[Mapping[str, Any]]) -> list[list[str | None]]:
        """The bare names of each group, None for a parameter without a known name."""
        return [
            [self._known(groups, number, position) for position in range(len(group["params"]))]
            for number, group in enumerate(groups)
        ]

    def label(self, groups: Sequence[Mapping[str, Any]], group: int, position: int) -> str:
        """A parameter as messages describe it: its name if known, its place, shape and dtype.

        Args:
            groups: the optimizer's parameter groups.
            group: number of the parameter's group.
            position: the parameter's position in that group.
        """
        parameter: Tensor = groups[group]["params"][position]
        name = self._known(groups, group, position)
        if name is None:
            name = f"#{sum(len(each['params']) for each in groups[:group]) + position}"
        return (
            f"parameter {name!r} (number {position} of group "
            f"{group}, shape {tuple(parameter.shape)}, {parameter.dtype})"
        )

    def _replaced(self, parameters: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Named parameters that are gone, each with the new one that has its place."""
        if len(self._places) != len(parameters):
            return []
        before, present = set(self._places), set(parameters)
        return [
            (old, new)
            for old, new in zip(self._places, parameters, strict=True)
            if old in self.given and old not in present and new not in before
        ]

    def _known(self, groups: Sequence[Mapping[str, Any]], group: int, position: int) -> str | None:
        """The parameter's bare name, if known."""
        parameter = groups[group]["params"][position]
        if is_flat(parameter):
            return None
        name, given = None, self.given.get(parameter)
        if self.zero is not None and given is None:
            name = self.zero.name(parameter)
        if name is None:
            names = groups[group].get("param_names")
            if names is None:
                name = given
            elif position < len(names):
                # A user who appends to a group's parameters may forget to append a name.
                name = names[position]
        return None if name is None else bare_name(name)

    def __getstate__(self) -> dict[str, Any]:
        return {"given": self.given, "zero": None, "_places": self._places}


def names_in(module: nn.Module, prefix: str = "") -> Iterator[tuple[Tensor, str]]:
    """The parameters of a module with their names; of a tied one, the first name comes last.

    Wrappers put themselves into the names, and the noise must not depend on them.
    """
    for name, child in reversed([*module.named_children()]):
        ddp = name == "module" and isinstance(module, nn.parallel.DistributedDataParallel)
        inner = prefix if ddp or name in WRAPPERS else f"{prefix}{name}."
        yield from names_in(child, inner)
    for name, parameter in reversed([*module.named_parameters(recurse=False)]):
        yield parameter, prefix + name
