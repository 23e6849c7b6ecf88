"""The plan of a step: made once, reused while the same tensors take part.

Parameters are grouped into buckets that one kernel call updates: by device, rule, formats and
gradient dtype. Parameter groups do not separate them; each group's hyperparameters are a row of a
small table.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from operator import attrgetter, is_, ne
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_bf16.backends import Bucket, StepInputs, Variant, choose
from torch_bf16.numerics.counter_rng import stream_base, tensor_key
from torch_bf16.recipe import Recipe
from torch_bf16.rules import Rule
from torch_bf16.sharding.dtensor import (
    Span,
    check_whole_blocks,
    is_dtensor,
    local,
    local_gradient,
)
from torch_bf16.states.views import REMAINDERS

from .guard import Guard, no_torch_function

__all__ = ["Member", "Plan"]

_VERSION, _SEEN_VERSION = attrgetter("_version"), attrgetter("seen.version")


@dataclass(slots=True)
class Member:
    """A parameter that takes part in a step, and what its tensors were when that was planned.

    Attributes:
        parameter: bf16 or fp32, with a gradient that is bf16 or fp32 and shaped like it.
        group: number of its parameter group.
        rule: the group's rule.
        state: ``optimizer.state[parameter]``, complete; the plan puts its own ``step`` there.
        spans: what whole tensors its memory on this rank is made of.
        seen: what the optimizer keeps about it.
        direction: ``direction(gradient, step, call)``: what the rule takes for the gradient, fp32,
            where it looks at a whole tensor first; None where it takes the gradient.
    """

    parameter: Tensor
    group: int
    rule: Rule
    state: dict[str, Any]
    spans: Sequence[Span]
    seen: Any
    direction: Callable[[Tensor, int, StepInputs], Tensor] | None = None
    _names: tuple[str, ...] = field(init=False)
    _tensors: tuple[Tensor, ...] = field(init=False)
    _planned: tuple[Any, ...] = field(init=False)
    _is_dtensor: bool = field(init=False)
    _steps: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._is_dtensor = is_dtensor(self.parameter)
        if self.direction is not None:
            self._steps = int(self.state["step"])

    def count_in(self, step: Tensor) -> None:
        """Let ``step`` count this parameter's steps, and remember all tensors as they are now."""
        self.state["step"] = step
        self._names, self._tensors = zip(*self.state.items(), strict=True)
        self._planned = self._look()

    def unchanged(self, state: Mapping[str, Any]) -> bool:
        """Whether all tensors are those of the plan, in the same memory.

        Args:
            state: ``optimizer.state[parameter]`` now.
        """
        same = all(map(is_, map(state.get, self._names), self._tensors))
        return same and self._look() == self._planned

    def gradient(self) -> Tensor:
        """This rank's part of the gradient, contiguous."""
        gradient: Any = self.parameter.grad
        if self._is_dtensor:
            gradient = local_gradient(self.parameter, gradient)
        # A lazily negated view is contiguous, too, and its memory has the other sign.
        plain = gradient.is_contiguous() and not gradient.is_neg()
        return gradient if plain else gradient.resolve_neg().contiguous()

    def is_contiguous(self) -> bool:
        """Whether this rank's part is."""
        return local(self.parameter).is_contiguous()

    def preprocess(self, call: StepInputs) -> Tensor:
        """The direction that the rule takes for the gradient in this step."""
        gradient = self.gradient()
        # A device that skips the step reads this on its own; the momentum must not change then.
        skipped = call.found_inf is not None and float(call.found_inf) != 0.0
        if self.direction is None or skipped:
            return gradient.float()
        self._steps += 1
        return self.direction(gradient, self._steps, call).contiguous()

    def _look(self) -> tuple[Any, ...]:
        # No parameter.device, which takes as long as all the rest: no two share an address.
        parameter: Any = self.parameter
        gradient = parameter.grad
        if self._is_dtensor and is_dtensor(gradient):
            # The shards, whose attributes take half the time; the whole shape follows from them.
            return (
                parameter.placements,
                gradient.placements,
                *_look_at(parameter._local_tensor, gradient._local_tensor),
                tuple(map(Tensor.data_ptr, map(local, self._tensors))),
            )
        return (
            *_look_at(parameter, gradient),
            # `state["exp_avg"].data = ...` keeps the tensor and frees the memory that kernels know.
            tuple(map(Tensor.data_ptr, self._tensors)),
        )


def _look_at(parameter: Tensor, gradient: Tensor) -> tuple[Any, ...]:
    return (
        parameter.data_ptr(),
        parameter.dtype,
        parameter.shape,
        parameter.is_contiguous() or parameter.stride(),
        gradient.dtype,
        gradient.shape,
        gradient.layout,
        gradient.get_device(),
    )


