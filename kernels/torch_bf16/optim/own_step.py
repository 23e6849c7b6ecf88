"""Optimizers without a fused rule: their own step on fp32 copies, their numbers by a recipe."""

from __future__ import annotations

import functools
import logging
import types
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from torch_bf16 import checkpoint, lost_bits
from torch_bf16.backends import Bucket, Call, Variant, capture, choose
from torch_bf16.bit_views import MASTERS
from torch_bf16.counter_rng import WEIGHT, draw16, noise, stream_base, tensor_key
from torch_bf16.flat_parameters import is_part
from torch_bf16.formats import FP32, Format
from torch_bf16.recipe import get_recipe
from torch_bf16.recoding import Changes
from torch_bf16.rules import FIRST_MOMENT, SECOND_MOMENT, STORE, Rule
from torch_bf16.sharding import is_dtensor

from .admission import Seen
from .checkpointed import Checkpointed
from .inner_step import Inner
from .next_step import check_capturable
from .optimizer import BF16Optimizer, Observer

__all__ = ["BUCKET_BYTES", "ROLES", "OwnStepOptimizer", "own_step_class"]

BUCKET_BYTES = 64 << 20
"""Memory that a step takes for fp32 copies at a time; one tensor may be larger than that."""

ROLES = {
    "exp_avg": FIRST_MOMENT,
    "exp_avg_diff": FIRST_MOMENT,
    "momentum_buffer": FIRST_MOMENT,
    "exp_avg_sq": SECOND_MOMENT,
    "exp_avg_var": SECOND_MOMENT,
    "exp_inf": SECOND_MOMENT,
    "square_avg": SECOND_MOMENT,
}
"""States whose meaning is known by their name; any other is kept in fp32."""

_COUNTER = "noise_step"

_logger = logging.getLogger("torch_bf16")


@dataclass
class _Member:
    parameter: Tensor
    group: int
    name: str
    state: dict[str, Any]
    seen: Seen

    def version(self) -> int:
        return self.parameter._version

    @property
    def step(self) -> int:
        return self.state[_COUNTER]


