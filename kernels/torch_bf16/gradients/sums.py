"""The kernel calls that add gradients to their sums in ``bf16_stochastic``, for many at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_bf16.engine.batch import Batch, Task, alike
from torch_bf16.formats import BF16_STOCHASTIC
from torch_bf16.memory import TransposedOrder, as_it_lies
from torch_bf16.numerics.counter_rng import sum_base
from torch_bf16.rules import ACCUMULATE
from torch_bf16.sharding import Span, is_dtensor, local, missing_memory, shard_of

from .gathering import Group

__all__ = ["Addition", "Sums", "addable", "with_graph_of"]


@dataclass(frozen=True, slots=True)
class Addition:
    """A gradient and the sum that it is added to.

    Attributes:
        total: the sum, as ``p.grad`` shows it.
        new: the gradient on this rank, contiguous.
        number: number of additions before this one for this step; the first gradient is not added.
        order: the order in which the sum lies in memory, and ``new`` as well; None for row-major.
    """

    total: Tensor
    new: Tensor
    number: int
    order: TransposedOrder | None = None

    @property
    def memory(self) -> Tensor:
        """This rank's part of the sum, contiguous."""
        return as_it_lies(local(self.total), self.order)


@dataclass(slots=True)
class _Launch:
    """One kernel call.

    Attributes:
        spans: its spans, each with the number of its parameter.
        sums: the tensor that the call writes to, for each span; empty until there is a sum.
        places: addresses of the sums.
        steps: steps of the parameters that ``bases`` are for.
        bases: starting points of the noise.
    """

    spans: list[tuple[int, Span]]
    batch: Batch
    sums: list[Tensor]
    places: list[int] | None = None
    steps: list[int] = field(default_factory=list)
    bases: np.ndarray | None = None

    def bind(self, totals: Sequence[Tensor | None]) -> None:
        """Write to these sums from now on; None for a parameter without a gradient."""
        pairs = [(totals[number], span) for number, span in self.spans]
        sums = [
            old if total is None else span.of(total)
            for (total, span), old in zip(pairs, self.sums, strict=True)
        ]
        places = [each.data_ptr() for each in sums]
        if places != self.places:
            self.sums, self.places = sums, places
            self.batch.move([((each,),) for each in sums])

    def forget(self) -> None:
        """Drop the sums, so that they can be freed before the next ones are made."""
        self.sums, self.places = [each.new_empty(0) for each in self.sums], None
        self.batch.move(None)

    def noise(self, steps: list[int]) -> np.ndarray:
        """The starting points of the noise, for sums for these steps of the parameters."""
        if self.bases is None or steps != self.steps:
            base = self.batch.bases.astype(np.int64)
            step = np.array([[steps[number]] for number, _ in self.spans], np.int64)
            words = sum_base((base[..., 0], base[..., 1]), step)
            self.bases = np.stack(words, axis=-1).astype(np.uint32)
            self.steps = steps
        return self.bases


@dataclass(slots=True)
class _Made:
    """The launches of a group, and the settings that they were made for."""

    setting: tuple[Any, ...]
    numels: list[int]
    orders: list[TransposedOrder | None]
    launches: list[_Launch]

    def fits(self, setting: tuple[Any, ...], additions: Sequence[Addition | None]) -> bool:
        """Whether the launches fit these settings and additions."""
        if setting != self.setting or len(additions) != len(self.numels):
            return False
        return all(
            each is None or (each.new.numel() == numel and each.order == order)
            for each, numel, order in zip(additions, self.numels, self.orders, strict=True)
        )

    def forget(self) -> None:
        """Drop the sums, so that they can be freed before the next ones are made."""
        for launch in self.launches:
            launch.forget()