class Plan:
    """Buckets and tables for the parameters that take part in a step.

    Args:
        members: in a fixed order.
        recipe: decides formats and seed.
        backend: name of the backend, None for the best that works on each device.
        setting: whatever else the members follow from; :meth:`fits` compares it.
    """

    def __init__(
        self, members: Sequence[Member], recipe: Recipe, backend: str | None, setting: Any
    ) -> None:
        self.members = members
        self._setting = setting
        # Made at the second step: by then the states are where the optimizer keeps them.
        self._guard: Guard | None = None
        self._parameters: list[Any] = [each.parameter for each in members]
        self._sharded = [*map(is_dtensor, self._parameters)]
        alike: dict[Any, list[_Row]] = defaultdict(list)
        for each in members:
            # A strided parameter goes through a contiguous copy. On its own, so that no more than
            # one such copy exists at a time.
            # The same goes for a direction of a whole tensor, as large as the gradient.
            plain = each.is_contiguous() and each.direction is None
            alone = None if plain else id(each)
            for row in (_Row(each, short) for span in each.spans for short in span.short()):
                alike[_variant(row, recipe), alone].append(row)
        self._parts = [
            _Part(
                choose(variant.device, backend),
                _bucket(variant, some, recipe.seed),
                some,
                copied=not some[0].member.is_contiguous(),
            )
            for (variant, alone), some in alike.items()
        ]
        numbers = {id(each): number for number, each in enumerate(members)}
        for part in self._parts:
            if all(row.is_all_here() for row in part.rows):
                part.numbers = [numbers[id(row.member)] for row in part.rows]
        self._scalars = [_scalars(parts) for parts in _together(self._parts)]

    def fits(
        self, setting: Any, parameters: Sequence[Tensor], states: Mapping[Tensor, Mapping[str, Any]]
    ) -> bool:
        """Whether the plan was made for these very tensors: then there is nothing to check.

        Args:
            setting: as it was given to the constructor, now.
            parameters: those with a gradient, in the members' order.
            states: ``optimizer.state``.
        """
        if setting != self._setting or len(parameters) != len(self.members):
            return False
        if self._guard is not None and self._guard.unchanged(parameters, states):
            return True
        fits = all(
            each.parameter is parameter and each.unchanged(states.get(parameter, {}))
            for each, parameter in zip(self.members, parameters, strict=True)
        )
        if fits and all(each.is_contiguous() for each in self.members):
            self._guard = Guard.over(parameters, states)
        return fits

    def written(self) -> list[Member]:
        """The members whose parameter something else has written since :meth:`note_versions`."""
        versions = self._versions()
        return [*compress(self.members, map(ne, map(_SEEN_VERSION, self.members), versions))]

    def note_versions(self) -> None:
        """Remember what the last step made of the parameters."""
        for each, version in zip(self.members, self._versions(), strict=True):
            each.seen.version = version

    def _versions(self) -> list[int]:
        with no_torch_function():
            if not any(self._sharded):
                return [*map(_VERSION, self._parameters)]
            return [
                each._version + each._local_tensor._version if sharded else each._version
                for each, sharded in zip(self._parameters, self._sharded, strict=True)
            ]

    def obstacle_to_capture(self) -> str | None:
        """Why a CUDA graph cannot record a step of this plan, or None where it can."""
        for part in self._parts:
            if not part.backend.CAPTURABLE:
                name = part.backend.__name__.rsplit(".", 1)[-1]
                return (
                    f"the {name} backend reads step numbers and learning rates on the host, and "
                    "replays would repeat this one's; set optimizer.backend = 'triton' before the "
                    "first step"
                )
            if part.rows[0].member.direction is not None:
                return "Muon and Adafactor count their steps on the host; take ordinary steps"
            if part.copied:
                return (
                    f"a parameter of shape {tuple(part.rows[0].member.parameter.shape)} is not "
                    "contiguous, and its step goes through a copy; make it contiguous"
                )
        for each in self.written():
            if not REMAINDERS.isdisjoint(each.state):
                return (
                    f"a weight of shape {tuple(each.parameter.shape)} was written since the last "
                    "step, and replays would forget the lower half of its master each time; take "
                    "an ordinary step first"
                )
        return None

    def run(self, groups: Sequence[Mapping[str, Any]], call: StepInputs) -> None:
        """Take the step: update parameters and states in place, and count it in ``state["step"]``.

        Args:
            groups: the optimizer's parameter groups; only hyperparameters are read.
            call: what this step was told.

        Raises:
            ValueError: no step follows from a group's options; nothing has been updated.
        """
        gradients = None if self._guard is None else self._guard.gradients()
        # All scalars first: a bad hyperparameter must raise before anything is updated.
        for scalars in self._scalars:
            scalars.set(groups, call)
        if any(scalars.skipped for scalars in self._scalars):
            return
        for part in self._parts:
            part.run(call, gradients)
        for scalars in self._scalars:
            scalars.count()