class OwnStepOptimizer(BF16Optimizer):
    """Base of what :func:`convert` makes of a class that has no fused rule.

    A step decodes some parameters, gradients and states to fp32, runs the class's own ``step`` on
    them, and encodes weights and known states by the recipe, some tensors at a time. What it keeps
    beside tensors shaped like the parameter stays as it is.

    Attributes:
        roles: which of the recipe's formats a state takes, by its name.
        bucket_bytes: bounds the fp32 copies that exist at a time.
    """

    roles: dict[str, str]
    bucket_bytes: int = BUCKET_BYTES
    _couples: bool
    _halves: frozenset[str]

    def rule_of(self, group: Mapping[str, Any]) -> Rule:
        """The rule that kernels run here: it stores what the class's own step computed."""
        return STORE

    @torch.no_grad()
    def _update(
        self,
        parameters: list[Tensor],
        plan: Any,
        setting: Any,
        call: Call,
        observers: Sequence[Observer] = (),
    ) -> Any:
        """Take the step of some parameters. There is no plan to keep."""
        if capture.capturing():
            check_capturable(self, True, "its own step runs on copies that are made every time")
        members = self._take_part(parameters)
        written = [each for each in members if each.seen.version != each.version()]
        self._respect_writes(cast("Any", written))
        if call.found_inf is not None and float(call.found_inf) != 0:
            return None
        for observer in observers:
            observer.before_update(cast("Any", members), call.multiplier)
        options: dict[int, dict[str, Any]] = {}
        attributes: dict[str, Any] = {}
        scale = float(call.multiplier)
        for bucket in self._buckets(members):
            inner = self._run(bucket, scale)
            # Each bucket starts from the options and attributes of before the step.
            options.update(inner.options())
            attributes.update(inner.changed_attributes())
        for number, its in options.items():
            self.param_groups[number].update(its)
        vars(self).update(attributes)
        for observer in observers:
            observer.after_update()
        return None

    def _take_part(self, parameters: Sequence[Tensor]) -> list[_Member]:
        self.recipe = get_recipe(self.recipe)
        members, changes = [], Changes()
        for parameter, number, position, label in self._places(parameters):
            if is_dtensor(parameter) or is_part(parameter):
                raise NotImplementedError(
                    f"{label()} is sharded, and {self.torch_class.__name__} steps on whole tensors "
                    "here; train it with DDP, or use an optimizer of torch_bf16. Nothing was "
                    "updated"
                )
            given, group = self.state.get(parameter, {}), self.param_groups[number]
            state = self._complete(given, parameter, group, label(), changes)
            seen = self._seen.setdefault(parameter, Seen.of(parameter))
            members.append(_Member(parameter, number, self._name(number, position), state, seen))
        if changes.lost:
            _logger.warning("the state went into recipe %r: %s", self.recipe.name, changes)
        for each in members:
            self.state[each.parameter] = each.state
            lost_bits.forget(each.parameter)
        return members

    def _buckets(self, members: Sequence[_Member]) -> Iterator[list[_Member]]:
        """Some at a time, so that their fp32 copies fit in ``bucket_bytes``."""
        bucket, size = [], 0
        for each in members:
            # Weight, gradient, and two states where the first step has not made them yet.
            arrays = 2 + max(2, sum(_like(v, each.parameter) for v in each.state.values()))
            more = 4 * arrays * each.parameter.numel()
            if bucket and size + more > self.bucket_bytes and not self._couples:
                yield bucket
                bucket, size = [], 0
            bucket.append(each)
            size += more
        if bucket:
            yield bucket

    def _run(self, bucket: Sequence[_Member], scale: float) -> Inner:
        stand_ins = [self._stand_in(each, scale) for each in bucket]
        states = [self._decoded(each) for each in bucket]
        groups = [each.group for each in bucket]
        inner = Inner(self, self.torch_class, list(zip(groups, stand_ins, states, strict=True)))
        inner.step()
        store = _Store(self.recipe.seed, self.backend)
        for each, stand_in in zip(bucket, stand_ins, strict=True):
            each.state[_COUNTER] += 1
            self._encode(each, stand_in.detach(), inner.state_of(stand_in), store)
        store.run()
        for each in bucket:
            # The kernels write through addresses, which autograd does not see.
            torch.autograd.graph.increment_version(each.parameter)
            each.seen.version = each.version()
        return inner

    def _stand_in(self, each: _Member, scale: float) -> nn.Parameter:
        parameter: Any = each.parameter
        format_ = self.recipe.format_of("weights", parameter)
        planes = [parameter.detach(), *(each.state[k] for k in format_.plane_names("")[1:])]
        stand_in = nn.Parameter(format_.decode(planes).clone())
        # A copy, because steps may use the gradient's memory for what they compute.
        stand_in.grad = parameter.grad.detach().to(torch.float32, copy=True).mul_(scale)
        return stand_in

    def _decoded(self, each: _Member) -> dict[str, Any]:
        decoded, planes = {}, {_COUNTER, *MASTERS}
        for key, value in each.state.items():
            if key in planes:
                continue
            format_ = self._format_of(key, value, each.parameter)
            if format_ is None:
                decoded[key] = value
                continue
            keys = format_.plane_names(key)
            planes.update(keys)
            decoded[key] = format_.decode([each.state[k] for k in keys])
        return decoded

    def _encode(
        self, each: _Member, weight: Tensor, state: Mapping[str, Any], store: _Store
    ) -> None:
        format_ = self.recipe.format_of("weights", each.parameter)
        masters = {key: each.state[key] for key in format_.plane_names("")[1:]}
        planes = [each.parameter.detach(), *masters.values()]
        store.add(format_, planes, weight, each.name, each.step)
        kept: dict[str, Any] = {}
        for key, value in state.items():
            format_ = self._format_of(key, value, each.parameter)
            if format_ is None or format_ is FP32:
                kept[key] = value
                continue
            for name, plane in zip(format_.plane_names(key), format_.planes, strict=True):
                old = each.state.get(name)
                made = (plane.shape(value.shape), plane.dtype, value.device)
                kept[name] = _empty(*made) if old is None else old
            planes = [kept[name] for name in format_.plane_names(key)]
            store.add(format_, planes, value, f"{each.name}/{key}", each.step)
        each.state = {**kept, _COUNTER: each.step, **masters}
        self.state[each.parameter] = each.state

    def _format_of(self, key: str, value: Any, parameter: Tensor) -> Format | None:
        role = self.roles.get(key)
        if role is None or key in self._halves or not _like(value, parameter):
            return None
        return self.recipe.format_of(role, parameter)

    def _complete(self, state, parameter, group, label, changes) -> dict[str, Any]:
        complete: dict[str, Any] = {}
        planes = {_COUNTER, *MASTERS}
        for key, value in state.items():
            if key in planes:
                continue
            format_ = self._format_of(key, value, parameter)
            if format_ is None:
                moved = isinstance(value, Tensor) and key != "step"
                complete[key] = self._moved(key, value, parameter) if moved else value
                continue
            made = checkpoint.complete_moment(state, key, format_, parameter, label, changes)
            complete.update(zip(format_.plane_names(key), made, strict=True))
            planes.update(format_.plane_names(key))
        complete[_COUNTER] = int(state.get(_COUNTER, state.get("step", 0)) or 0)
        masters = checkpoint.complete_master(state, parameter, self.recipe, label, changes)
        return complete | masters

    def _check_options(self, group: Mapping[str, Any], number: int) -> None:
        """Nothing to refuse: the class's own step reads its options."""

    def _moved(self, key: str, value: Tensor, parameter: Tensor) -> Tensor:
        """On the parameter's device and, where it was made like a bf16 parameter, in fp32."""
        like_parameter = value.dtype in (torch.bfloat16, torch.float16) and key not in self._halves
        return value.to(parameter.device, torch.float32 if like_parameter else value.dtype)

    def __getstate__(self) -> dict[str, Any]:
        left = {
            "step",
            "observers",
            "_plan",
            "_seen",
            "_next",
            "_accumulation",
            "_release",
            "_captured",
            "_whole",
        }
        own = {k: v for k, v in vars(self).items() if k not in left and not k.endswith("_hooks")}
        return own | super().__getstate__()

    def __reduce__(self) -> tuple[Any, ...]:
        # The class is made at run time, and found again by the one it wraps.
        return _restore, (self.torch_class,), self.__getstate__()


