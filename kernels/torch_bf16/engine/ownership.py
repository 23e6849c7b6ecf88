"""Which rank solves for which matrix, where ranks hold parts of them.

Every rank derives the same assignment from shapes alone, whether it has gradients or not, so that
none of this is communicated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from torch_bf16.rules import Rule
from torch_bf16.sharding import Shard, Span

__all__ = ["Cut", "Round", "Unit", "rounds_here", "rounds_of", "rounds_over"]

_TOGETHER = 2**20
"""Elements that are solved together where nothing has to be sent; larger tensors are alone."""

_AT_A_TIME = 2**24
"""Elements of a round for each rank, which are in memory as a whole, and twice while they move."""


class Cut(Protocol):
    """What is asked of a :class:`torch_bf16.sharding.Shard` here."""

    parameter: Any
    shape: Any

    @property
    def numel(self) -> int: ...

    def holders(self) -> Mapping[int, Span]: ...


@dataclass(frozen=True, eq=False)
class Unit:
    """A whole tensor, or one matrix of a stack.

    Attributes:
        first: index of its first element in the whole tensor.
        shape: of it.
        owner: the global rank that solves for it.
        spans: by global rank the elements that it holds: of this unit, begin in its own memory.
    """

    first: int
    shape: tuple[int, ...]
    owner: int
    spans: dict[int, Span]


@dataclass(frozen=True, eq=False)
class Round:
    """What goes over the wire together.

    Attributes:
        group: the process group; None where nothing has to be sent.
        rank: this one's, global.
        parameters: those in it, and the units of each.
    """

    group: Any
    rank: int
    parameters: list[tuple[Tensor, list[Unit]]]


def rounds_here(some: Iterable[tuple[Cut, Rule]]) -> Iterator[Round]:
    """What is solved together of parameters that this rank holds all of."""
    round_, elements = Round(None, 0, []), 0
    for shard, rule in some:
        if round_.parameters and elements + shard.numel > _TOGETHER:
            yield round_
            round_, elements = Round(None, 0, []), 0
        every = {0: Span.of_whole("", shard.shape)}
        units = [Unit(first, shape, 0, spans) for first, shape, spans in _cut(shard, rule, every)]
        round_.parameters.append((shard.parameter, units))
        elements += shard.numel
    yield round_


def rounds_of(every: Iterable[tuple[Shard, Rule]]) -> list[Round]:
    """All rounds of a step, in their order on every rank.

    The largest matrices come first, and each goes to the rank that has the least to do so far,
    where work is counted as that of a product of a matrix and its transpose.

    Args:
        every: all sharded parameters whose rule looks at whole tensors.
    """
    alike: dict[tuple[int, ...], list[tuple[Shard, Rule]]] = defaultdict(list)
    for shard, rule in every:
        if shard.holders():
            alike[tuple(dist.get_process_group_ranks(shard.exchange_group()))].append((shard, rule))
    rounds: list[Round] = []
    for ranks, some in alike.items():
        rounds += rounds_over(ranks, dist.get_rank(), some, some[0][0].exchange_group())
    return rounds


def rounds_over(
    ranks: Sequence[int], rank: int, some: Sequence[tuple[Cut, Rule]], group: Any = None
) -> list[Round]:
    """The rounds of parameters that the same ranks hold.

    Args:
        ranks: global ones, in the order of their group.
        rank: this one.
        some: the parameters, in an order that all ranks have.
        group: the process group.
    """
    shapes = [_unit_shape(shard, rule) for shard, rule in some]
    order = sorted(range(len(some)), key=lambda n: (-_cost(shapes[n]), shapes[n], n))
    work = dict.fromkeys(ranks, 0)
    rounds, elements, units = [Round(group, rank, [])], 0, 0
    for n in order:
        shard = some[n][0]
        if elements >= _AT_A_TIME * len(ranks) and units >= len(ranks):
            rounds.append(Round(group, rank, []))
            elements = units = 0
        found = [
            Unit(first, shape, _owner(spans, shape, work), spans)
            for first, shape, spans in _cut(*some[n], shard.holders())
        ]
        rounds[-1].parameters.append((shard.parameter, found))
        elements, units = elements + shard.numel, units + len(found)
    return rounds


def _cut(
    shard: Cut, rule: Rule, held: Mapping[int, Span]
) -> Iterator[tuple[int, tuple[int, ...], dict[int, Span]]]:
    """Each unit's first element, shape, and what ranks hold of it; one if it is empty."""
    shape = _unit_shape(shard, rule)
    for first in range(0, shard.numel, max(prod(shape), 1)) if shard.numel else [0]:
        yield first, shape, {rank: each.within(first, shape) for rank, each in held.items()}


def _owner(spans: dict[int, Span], shape: tuple[int, ...], work: dict[int, int]) -> int:
    alone = [rank for rank, span in spans.items() if span.numel == prod(shape)]
    owner = (alone or sorted(spans, key=lambda rank: (work[rank], rank)))[0]
    work[owner] += _cost(shape)
    return owner


def _unit_shape(shard: Cut, rule: Rule) -> tuple[int, ...]:
    dims = len(shard.shape) if rule.stage_dims is None else rule.stage_dims
    return shard.shape[len(shard.shape) - dims :]


def _cost(shape: tuple[int, ...]) -> int:
    return prod(shape) * min(shape[-2:], default=1)
