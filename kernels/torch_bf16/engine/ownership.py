"""Which rank solves for which matrix, if ranks hold parts of matrices.

Every rank derives the same assignment from shapes alone, whether or not it has gradients, so that
the assignment need not be communicated.
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

__all__ = ["Held", "Round", "Unit", "rounds_here", "rounds_of", "rounds_over"]

_ELEMENTS_TOGETHER = 2**20
"""Elements solved in one call if nothing has to be sent; a larger tensor is solved alone."""

_ELEMENTS_PER_RANK = 2**24
"""Elements of a round per rank. All are in memory at once, and twice while they are exchanged."""


class Held(Protocol):
    """The part of :class:`torch_bf16.sharding.Shard` that is used here."""

    parameter: Any
    shape: Any

    @property
    def numel(self) -> int: ...

    def holders(self) -> Mapping[int, Span]: ...


@dataclass(frozen=True, eq=False)
class Unit:
    """What one rank solves for: a whole tensor, or one matrix of a stack.

    Attributes:
        shape: shape of the unit.
        owner: the global rank that solves for it.
        spans: for each global rank, which elements of the unit it holds, and where in its memory.
    """

    shape: tuple[int, ...]
    owner: int
    spans: dict[int, Span]


@dataclass(frozen=True, eq=False)
class Round:
    """Parameters whose units are exchanged together.

    Attributes:
        group: the process group; None if nothing has to be sent.
        rank: the global rank of this process; 0 if nothing has to be sent.
        parameters: each parameter with its units.
    """

    group: Any
    rank: int
    parameters: list[tuple[Tensor, list[Unit]]]


def rounds_here(shards: Iterable[tuple[Held, Rule]]) -> Iterator[Round]:
    """The rounds of parameters that this rank holds entirely."""
    round_, elements = Round(None, 0, []), 0
    for shard, rule in shards:
        if round_.parameters and elements + shard.numel > _ELEMENTS_TOGETHER:
            yield round_
            round_, elements = Round(None, 0, []), 0
        held = {0: Span.of_whole("", shard.shape)}
        units = [Unit(shape, 0, spans) for shape, spans in _cut(shard, rule, held)]
        round_.parameters.append((shard.parameter, units))
        elements += shard.numel
    yield round_


def rounds_of(shards: Iterable[tuple[Shard, Rule]]) -> list[Round]:
    """All rounds of a step, in an order that is the same on every rank.

    The largest matrices come first, and each goes to the rank with the least work so far, where
    the work is that of multiplying the matrix by its transpose.

    Args:
        shards: all sharded parameters whose rule needs whole tensors, with that rule.
    """
    by_ranks: dict[tuple[int, ...], list[tuple[Shard, Rule]]] = defaultdict(list)
    for shard, rule in shards:
        if shard.holders():
            ranks = tuple(dist.get_process_group_ranks(shard.exchange_group()))
            by_ranks[ranks].append((shard, rule))
    rounds: list[Round] = []
    for ranks, pairs in by_ranks.items():
        rounds += rounds_over(ranks, dist.get_rank(), pairs, pairs[0][0].exchange_group())
    return rounds


def rounds_over(
    ranks: Sequence[int], rank: int, shards: Sequence[tuple[Held, Rule]], group: Any = None
) -> list[Round]:
    """The rounds of parameters that the same ranks hold.

    Args:
        ranks: global ranks, in the order of their group.
        rank: the global rank of this process.
        shards: the parameters and their rules, in the same order on all ranks.
        group: the process group.
    """
    shapes = [_unit_shape(shard, rule) for shard, rule in shards]
    order = sorted(range(len(shards)), key=lambda n: (-_cost(shapes[n]), shapes[n], n))
    work = dict.fromkeys(ranks, 0)
    rounds, elements, units = [Round(group, rank, [])], 0, 0
    for n in order:
        shard = shards[n][0]
        if elements >= _ELEMENTS_PER_RANK * len(ranks) and units >= len(ranks):
            rounds.append(Round(group, rank, []))
            elements = units = 0
        shard_units = [
            Unit(shape, _owner(spans, shape, work), spans)
            for shape, spans in _cut(*shards[n], shard.holders())
        ]
        rounds[-1].parameters.append((shard.parameter, shard_units))
        elements, units = elements + shard.numel, units + len(shard_units)
    return rounds


def _cut(
    shard: Held, rule: Rule, held: Mapping[int, Span]
) -> Iterator[tuple[tuple[int, ...], dict[int, Span]]]:
    """Each unit's shape, and what ranks hold of it; an empty tensor is one unit."""
    shape = _unit_shape(shard, rule)
    for first in range(0, shard.numel, max(prod(shape), 1)) if shard.numel else [0]:
        yield shape, {rank: each.within(first, shape) for rank, each in held.items()}


def _owner(spans: dict[int, Span], shape: tuple[int, ...], work: dict[int, int]) -> int:
    alone = [rank for rank, span in spans.items() if span.numel == prod(shape)]
    owner = (alone or sorted(spans, key=lambda rank: (work[rank], rank)))[0]
    work[owner] += _cost(shape)
    return owner


def _unit_shape(shard: Held, rule: Rule) -> tuple[int, ...]:
    dims = len(shard.shape) if rule.stage_dims is None else rule.stage_dims
    return shard.shape[len(shard.shape) - dims :]


def _cost(shape: tuple[int, ...]) -> int:
    return prod(shape) * min(shape[-2:], default=1)
