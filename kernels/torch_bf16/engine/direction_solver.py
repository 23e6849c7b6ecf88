"""The directions of all members of a plan whose rule looks at whole tensors first.

A tensor that this rank holds entirely is solved here, small matrices of one shape together. Where
ranks hold parts, each matrix has an owner: the others send it their elements, it solves, and sends
each rank what that needs. So each matrix is solved once, by the arithmetic of one process.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torch_bf16.backends import StepInputs
from torch_bf16.sharding import Like, exchange

from .batch import alike
from .direction import Direction, Solution
from .member import Member
from .ownership import Round, Unit, rounds_here

__all__ = ["DirectionSolver"]

_logger = logging.getLogger("torch_bf16")


class DirectionSolver:
    """Makes the directions, some at a time.

    Args:
        members: of a plan, in its order.
        rounds: in which the sharded ones are exchanged; of parameters of this plan and of others.
        groups: other groups whose ranks wait for one another in a step, each with its device.

    Attributes:
        prepared: what a step that failed may have changed of members that it has not updated: the
            name of the state, by the number of the member.
    """

    def __init__(
        self,
        members: Sequence[Member],
        rounds: Sequence[Round],
        groups: Mapping[Any, torch.device] = MappingProxyType({}),
    ) -> None:
        numbers = {each.parameter: n for n, each in enumerate(members) if each.direction}
        exchanged = {parameter for each in rounds for parameter, _ in each.parameters}
        alone = [members[n] for p, n in numbers.items() if p not in exchanged]
        # What is solved in one call.
        kinds = alike(alone, lambda each: (each.direction.kind, each.shard.shape))  # pyright: ignore
        here = (rounds_here([(each.shard, each.rule) for each in some]) for some in kinds)
        self._members = members
        self.prepared: dict[int, str] = {}
        self._groups = {**groups, **{each.group: each.parameters[0][0].device for each in rounds}}
        self._rounds: list[tuple[Round, list[tuple[int, list[Unit]]]]] = []
        for each in chain(chain.from_iterable(here), rounds):
            # Where FSDP1 has left this rank nothing of a parameter, there is nothing to do.
            known = [
                (numbers[p], units)
                for p, units in each.parameters
                if p in numbers and each.rank in units[0].spans
            ]
            if known:
                self._rounds.append((each, known))

    def agree(self, inputs: StepInputs) -> None:
        """Let all ranks that exchange skip a step where one does: the others would wait for it.

        Args:
            inputs: of the step; ``found_inf`` becomes 1 where another rank's is not 0.
        """
        found = inputs.found_inf
        if not self._groups or not isinstance(found, Tensor):
            return
        mine = bool(found != 0)
        skips = torch.tensor(mine, dtype=torch.float32, device=next(iter(self._groups.values())))
        for group in self._groups:
            dist.all_reduce(skips, dist.ReduceOp.MAX, group=group)
        if bool(skips) != mine:
            found.fill_(1.0)
            _logger.warning(
                "found_inf is not 0 on another rank, which this one exchanges numbers with: both "
                "skip the step. Have all ranks find the same; torch.distributed.fsdp."
                "sharded_grad_scaler.ShardedGradScaler does, and keeps their scales alike, too"
            )

    def run(
        self, taking_part: Sequence[bool], gradients: Sequence[Tensor | None], inputs: StepInputs
    ) -> Iterator[tuple[int, Tensor]]:
        """The number of each member that takes part, and its direction: fp32, contiguous.

        Args:
            taking_part: for each member whether it takes part.
            gradients: this rank's part of each.
            inputs: of this step, on the host.
        """
        # A device that skips the step reads this on its own; states must not change then.
        skipped = inputs.found_inf is not None and float(inputs.found_inf) != 0.0
        for round_, known in self._rounds:
            requests = []
            for n, units in known:
                member, gradient = self._members[n], gradients[n]
                if not taking_part[n] or gradient is None or member.direction is None:
                    continue
                gradient = gradient.resolve_neg().contiguous()
                if skipped:
                    yield n, gradient.float()
                    continue
                # Without names for what is as large as a weight, which would outlive the round.
                prepare, step = member.direction.prepare, member.steps + 1
                if (state := member.direction.prepares) is not None:
                    self.prepared[n] = state
                requests.append(
                    _Request(n, member.direction, units, prepare(gradient, step, inputs))
                )
            for found in _solve(round_, requests) if requests else ():
                self.prepared.pop(found[0], None)
                yield found
                # Only now that it was followed, as ``state["step"]`` counts.
                self._members[found[0]].steps += 1
                del found


class _Request(NamedTuple):
    """What a member asks of a round.

    Attributes:
        number: of the member.
        direction: of the member.
        units: what is solved of it.
        prepared: this rank's part of that.
    """

    number: int
    direction: Direction
    units: Sequence[Unit]
    prepared: tuple[Tensor, ...]


def _solve(round_: Round, requests: list[_Request]) -> Iterator[tuple[int, Tensor]]:
    """The members' numbers, and their directions."""
    tensors = _gather(round_, requests)
    directions = {unit: each.direction for each in requests for unit in each.units}
    solutions: dict[Unit, Solution] = {}
    for units in alike(tensors, lambda each: (directions[each].kind, each.shape)):
        some = [directions[each] for each in units]
        found = iter(some[0].solve(some, [tensors.pop(each) for each in units]))
        for unit in units:
            solution = next(found)
            # The intermediate serves a rank that holds all of it, and may be as large.
            alone = unit.spans[round_.rank].numel == prod(unit.shape)
            solutions[unit] = solution if alone else Solution(solution.answer)
            del solution
    answers = _scatter(round_, requests, solutions)
    while requests:
        each = requests.pop(0)
        mine = [unit.spans[round_.rank] for unit in each.units]
        found = [answers.pop(unit) for unit in each.units]
        solved = [solutions.pop(unit, None) for unit in each.units]
        answer, intermediate = found[0], None
        if len(found) > 1 and each.direction.answer[0] is None:
            answer = each.prepared[0].new_empty(each.prepared[0].numel(), dtype=answer.dtype)
            for span, part in zip(mine, found, strict=True):
                span.of(answer).copy_(part.reshape(-1))
        elif solved[0] is not None:
            intermediate = solved[0].intermediate
        yield each.number, each.direction.finish(each.prepared, answer, intermediate).contiguous()


