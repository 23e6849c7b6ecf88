"""Optimizers without a fused rule: their own step on fp32 copies, their numbers by a recipe."""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from torch_bf16.backends import StepInputs, cuda_graphs
from torch_bf16.engine.pending import check_capturable
from torch_bf16.formats import Format
from torch_bf16.model import residuals
from torch_bf16.optim.optimizer import BF16Optimizer, Observer
from torch_bf16.optim.state_dict import Checkpointed
from torch_bf16.optim.validation import Snapshot
from torch_bf16.recipe import get_recipe
from torch_bf16.rules import FIRST_MOMENT, SECOND_MOMENT, STORE, Rule
from torch_bf16.sharding.dtensor import (
    check_blocks,
    cut_over,
    is_dtensor,
    local,
    place_like,
)
from torch_bf16.sharding.fsdp1 import is_part
from torch_bf16.states import schema
from torch_bf16.states.placement import local_state, placed_states
from torch_bf16.states.recoding import Changes
from torch_bf16.states.views import MASTERS

from .capabilities import steps_on_pieces
from .runner import Runner
from .working_copy import COUNTER, Store, WorkingCopy, is_like

__all__ = ["BUCKET_BYTES", "ROLES", "ForeignOptimizer", "foreign_class"]

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

_logger = logging.getLogger("torch_bf16")