@dataclass(slots=True)
class _Row:
    """A tensor of a bucket: one span of a member."""

    member: Member
    span: Span

    def is_all_here(self) -> bool:
        """Whether it is all that this rank holds of its member."""
        return self.span.numel == local(self.member.parameter).numel()

    def of(self, memory: Tensor, block: int = 1) -> Tensor:
        """The span's elements of one of the member's tensors on this rank.

        ``block`` numbers share an element of it.
        """
        start, numel = self.span.start // block, self.span.numel // block
        return memory if memory.numel() == numel else memory.view(-1)[start : start + numel]

    def gradient(self) -> Tensor:
        """The span's elements of the gradient, contiguous."""
        return self.of(self.member.gradient())

    def like(self) -> Tensor:
        """What formats follow from: the parameter, or a stand-in for the one it was made of."""
        parameter = self.member.parameter
        if self.span.shape == tuple(parameter.shape):
            return parameter
        return torch.empty(self.span.shape, dtype=parameter.dtype, device="meta")


@dataclass
class _Part:
    backend: ModuleType
    bucket: Bucket
    rows: list[_Row]
    copied: bool
    # Of the members in the plan, where each row is all that is here of one.
    numbers: list[int] | None = None

    def run(self, call: StepInputs, gradients: Sequence[Tensor] | None) -> None:
        """Update the rows; ``gradients`` are the members', if they can be read as they are."""
        if self.rows[0].member.direction is not None:
            self.bucket.gradients = [row.of(row.member.preprocess(call)) for row in self.rows]
        elif gradients is not None and self.numbers is not None:
            self.bucket.gradients = [gradients[number] for number in self.numbers]
        else:
            self.bucket.gradients = [row.gradient() for row in self.rows]
        self._update()
        self.bucket.gradients = ()

    def _update(self) -> None:
        if not self.copied:
            self.backend.run(self.bucket)
            return
        ((weights, *states),) = self.bucket.planes
        copy = weights[0].contiguous()
        self.backend.run(replace(self.bucket, planes=[[(copy, *weights[1:]), *states]]))
        weights[0].copy_(copy)


def _together(parts: Sequence[_Part]) -> list[list[_Part]]:
    """The parts that share a rule on a device: one call computes the scalars of all of them."""
    alike: dict[Any, list[_Part]] = defaultdict(list)
    for each in parts:
        variant = each.bucket.variant
        alike[each.backend.__name__, variant.rule, variant.device].append(each)
    return list(alike.values())


def _scalars(parts: Sequence[_Part]) -> Any:
    """The backend's scalars for parts that share a rule, and whatever counts their steps now."""
    members = [row.member for part in parts for row in part.rows]
    scalars = parts[0].backend.scalars(
        parts[0].bucket.variant.rule,
        [part.bucket for part in parts],
        [each.group for each in members],
        [each.state["step"] for each in members],
    )
    for each, step in zip(members, scalars.steps, strict=True):
        each.count_in(step)
    return scalars


def _variant(row: _Row, recipe: Recipe) -> Variant:
    each, like = row.member, row.like()
    gradient: Any = each.parameter.grad
    states = tuple(recipe.format_of(s.role, like) for s in each.rule.states)
    for stored in states:
        check_whole_blocks(row.span, stored.block)
    return Variant(
        rule=each.rule,
        weights=recipe.format_of("weights", like),
        states=states,
        gradient=gradient.dtype if each.direction is None else torch.float32,
        device=each.parameter.device,
        strided=row.span.strided,
    )


def _bucket(variant: Variant, rows: Sequence[_Row], seed: int) -> Bucket:
    spans = [row.span for row in rows]
    keys = [tensor_key(span.name) for span in spans]
    bases = [[stream_base(seed, key, draw.stream) for draw in variant.draws] for key in keys]
    return Bucket(
        variant=variant,
        planes=[_planes(row, variant) for row in rows],
        numels=np.array([span.numel for span in spans], np.int64),
        offsets=np.array([span.offset for span in spans], np.int64),
        widths=np.array([span.width for span in spans], np.int64),
        pitches=np.array([span.pitch for span in spans], np.int64),
        bases=np.array(bases, np.uint32),
    )


def _planes(row: _Row, variant: Variant) -> list[tuple[Tensor, ...]]:
    each = row.member
    tensors = {**each.state, "": each.parameter.detach()}
    names = ("", *(state.name for state in variant.rule.states))
    return [
        tuple(
            row.of(local(tensors[key]), plane.block)
            for key, plane in zip(stored.plane_names(name), stored.planes, strict=True)
        )
        for name, stored in zip(names, variant.formats, strict=True)
    ]