def _gather(round_: Round, requests: Sequence[_Request]) -> dict[Unit, tuple[Tensor, ...]]:
    """All elements of the units that this rank owns."""
    me, device = round_.rank, requests[0].prepared[0].device
    outgoing: dict[int, list[Tensor]] = defaultdict(list)
    incoming: dict[int, list[Like]] = defaultdict(list)
    owned = []
    for each in requests:
        for unit in each.units:
            mine = unit.spans[me]
            if unit.owner == me:
                owned.append((each, unit))
                for rank, span in unit.spans.items():
                    if rank != me and span.numel:
                        incoming[rank] += [(span.numel, t.dtype) for t in each.prepared]
            elif mine.numel:
                outgoing[unit.owner] += [mine.of(t) for t in each.prepared]
    came = _exchange(outgoing, incoming, round_, device)
    found = {}
    for each, unit in owned:
        mine = unit.spans[me]
        if mine.numel == prod(unit.shape):
            found[unit] = tuple(mine.of(t).view(unit.shape) for t in each.prepared)
            continue
        found[unit] = tensors = tuple(t.new_empty(unit.shape) for t in each.prepared)
        for rank, span in unit.spans.items():
            for whole, t in zip(tensors, each.prepared, strict=True):
                if span.numel:
                    part = mine.of(t) if rank == me else next(came[rank])
                    span.view_of(whole).copy_(part.view(-1, span.width))
    return found


def _scatter(
    round_: Round, requests: Sequence[_Request], solutions: Mapping[Unit, Solution]
) -> dict[Unit, Tensor]:
    """What this rank needs of the answers of all units."""
    me, device = round_.rank, requests[0].prepared[0].device
    outgoing: dict[int, list[Tensor]] = defaultdict(list)
    incoming: dict[int, list[Like]] = defaultdict(list)
    found = {}
    for each in requests:
        numel, dtype = each.direction.answer
        for unit in each.units:
            size = unit.spans[me].numel if numel is None else numel
            found[unit] = each.prepared[0].new_empty(size, dtype=dtype)
            if unit.owner != me:
                incoming[unit.owner] += [(size, dtype)] if size else []
                continue
            answer = solutions[unit].answer
            for rank, span in unit.spans.items():
                part = answer if numel is not None else span.view_of(answer)
                if rank == me:
                    found[unit] = part
                elif part.numel():
                    outgoing[rank].append(part)
    came = _exchange(outgoing, incoming, round_, device)
    for unit in found:
        if unit.owner != me and found[unit].numel():
            found[unit] = next(came[unit.owner])
    return found


def _exchange(
    outgoing: Mapping[int, Sequence[Tensor]],
    incoming: Mapping[int, Sequence[Like]],
    round_: Round,
    device: torch.device,
) -> dict[int, Iterator[Tensor]]:
    came = exchange(outgoing, incoming, round_.group, device)
    return {rank: iter(tensors) for rank, tensors in came.items()}