class _Store:
    """fp32 numbers on their way into planes, encoded in as few kernel calls as can be."""

    def __init__(self, seed: int, backend: str | None) -> None:
        self._seed, self._backend = seed, backend
        self._numbers: dict[Any, list[Any]] = defaultdict(list)

    def add(self, format_: Format, planes: Any, x: Tensor, key: str, step: int) -> None:
        if format_.block > 1:
            # Kernels know blocks of a rule's states, not of what is in a weight's place.
            bits = noise(self._seed, step, tensor_key(key), WEIGHT.stream, 0, x.numel(), x.device)
            r = draw16(bits, WEIGHT).view(x.shape) if format_.stochastic else None
            format_.encode(x.float().contiguous(), r, planes)
            return
        base = stream_base(self._seed, tensor_key(key), WEIGHT.stream)
        self._numbers[format_, x.device].append((planes, x, base, step))

    def run(self) -> None:
        for (format_, device), numbers in self._numbers.items():
            planes = [tuple(p.contiguous() for p in its) for its, _, _, _ in numbers]
            numels = np.array([x.numel() for _, x, _, _ in numbers], np.int64)
            bucket = Bucket(
                variant=Variant(STORE, format_, (), torch.float32, device),
                planes=[[its] for its in planes],
                numels=numels,
                offsets=np.zeros(len(numbers), np.int64),
                widths=np.maximum(numels, 1),
                pitches=np.maximum(numels, 1),
                bases=np.array([[base] for _, _, base, _ in numbers], np.uint32),
                gradients=[x.float().contiguous() for _, x, _, _ in numbers],
                steps=np.array([step for _, _, _, step in numbers], np.int64),
                rows=np.zeros(len(numbers), np.int64),
                scalars=np.ones((1, 1), np.float32),
            )
            choose(device, self._backend).run(bucket)
            for (its, _, _, _), written in zip(numbers, planes, strict=True):
                for plane, new in zip(its, written, strict=True):
                    if plane.data_ptr() != new.data_ptr():
                        plane.copy_(new)


def _empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def _like(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape and value.ndim > 0


@functools.cache
def own_step_class(kind: type[torch.optim.Optimizer]) -> type[OwnStepOptimizer]:
    """The class of converted optimizers of a class: a subclass of both."""
    names: dict[str, Any] = {
        "torch_class": kind,
        "__module__": kind.__module__,
        "__doc__": kind.__doc__,
    }
    root: type = kind
    while root.__base__ is not None and root.__base__.__dictoffset__:
        root = root.__base__
    ours: type = OwnStepOptimizer
    if root is not torch.optim.Optimizer and root.__base__ is not None:
        # An object changes its class only if both get their __dict__ over the same base: ABC, say.
        # That base in front puts our methods behind the class's own, so they stand in the class.
        ours = types.new_class(ours.__name__, (root.__base__, ours))
        methods = {
            name: each
            for base in (Checkpointed, BF16Optimizer, OwnStepOptimizer)
            for name, each in vars(base).items()
            if name not in ("__dict__", "__weakref__", "__annotations__", "__abstractmethods__")
        }
        names = methods | names
    return types.new_class(kind.__name__, (ours, kind), exec_body=lambda body: body.update(names))


def _restore(kind: type[torch.optim.Optimizer]) -> OwnStepOptimizer:
    return object.__new__(own_step_class(kind))
