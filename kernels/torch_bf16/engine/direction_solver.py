"""Computes the directions of all members of a plan whose rule needs whole tensors.

Tensors that this rank holds entirely are solved here, small matrices of one shape in one call. If
ranks hold parts of a matrix, one rank owns it: the others send their elements to the owner, which
solves for the matrix and sends each rank its part of the answer. So each matrix is solved once, by
the same arithmetic as in one process.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torch_bf16.backends import StepInputs
from torch_bf16.backends.subnormals import subnormals_kept_inside
from torch_bf16.sharding import Like, exchange

from .batch import alike
from .direction import Direction, Solution
from .member import Member
from .ownership import Round, Unit, rounds_here

__all__ = ["DirectionSolver"]

_logger = logging.getLogger("torch_bf16")


class DirectionSolver:
    """Computes directions, round by round, to hold only some in memory.

    Args:
        members: the plan's members, in its order.
        rounds: the exchanges of sharded parameters, including parameters outside this plan.
        groups: other process groups whose ranks wait for one another in a step, with their devices.

    Attributes:
        prepared: by member number, the name of the state that a failed step may have changed
            without updating the member.
    """

    def __init__(
        self,
        members: Sequence[Member],
        rounds: Sequence[Round],
        groups: Mapping[Any, torch.device],
    ) -> None:
        numbers = {each.parameter: n for n, each in enumerate(members) if each.direction}
        exchanged = {parameter for each in rounds for parameter, _ in each.parameters}
        alone = [members[n] for p, n in numbers.items() if p not in exchanged]
        # Members that can be solved in one call.
        kinds = alike(alone, lambda each: (each.direction.kind, each.shard.shape))  # pyright: ignore
        local = (rounds_here([(each.shard, each.rule) for each in kind]) for kind in kinds)
        self._members = members
        self.prepared: dict[int, str] = {}
        self._groups = {**groups, **{each.group: each.parameters[0][0].device for each in rounds}}
        self._rounds: list[tuple[Round, list[tuple[int, list[Unit]]]]] = []
        for round_ in chain(chain.from_iterable(local), rounds):
            # FSDP1 may have left this rank nothing of a parameter.
            held = [
                (numbers[p], units)
                for p, units in round_.parameters
                if p in numbers and round_.rank in units[0].spans
            ]
            if held:
                self._rounds.append((round_, held))

    def agree(self, inputs: StepInputs) -> None:
        """Make all ranks that exchange data skip the step if one does, as they would wait for it.

        Args:
            inputs: inputs of the step; ``found_inf`` is set to 1 if another rank's is not 0.
        """
        found_inf = inputs.found_inf
        if not self._groups or not isinstance(found_inf, Tensor):
            return
        skips_here = bool(found_inf != 0)
        device = next(iter(self._groups.values()))
        skips = torch.tensor(skips_here, dtype=torch.float32, device=device)
        for group in self._groups:
            dist.all_reduce(skips, dist.ReduceOp.MAX, group=group)
        if bool(skips) != skips_here:
            found_inf.fill_(1.0)
            _logger.warning(
                "found_inf is not 0 on another rank, with which this one exchanges numbers: both "
                "skip the step. Give all ranks the same found_inf, as torch.distributed.fsdp."
                "sharded_grad_scaler.ShardedGradScaler does, which keeps their scales equal, too"
            )

    @subnormals_kept_inside
    def run(
        self, is_active: Sequence[bool], gradients: Sequence[Tensor | None], inputs: StepInputs
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield each active member's number and its direction, which is fp32, contiguous.

        Args:
            is_active: for each member, whether it is active.
            gradients: this rank's part of each gradient.
            inputs: inputs of this step, on the host.
        """
        # Kernels on a device check found_inf themselves; states must not change here either.
        skipped = inputs.is_skipped
        for round_, held in self._rounds:
            requests = []
            for n, units in held:
                member, gradient = self._members[n], gradients[n]
                if not is_active[n] or gradient is None or member.direction is None:
                    continue
                gradient = gradient.resolve_neg().contiguous()
                if skipped:
                    yield n, gradient.float()
                    continue
                # No local variable for prepared tensors: it would keep them alive after the round.
                prepare, step = member.direction.prepare, member.steps + 1
                if (state := member.direction.prepares) is not None:
                    self.prepared[n] = state
                requests.append(
                    _Request(n, member.direction, units, prepare(gradient, step, inputs))
                )
            for solved in _solve(round_, requests) if requests else ():
                self.prepared.pop(solved[0], None)
                yield solved
                # Only after the update, like ``state["step"]``.
                member = self._members[solved[0]]
                member.steps += 1
                if member.direction is not None:
                    member.direction.store()
                del solved


