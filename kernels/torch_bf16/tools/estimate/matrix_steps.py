"""Memory and traffic of a step whose rule works on whole matrices: Muon's and Adafactor's.

The rounds are those of :mod:`torch_bf16.engine.ownership`; what lives at once in a round follows
:mod:`torch_bf16.engine.direction_solver`, in kernels that work in place, as those of CPUs and GPUs
do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from types import SimpleNamespace
from typing import NamedTuple

import torch

from torch_bf16.engine.batch import alike
from torch_bf16.engine.ownership import Round, rounds_here, rounds_over
from torch_bf16.optim.newton_schulz import SMALL
from torch_bf16.recipe import Recipe
from torch_bf16.rules import MUON, Rule
from torch_bf16.sharding import Span
from torch_bf16.sharding.dtensor import box_at

from .shapes import Weight

__all__ = ["ROWS", "MatrixStep", "matrix_step"]

# FSDP2's placement, without importing its module, which takes longer than all else here.
ROWS = SimpleNamespace(dim=0, is_replicate=lambda: False, is_partial=lambda: False)
# Bytes per element that are alive at once while a master is put together, in integers.
_DECODING = {"bf16+16": 21, "bf16+8": 17, "bf16+fp32": 14}


@dataclass(frozen=True)
class _Cost:
    """Bytes per element that computing a direction takes.

    Attributes:
        prepared: of this rank's part, until the whole round is done.
        preparing: of this rank's part, at the worst moment of its preparation.
        sent: of a part that is sent to its owner.
        answer: of a solution, and of a part of it that is sent back.
        reply: bytes, not per element, that each rank gets instead of an answer.
        kept: beside a solution, if this rank holds the whole matrix.
        finishing: of a part at the end, for one parameter at a time.
        solving: of one matrix while it is solved; None for Newton-Schulz iterations.
    """

    prepared: int
    preparing: int
    sent: int
    answer: int
    reply: int
    kept: int
    finishing: int
    solving: int | None


class _Held:
    """A weight with the attributes of :class:`torch_bf16.engine.ownership.Held`."""

    def __init__(self, weight: Weight, spans: Mapping[int, Span]) -> None:
        self.parameter, self.shape, self.numel = weight, weight.shape, weight.numel
        self._spans = spans

    def holders(self) -> Mapping[int, Span]:
        return self._spans


class MatrixStep(NamedTuple):
    """What a rank holds and sends if a rule works on whole matrices.

    Attributes:
        peak: the most bytes at once beside weights, gradients and states.
        sent: bytes that this rank sends in a step.
    """

    peak: int = 0
    sent: int = 0


def matrix_step(
    weights: Iterable[tuple[Weight, Rule, torch.dtype]], recipe: Recipe, ranks: int, rank: int
) -> MatrixStep:
    """What a rank holds and sends in a step.

    Args:
        weights: the trained weights, their rules, and their dtypes as parameters.
        recipe: how they are stored.
        ranks: the number of ranks over which FSDP2 shards them.
        rank: the rank's number.
    """
    spans = cache(lambda shape: _spans(shape, ranks))
    matrices = [
        (_Held(each, spans(each.shape)), rule, dtype)
        for each, rule, dtype in weights
        if rule.stage_states
    ]
    costs = {id(held.parameter): _cost(held, rule, dtype, recipe) for held, rule, dtype in matrices}
    cut = [(held, rule) for held, rule, _ in matrices]
    if ranks > 1:
        rounds = rounds_over(range(ranks), rank, cut) if cut else []
    else:
        kinds = alike(cut, lambda each: (each[1].name, each[0].shape))
        rounds = [each for kind in kinds for each in rounds_here(kind)]
    sizes = [_Round(each, costs) for each in rounds]
    peak = max((size for each in sizes for size in each.phases()), default=0)
    return MatrixStep(peak, sum(each.away + each.back for each in sizes))


def _spans(shape: tuple[int, ...], ranks: int) -> dict[int, Span]:
    """Each rank's span of a weight: some of its rows."""
    if ranks == 1 or not shape:
        return {rank: Span.of_whole("", shape) for rank in range(ranks)}
    row, found = prod(shape[1:]), {}
    for rank in range(ranks):
        rows = box_at(shape, (ranks,), (rank,), (ROWS,))[0]
        numel = (rows.stop - rows.start) * row
        found[rank] = Span("", shape, 0, numel, rows.start * row, max(numel, 1), max(numel, 1))
    return found