class Sums:
    """Adds gradients to their sums, as long as an optimizer has the same parameters."""

    def __init__(self) -> None:
        self._setting: tuple[Any, ...] | None = None
        # By id of the parameter: those of all are found at once, for launches of one each.
        self._keys: Mapping[int, str] = {}

    def add_all(
        self,
        group: Group,
        additions: Mapping[int, Addition],
        optimizer: Any,
        steps: Mapping[Tensor, int],
    ) -> None:
        """Add gradients to their sums, in place, in one call.

        Args:
            group: the group of the parameters; keeps the launches for reuse.
            additions: the additions, by number of the member.
            optimizer: the optimizer whose seed, backend and names count.
            steps: by parameter, how many steps it has taken.
        """
        by_member = [additions.get(number) for number in range(len(group.members))]
        totals = [None if each is None else each.memory for each in by_member]
        made, setting = group.made, _setting(optimizer)
        if setting != self._setting:
            self._setting, self._keys = setting, {}
        if made is None or not made.fits(setting, by_member):
            self._keys = self._keys or optimizer._engine.names.keys(optimizer.param_groups)
            dtype = next(iter(additions.values())).new.dtype
            # Where there is no gradient now, the order of the last one: weights may take turns.
            last = () if made is None else made.orders
            pairs = zip_longest(by_member, last)
            orders = [known if each is None else each.order for each, known in pairs]
            launches = _launches(group.members, totals, orders, dtype, optimizer, self._keys)
            numels = [local(each).numel() for each in group.members]
            made = group.made = _Made(setting, numels, orders, launches)
        numbers = [0 if each is None else each.number for each in by_member]
        following = [steps.get(each, 0) + 1 for each in group.members]
        for launch in made.launches:
            launch.bind(totals)
            pairs = [(by_member[number], span) for number, span in launch.spans]
            new = [None if each is None else span.of(each.new) for each, span in pairs]
            count = [numbers[number] for number, _ in launch.spans]
            launch.batch.run_alike(new, count, bases=launch.noise(following))
        # The kernel writes through addresses, which autograd does not see.
        torch.autograd.graph.increment_version([each.total for each in additions.values()])


def addable(new: Any, total: Any, parameter: Tensor) -> bool:
    """Whether a gradient can be added to a sum directly in memory."""
    if new.layout != torch.strided or total.layout != torch.strided:
        return False
    if type(new) is type(total) is Tensor and not is_dtensor(parameter):
        return new.shape == total.shape == parameter.shape
    # Tensors that are not sharded lack the attribute.
    placed = getattr(new, "placements", None) == getattr(total, "placements", None)
    # Kernels write to addresses; the step refuses, by name, tensors that have none.
    in_memory = not missing_memory(new) and not missing_memory(total)
    return placed and in_memory and local(new).shape == local(total).shape == local(parameter).shape


def with_graph_of(graph: Tensor, numbers: Tensor) -> Tensor:
    """A sum with the graph of another, which is rounded otherwise; its gradient is the other's."""
    return _Renumbered.apply(graph, numbers)  # pyright: ignore


class _Renumbered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graph: Tensor, numbers: Tensor) -> Tensor:
        return numbers.view_as(numbers)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore
        return gradient, None


def _setting(optimizer: Any) -> tuple[Any, ...]:
    """Everything besides the tensors that launches depend on."""
    names = optimizer._engine.names
    # The key of a parameter without a name follows from its place.
    of_groups = [(len(g["params"]), g.get("param_names")) for g in optimizer.param_groups]
    # Not a copy of the names, which are only ever replaced: comparing it would read all of them,
    # for every parameter whose gradient does not wait for others.
    return optimizer.recipe.seed, optimizer.backend, of_groups, names.given, names.zero


def _launches(
    parameters: Sequence[Tensor],
    totals: Sequence[Tensor | None],
    orders: Sequence[TransposedOrder | None],
    dtype: torch.dtype,
    optimizer: Any,
    keys: Mapping[int, str],
) -> list[_Launch]:
    rows = []
    triples = zip(parameters, totals, orders, strict=True)
    for number, (parameter, total, order) in enumerate(triples):
        # A parameter that was taken out of the groups may still have a sum.
        for span in shard_of(parameter, keys.get(id(parameter), "")).span.split():
            target = local(parameter).new_empty(0) if total is None else span.of(total)
            task = Task(span, ACCUMULATE, (BF16_STOCHASTIC,), ((target,),), dtype, order=order)
            rows.append((number, task))
    return [
        _Launch(
            [(number, task.span) for number, task in batched],
            Batch([task for _, task in batched], optimizer.recipe.seed, optimizer.backend),
            [task.planes[0][0] for _, task in batched],
        )
        for batched in alike(rows, lambda row: row[1].variant)
    ]