class _Request(NamedTuple):
    """A member's input to a round.

    Attributes:
        number: number of the member.
        direction: direction of the member.
        units: the member's units, each solved separately.
        prepared: this rank's part of the tensors to solve for.
    """

    number: int
    direction: Direction
    units: Sequence[Unit]
    prepared: tuple[Tensor, ...]


def _solve(round_: Round, requests: list[_Request]) -> Iterator[tuple[int, Tensor]]:
    """Yield each member's number and direction."""
    tensors = _gather(round_, requests)
    directions = {unit: each.direction for each in requests for unit in each.units}
    solutions: dict[Unit, Solution] = {}
    for units in alike(tensors, lambda each: (directions[each].kind, each.shape)):
        solvers = [directions[each] for each in units]
        solved = iter(solvers[0].solve(solvers, [tensors.pop(each) for each in units]))
        for unit in units:
            solution = next(solved)
            # Only a rank that holds the whole unit can use the intermediate, which may be as large.
            alone = unit.spans[round_.rank].numel == prod(unit.shape)
            solutions[unit] = solution if alone else Solution(solution.answer)
            del solution
        # A generator holds its last tensors.
        del solved
    answers = _scatter(round_, requests, solutions)
    while requests:
        request = requests.pop(0)
        spans = [unit.spans[round_.rank] for unit in request.units]
        parts = [answers.pop(unit) for unit in request.units]
        own = [solutions.pop(unit, None) for unit in request.units]
        answer, intermediate = parts[0], None
        if len(parts) > 1 and request.direction.answer[0] is None:
            answer = request.prepared[0].new_empty(request.prepared[0].numel(), dtype=answer.dtype)
            for span, part in zip(spans, parts, strict=True):
                span.of(answer).copy_(part.reshape(-1))
        elif own[0] is not None:
            intermediate = own[0].intermediate
        yield (
            request.number,
            request.direction.finish(request.prepared, answer, intermediate).contiguous(),
        )


def _gather(round_: Round, requests: Sequence[_Request]) -> dict[Unit, tuple[Tensor, ...]]:
    """Gather all elements of the units that this rank owns."""
    me, device = round_.rank, requests[0].prepared[0].device
    outgoing: dict[int, list[Tensor]] = defaultdict(list)
    incoming: dict[int, list[Like]] = defaultdict(list)
    owned = []
    for request in requests:
        for unit in request.units:
            held = unit.spans[me]
            if unit.owner == me:
                owned.append((request, unit))
                for rank, span in unit.spans.items():
                    if rank != me and span.numel:
                        incoming[rank] += [(span.numel, t.dtype) for t in request.prepared]
            elif held.numel:
                outgoing[unit.owner] += [held.of(t) for t in request.prepared]
    messages = exchange(outgoing, incoming, round_.group, device)
    received = {rank: iter(tensors) for rank, tensors in messages.items()}
    gathered = {}
    for request, unit in owned:
        held = unit.spans[me]
        if held.numel == prod(unit.shape):
            gathered[unit] = tuple(held.of(t).view(unit.shape) for t in request.prepared)
            continue
        gathered[unit] = tensors = tuple(t.new_empty(unit.shape) for t in request.prepared)
        for rank, span in unit.spans.items():
            for whole, t in zip(tensors, request.prepared, strict=True):
                if span.numel:
                    part = held.of(t) if rank == me else next(received[rank])
                    span.view_of(whole).copy_(part.view(-1, span.width))
    return gathered


def _scatter(
    round_: Round, requests: Sequence[_Request], solutions: Mapping[Unit, Solution]
) -> dict[Unit, Tensor]:
    """Send owners' answers to the ranks that need them; returns this rank's part of each one."""
    me, device = round_.rank, requests[0].prepared[0].device
    outgoing: dict[int, list[Tensor]] = defaultdict(list)
    incoming: dict[int, list[Like]] = defaultdict(list)
    answers, awaited = {}, []
    for request in requests:
        numel, dtype = request.direction.answer
        for unit in request.units:
            size = unit.spans[me].numel if numel is None else numel
            if unit.owner != me:
                if size:
                    incoming[unit.owner].append((size, dtype))
                    awaited.append(unit)
                else:
                    answers[unit] = request.prepared[0].new_empty(0, dtype=dtype)
                continue
            answer = solutions[unit].answer
            for rank, span in unit.spans.items():
                part = answer if numel is not None else span.view_of(answer)
                if rank == me:
                    answers[unit] = part
                elif part.numel():
                    outgoing[rank].append(part)
    messages = exchange(outgoing, incoming, round_.group, device)
    received = {rank: iter(tensors) for rank, tensors in messages.items()}
    return answers | {unit: next(received[unit.owner]) for unit in awaited}