def _cost(held: _Held, rule: Rule, dtype: torch.dtype, recipe: Recipe) -> _Cost:
    shape = held.shape
    if rule is MUON:
        (momentum,) = rule.stage_states
        planes = recipe.format_of(momentum.role, shape, dtype).planes
        # fp32 momentum is read where it is.
        return _Cost(2, 8 if planes[0].dtype == torch.float32 else 12, 2, 2, 0, 0, 8, None)
    format_ = recipe.format_of("weights", shape, dtype)
    planes = format_.planes
    weight = 4 if len(planes) > 1 else dtype.itemsize
    copied, widened = 4 * (len(planes) > 1), 4 * (weight < 4)
    whole = all(each.numel in (0, held.numel) for each in held.holders().values())
    if len(shape) < 2:
        return _Cost(4 + copied, 8 + copied, 4 + weight, 0, 4, 0, 0, widened)
    part = 0 if whole else 28
    reply = 4 + 4 * sum(prod(each.shape(shape)) for each in rule.stage_states if each.shape)
    decoding = _DECODING.get(format_.name, copied)
    return _Cost(copied, decoding, dtype.itemsize + weight, 0, reply, 4, part, 8 + widened)


class _Round:
    """Bytes of a round on one rank.

    Attributes:
        here: this rank's parts, prepared.
        gathered: the whole tensors that this rank owns and other ranks hold parts of.
        come: the parts of these tensors that other ranks send.
        away: this rank's parts that are sent to other owners.
        answers: what other owners send back.
        back: what this rank, as an owner, sends back to other ranks.
    """

    def __init__(self, round_: Round, costs: Mapping[int, _Cost]) -> None:
        me = round_.rank
        self.here = self.gathered = self.come = self.away = self.answers = self.back = 0
        self._preparing = self._finishing = 0
        self._groups: dict[tuple[_Cost, tuple[int, ...]], list[int]] = defaultdict(list)
        for parameter, units in round_.parameters:
            cost, part = costs[id(parameter)], sum(each.spans[me].numel for each in units)
            self.here += cost.prepared * part
            self._preparing = max(self._preparing, (cost.preparing - cost.prepared) * part)
            self._finishing = max(self._finishing, cost.finishing * part)
            for unit in units:
                numel, own = prod(unit.shape), unit.spans[me].numel
                if unit.owner != me:
                    self.away += cost.sent * own
                    self.answers += cost.answer * own + cost.reply
                    continue
                self._groups[cost, unit.shape].append(own)
                if own < numel:
                    self.gathered += cost.sent * numel
                    self.come += cost.sent * (numel - own)
                self.back += cost.answer * (numel - own) + cost.reply * (len(unit.spans) - 1)

    def phases(self) -> Iterator[int]:
        """Bytes at every moment of the round that may be its peak."""
        here = self.here
        yield here + self._preparing
        yield here + self.away + self.come
        yield here + self.gathered + self.come
        inputs, solutions = self.gathered, 0
        for (cost, shape), held in self._groups.items():
            numel, count = prod(shape), len(held)
            alone = held.count(numel)
            kept = cost.kept * numel * alone
            beside = kept - cost.kept * numel if alone else 0
            yield here + inputs + solutions + beside + _solution_bytes(cost, shape, count)
            inputs -= cost.sent * numel * (count - alone)
            solutions += cost.answer * numel * count + kept
        yield here + solutions + self.answers + max(self.back, self._finishing)


def _solution_bytes(cost: _Cost, shape: Sequence[int], count: int) -> int:
    """The most bytes at once while all tensors of one shape are solved, with the solutions."""
    numel, rows = prod(shape), min(shape, default=0)
    if cost.solving is not None:
        return cost.solving * numel
    if numel <= SMALL:
        return count * (6 * numel + 4 * rows**2)
    tall = shape[0] > shape[1]
    return max(2 * (count + 1) * numel + 4 * rows**2, 4 * count * numel * tall)