class ForeignOptimizer(BF16Optimizer):
    """Base of what :func:`convert` makes of a class that has no fused rule.

    A step decodes some parameters, gradients and states to fp32, runs the class's own ``step`` on
    them, and encodes weights and known states by the recipe, some tensors at a time. What it keeps
    beside tensors shaped like the parameter stays as it is.

    Of sharded parameters it steps on this rank's parts, where trying it on pieces of made-up
    tensors gave the bits of the whole ones. Otherwise every rank gathers some whole tensors at a
    time, takes their step, and keeps its parts.

    Attributes:
        roles: which of the recipe's formats a state takes, by its name.
        bucket_bytes: bounds the fp32 copies that exist at a time.
    """

    roles: dict[str, str]
    bucket_bytes: int = BUCKET_BYTES
    _couples: bool
    _halves: frozenset[str]
    _pieces: dict[Any, bool]

    def rule_of(self, group: Mapping[str, Any]) -> Rule:
        """The rule that kernels run here: it stores what the class's own step computed."""
        return STORE

    @torch.no_grad()
    def _update(
        self,
        parameters: list[Tensor],
        plan: Any,
        setting: Any,
        call: StepInputs,
        observers: Sequence[Observer] = (),
    ) -> Any:
        """Take the step of some parameters. There is no plan to keep."""
        if cuda_graphs.capturing():
            check_capturable(self, True, "its own step runs on copies that are made every time")
        members = self._take_part(parameters)
        written = [each for each in members if each.seen.version != each.version()]
        self._invalidate_remainders(cast("Any", written))
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

    def _take_part(self, parameters: Sequence[Tensor]) -> list[WorkingCopy]:
        self.recipe = get_recipe(self.recipe)
        members, changes = [], Changes()
        for parameter, number, position, label in self._collect(parameters):
            whole = self._needs_whole(parameter, number, label)
            given, group = self.state.get(parameter, {}), self.param_groups[number]
            state = self._complete(given, parameter, group, label(), changes)
            seen = self._seen.get(parameter) or Snapshot.of(parameter)
            name = self._name(number, position)
            weights = self.recipe.format_of("weights", parameter)
            formats = functools.partial(self._format_of, parameter=parameter)
            member = WorkingCopy(parameter, number, name, state, seen, weights, formats, whole)
            members.append(member)
        if changes.lost:
            _logger.warning("the state went into recipe %r: %s", self.recipe.name, changes)
        self._point_out_gathering(members)
        for each in members:
            self.state[each.parameter] = each.state
            self._seen[each.parameter] = each.seen
            residuals.forget(each.parameter)
        residuals.forget_absent(p for group in self.param_groups for p in group["params"])
        return members

    def _needs_whole(self, parameter: Tensor, number: int, label: Callable[[], str]) -> bool:
        """Whether the step must see the whole of a parameter that ranks hold parts of."""
        part = is_part(parameter)
        if not part and not is_dtensor(parameter):
            return False
        dims = None
        if not part:
            placements: Any = parameter.placements  # pyright: ignore[reportAttributeAccessIssue]
            dims = tuple(sorted({placements[dim].dim for dim in cut_over(parameter)[1]}))
            for role in set(self.roles.values()):
                if (block := self.recipe.format_of(role, parameter).block) > 1:
                    check_blocks(parameter, block)
        key = (number, 1 if part else parameter.ndim, dims)
        if key not in self._pieces:
            self._pieces[key] = dims == () or steps_on_pieces(self, self.torch_class, *key)
        whole = self._couples or not self._pieces[key]
        if whole and part:
            why = "couples all parameters" if self._couples else "looks at whole tensors"
            raise NotImplementedError(
                f"{label()} is sharded by FSDP1, and the step of {self.torch_class.__name__} "
                f"{why}. Shard with torch.distributed.fsdp.fully_shard (FSDP2), whose tensors are "
                "gathered for it, or train with DDP. Nothing was updated"
            )
        return whole

    def _point_out_gathering(self, members: Sequence[WorkingCopy]) -> None:
        gathered = [each for each in members if each.whole]
        if not gathered or any(each.step for each in members):
            return
        sizes = [each.bytes for each in gathered]
        at_once = sum(sizes) if self._couples else max(*sizes, min(sum(sizes), self.bucket_bytes))
        _logger.warning(
            "%s %s: every rank gathers them for its step, %.2f GB of fp32 copies at a time",
            self.torch_class.__name__,
            "couples its parameters" if self._couples else "looks at whole tensors",
            at_once / 1e9,
        )

    def _buckets(self, members: Sequence[WorkingCopy]) -> Iterator[list[WorkingCopy]]:
        """Some at a time, so that their fp32 copies fit in ``bucket_bytes``."""
        bucket, size = [], 0
        for each in members:
            more = each.bytes
            if bucket and size + more > self.bucket_bytes and not self._couples:
                yield bucket
                bucket, size = [], 0
            bucket.append(each)
            size += more
        if bucket:
            yield bucket

    def _run(self, bucket: Sequence[WorkingCopy], scale: float) -> Runner:
        stand_ins = [each.make(scale) for each in bucket]
        states = [each.decoded() for each in bucket]
        groups = [each.group for each in bucket]
        inner = Runner(self, self.torch_class, list(zip(groups, stand_ins, states, strict=True)))
        inner.step()
        store = Store(self.recipe.seed, self.backend)
        for each, stand_in in zip(bucket, stand_ins, strict=True):
            each.encode(stand_in.detach(), inner.state_of(stand_in), store)
            self.state[each.parameter] = each.state
        store.run()
        for each in bucket:
            # The kernels write through addresses, which autograd does not see.
            torch.autograd.graph.increment_version(each.parameter)
            each.seen.version = each.version()
        return inner

    def _format_of(self, key: str, parameter: Tensor) -> Format | None:
        role = self.roles.get(key)
        if role is None or key in self._halves:
            return None
        return self.recipe.format_of(role, parameter)

    def _complete(self, state, parameter, group, label, changes) -> dict[str, Any]:
        complete: dict[str, Any] = {}
        memory, planes = local(parameter), {COUNTER, *MASTERS}
        if not is_dtensor(parameter):
            state = {k: local_state(k, v, parameter, label) for k, v in state.items()}
        mine = {
            key: local_state(key, each, parameter, label) if is_like(each, parameter) else each
            for key, each in state.items()
        }
        for key, value in state.items():
            if key in planes:
                continue
            like = is_like(value, parameter)
            format_ = self._format_of(key, parameter) if like else None
            if format_ is not None:
                keys = format_.plane_names(key)
                if is_dtensor(parameter):
                    rest = {k: state[k] for k in keys[1:] if k in state}
                    mine |= {k: local_state(k, v, parameter, label) for k, v in rest.items()}
                made = schema.complete_moment(mine, key, format_, memory, label, changes)
                complete |= placed_states(dict(zip(keys, made, strict=True)), state, parameter)
                planes.update(keys)
            elif like:
                moved = self._moved(key, mine[key], parameter)
                same = is_dtensor(value) and local(value) is moved
                complete[key] = value if same else place_like(parameter, moved)
            else:
                # Of another shape than the parameter it is the same on every rank.
                value = value.full_tensor() if is_dtensor(value) else value
                moves = isinstance(value, Tensor) and key != "step"
                complete[key] = self._moved(key, value, parameter) if moves else value
        complete[COUNTER] = int(state.get(COUNTER, state.get("step", 0)) or 0)
        masters = {k: each for k, each in state.items() if k in MASTERS}
        if is_dtensor(parameter):
            masters = {k: local_state(k, v, parameter, label) for k, v in masters.items()}
        made = schema.complete_master(masters, parameter, self.recipe, label, changes)
        return complete | placed_states(made, state, parameter)

    def _invalidate(self) -> None:
        super()._invalidate()
        self._pieces = {}

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
            "_pieces",
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


@functools.cache
def foreign_class(kind: type[torch.optim.Optimizer]) -> type[ForeignOptimizer]:
    """The class of converted optimizers of a class: a subclass of both."""
    names: dict[str, Any] = {
        "torch_class": kind,
        "__module__": kind.__module__,
        "__doc__": kind.__doc__,
    }
    root: type = kind
    while root.__base__ is not None and root.__base__.__dictoffset__:
        root = root.__base__
    ours: type = ForeignOptimizer
    if root is not torch.optim.Optimizer and root.__base__ is not None:
        # An object changes its class only if both get their __dict__ over the same base: ABC, say.
        # That base in front puts our methods behind the class's own, so they stand in the class.
        ours = types.new_class(ours.__name__, (root.__base__, ours))
        methods = {
            name: each
            for base in (Checkpointed, BF16Optimizer, ForeignOptimizer)
            for name, each in vars(base).items()
            if name not in ("__dict__", "__weakref__", "__annotations__", "__abstractmethods__")
        }
        names = methods | names
    return types.new_class(kind.__name__, (ours, kind), exec_body=lambda body: body.update(names))


def _restore(kind: type[torch.optim.Optimizer]) -> ForeignOptimizer:
    return object.__new__(foreign_class(kind))
