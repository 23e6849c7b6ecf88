"""What plans need to know of an optimizer as a whole, found out once for all plans of a step.

Released steps are planned some parameters at a time, often one by one. If each plan looked at all
parameters, its time would grow with their number, and that of a step with the square of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor
from torch.nn.parameter import is_lazy

from torch_bf16.engine.member import Member
from torch_bf16.engine.ownership import Round, rounds_of
from torch_bf16.errors import prefix_errors
from torch_bf16.model import remainders
from torch_bf16.parameters import parameters_of
from torch_bf16.rules import Rule
from torch_bf16.sharding import Shard, shard_of

from .replaced import orphan_in

if TYPE_CHECKING:
    from .optimizer import BF16Optimizer

__all__ = ["Overview", "Place", "overview_of", "placed"]


class Place(NamedTuple):
    """Where a parameter is: the number of its group, and its position there.

    Places compare in their order.
    """

    group: int
    position: int


def placed(optimizer: Any) -> Iterator[tuple[Place, Tensor]]:
    """Each parameter of an optimizer, with its place."""
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            yield Place(number, position), parameter


class Overview:
    """The parameters of an optimizer, and what was found out about them in this step.

    It holds no parameter, except in :meth:`rounds`.

    Args:
        optimizer: the optimizer.

    Attributes:
        again: by id of a parameter that is in the groups twice, its second place.
        keys: of the noise, by id of the parameter.
        orphan: the shape of a parameter that has a state and is in no group; None if none is.
    """

    def __init__(self, optimizer: BF16Optimizer) -> None:
        self.again: dict[int, Place] = {}
        self.keys = optimizer._engine.names.keys(optimizer.param_groups)
        self._places: dict[int, Place] = {}
        for place, parameter in placed(optimizer):
            if self._places.setdefault(id(parameter), place) is not place:
                self.again.setdefault(id(parameter), place)
        self.orphan = orphan_in(optimizer.state, self._places)
        self._rounds: dict[int, Round] | None = None
        self._every_round: list[Round] = []
        self._is_tidy = False

    def knows(self, optimizer: BF16Optimizer, parameters: Sequence[Tensor]) -> bool:
        """Whether these parameters still are where they were."""
        groups = optimizer.param_groups
        for parameter in parameters:
            place = self._places.get(id(parameter))
            if place is None or place.group >= len(groups):
                return False
            # A slice, because the group may be shorter now.
            found = groups[place.group]["params"][place.position : place.position + 1]
            if not (found and found[0] is parameter):
                return False
        return True

    def in_order(self, members: Iterable[Member]) -> list[Member]:
        """Members in the order of their parameters, without those that are in no group."""
        placed = ((self._places.get(id(each.parameter)), each) for each in members)
        known = [(place, each) for place, each in placed if place is not None]
        return [each for _, each in sorted(known, key=lambda pair: pair[0])]

    def places_of(self, parameters: Sequence[Tensor]) -> list[Place]:
        """Where these parameters are, in the order of the groups; those in none are left out."""
        found = {self._places.get(id(each)) for each in parameters}
        return sorted(each for each in found if each is not None)

    def sharded(
        self,
        optimizer: BF16Optimizer,
        needs: Callable[[Rule], bool],
        parameters: Sequence[Tensor] | None = None,
    ) -> Iterator[tuple[Shard, Rule]]:
        """The sharded parameters, and their rules, of groups whose rule ``needs`` whole tensors.

        With or without a gradient: FSDP1 may leave a rank no part of a parameter, and so no
        gradient.

        Args:
            optimizer: the optimizer.
            needs: whether a rule does.
            parameters: only of these; None for all.
        """
        groups = optimizer.param_groups
        needed = [needs(optimizer.rule_of_group(group)) for group in groups]
        if not any(needed):
            return
        every = parameters is None
        for number, position in self._places.values() if every else self.places_of(parameters):
            if needed[number]:
                shard = shard_of(groups[number]["params"][position])
                if shard.sharded:
                    with prefix_errors(functools.partial(optimizer.label, number, position)):
                        shard.holders()
                    yield shard, optimizer.rule_of_parameter(groups[number], shard.parameter)

    def rounds(self, optimizer: BF16Optimizer, parameters: Sequence[Tensor] | None) -> list[Round]:
        """The exchanges between ranks for parameters whose rule computes a direction.

        Args:
            optimizer: the optimizer.
            parameters: only the exchanges of these; None for all.
        """
        if self._rounds is None:
            needed = self.sharded(optimizer, lambda rule: bool(rule.stage_states))
            self._every_round = rounds_of([*needed])
            self._rounds = {id(p): each for each in self._every_round for p, _ in each.parameters}
        if parameters is None or not self._rounds:
            return self._every_round
        found = {self._rounds.get(id(each)) for each in parameters}
        # In the order that is the same on every rank.
        return [each for each in self._every_round if each in found]

    def tidy(self, optimizer: BF16Optimizer) -> None:
        """Free what the optimizer keeps of parameters that it has no more, or nothing of."""
        if self._is_tidy:
            return
        self._is_tidy = True
        every = parameters_of(optimizer)
        # FSDP1 gives parameters without an element here no gradient: no step frees their bits.
        known = (each for each in every if not is_lazy(each))
        remainders.forget(*(shard_of(each) for each in known if not each.numel()))
        # A host may show only some groups at a time: then the others' states remain.
        optimizer._engine.keep_snapshots(chain(every, optimizer.state))


def overview_of(optimizer: BF16Optimizer, parameters: Sequence[Tensor] = ()) -> Overview:
    """The overview of this step, made anew if these parameters are elsewhere by now."""
    engine = optimizer._engine
    if engine.overview is None or not engine.overview.knows(optimizer, parameters):
        engine.overview = Overview(optimizer)
    return engine.overview
