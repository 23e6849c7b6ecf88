"""Optimizers without a fused rule: their own step on fp32 copies, stored by a recipe."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_bf16.backends import StepInputs, cuda_graphs
from torch_bf16.engine.encoder import Encoder
from torch_bf16.engine.engine import Engine
from torch_bf16.engine.names import ParameterNames
from torch_bf16.engine.pending import check_capturable
from torch_bf16.errors import UNTOUCHED, Label, prefix_errors, suffix_errors
from torch_bf16.formats import Format
from torch_bf16.optim.optimizer import BF16Optimizer
from torch_bf16.optim.overwritten import drop_remainders, snapshot_of
from torch_bf16.optim.planning import collect, keep_states, with_gradients
from torch_bf16.optim.replaced import check_in_model
from torch_bf16.parameters import parameters_of
from torch_bf16.recipe import get_recipe
from torch_bf16.rules import FIRST_MOMENT, SECOND_MOMENT, STORE, Rule
from torch_bf16.sharding import Shard, reshard, whole
from torch_bf16.states import schema
from torch_bf16.states.completion import complete_master, complete_moment, place_states
from torch_bf16.states.home import Home
from torch_bf16.states.recoding import Changes, stored_format
from torch_bf16.states.views import COUNTER, MASTERS, MOMENTS

from .capabilities import Traits, is_elementwise, rewrites_weights
from .idle_parameters import idle_parameters
from .own_step import NARROW, OwnStep, why_whole
from .working_copy import WorkingCopy, is_like

__all__ = ["BUCKET_BYTES", "ROLE_OF_STATE", "ForeignEngine", "ForeignOptimizer", "foreign_class"]

BUCKET_BYTES = 64 << 20
"""Bytes of fp32 copies that a step holds at a time; a single tensor may be larger than that."""

ROLE_OF_STATE = {
    "exp_avg": FIRST_MOMENT,
    "exp_avg_diff": FIRST_MOMENT,
    "momentum_buffer": FIRST_MOMENT,
    "exp_avg_sq": SECOND_MOMENT,
    "exp_avg_var": SECOND_MOMENT,
    "exp_inf": SECOND_MOMENT,
    "square_avg": SECOND_MOMENT,
}
"""States whose meaning is known by their name, if they are floating-point numbers.

Any other state is kept as its class makes it, in fp32 or as codes of its own.
"""

# Methods that a class may extend, in front of torch's or ours.
_EXTENDED = ("state_dict", "load_state_dict", "add_param_group", "zero_grad")


class ForeignEngine(Engine):
    """The engine of a converted optimizer without a fused rule.

    Attributes:
        traits: what is known about the class's own step; copies of the optimizer keep it.
        encoder: encodes the results of that step.
        evaluated: what the closure of the present step returned, in a tuple; None if it has none.
    """

    traits: Traits
    evaluated: tuple[Any] | None = None

    def __init__(self, names: ParameterNames | None = None) -> None:
        super().__init__(names)
        self.encoder = Encoder()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "traits": self.traits}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.traits = state["traits"]


class ForeignOptimizer(BF16Optimizer):
    """Base of the classes that :func:`convert` makes of classes without a fused rule.

    A step decodes some parameters, gradients and states to fp32, runs the class's own ``step`` on
    them, and encodes weights and known states by the recipe, some tensors at a time. For sharded
    parameters, an elementwise class steps on this rank's parts; for any other class, every rank
    gathers whole tensors, takes their step, and keeps its parts.

    Attributes:
        roles: which of the recipe's formats a state takes, by the state's name.
        bucket_bytes: bound on the fp32 copies that exist at a time.
    """

    roles: dict[str, str]
    bucket_bytes: int = BUCKET_BYTES
    _engine_class = ForeignEngine
    _engine: ForeignEngine

    def rule_of_group(self, group: Mapping[str, Any]) -> Rule:
        """The rule that kernels run here: it stores the results of the class's own step."""
        return STORE

    def step(self, closure: Callable[[], Any] | None = None, **others: Any) -> Any:  # pyright: ignore
        """Take a step; the class's own step gets a closure that returns what ``closure`` did.

        So a class that would evaluate the model again in the middle of its step is refused, where
        without a closure it would leave that part out, or say that it was given none.

        Raises:
            TypeError: ``others`` were given, which the class's own step may know.
        """
        if others:
            raise TypeError(
                f"step() was given {' and '.join(others)}, and that of a converted "
                f"{self.torch_class.__name__} takes a closure only: the class's own step runs on "
                "float32 copies, some parameters at a time. Write numbers to param_groups, if the "
                "class reads them there, or train in float32"
            )
        if closure is None:
            return super().step()

        def evaluate() -> Any:
            self._engine.evaluated = (closure(),)
            return self._engine.evaluated[0]

        try:
            return super().step(evaluate)
        finally:
            self._engine.evaluated = None

    def _update(
        self, parameters: list[Tensor], plan: Any, setting: Any, inputs: StepInputs
    ) -> None:
        """Take the step of the parameters that have a gradient. There is no plan to keep.

        Those without one are among them as long as the class's own step may move them.
        """
        idle = idle_parameters(self, parameters)
        chosen = {*with_gradients(parameters), *idle}
        # In their order: a step may pair them by their places.
        parameters = [each for each in parameters if each in chosen]
        if cuda_graphs.capturing(each.device for each in parameters):
            check_capturable(self, True, "its own step runs on copies that are made every time")
        if len(parameters) == len(idle):
            check_in_model(self)
        with suffix_errors(UNTOUCHED):
            members: Any = self._working_copies(parameters, idle)
        drop_remainders(self, parameters, lambda: [each for each in members if each.written])
        if inputs.is_skipped:
            return
        for observer in self.observers:
            observer.before_update(members, inputs)
        OwnStep(self, members).take(float(inputs.multiplier))
        for observer in self.observers:
            observer.after_update()

    def state_dict(self) -> dict[str, Any]:
        """The state dict, which also names the states that the class itself keeps in bf16."""
        state_dict = super().state_dict()
        if narrow := sorted(self._engine.traits.narrow):
            state_dict[schema.HEADER][schema.NARROW] = narrow
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict; what the class kept in bf16 in the saved run stays so."""
        traits = self._engine.traits
        before, traits.narrow = traits.narrow, traits.narrow | schema.narrow_states(state_dict)
        try:
            super().load_state_dict(state_dict)
        except BaseException:
            traits.narrow = before
            raise
        self._complete_older_states()

    def _complete_older_states(self) -> None:
        """Let the class read states of its older versions, with numbers where tensors are now.

        It does so in ``__setstate__``, which torch's ``load_state_dict`` has called before the
        states were there.
        """
        if self.torch_class.__setstate__ is torch.optim.Optimizer.__setstate__:
            return
        # It looks for its own in each state, and a frozen weight's may hold a master alone.
        states, none = self.state, {COUNTER, *MASTERS}
        own = {k: v for k, v in dict.items(states) if not isinstance(v, dict) or v.keys() - none}
        numbers = (
            isinstance(each, (int, float))
            for state in own.values()
            if isinstance(state, dict)
            for key, each in state.items()
            if key != COUNTER
        )
        if not any(numbers):
            return
        try:
            self.torch_class.__setstate__(self, {"state": own, "param_groups": self.param_groups})
        except KeyError:
            pass  # States of another class: the next step says so.
        finally:
            self.state = states

    @torch.no_grad()
    def _rewrite(self, method: str) -> None:
        """Run the class's own ``train`` or ``eval``, which rewrites weights between steps."""
        parameters = parameters_of(self)
        reshard(parameters)
        members = self._working_copies([p for p in parameters if self.state.get(p)])
        drop_remainders(self, parameters, lambda: [each for each in members if each.written])
        OwnStep(self, members).rewrite(method)

    def _working_copies(
        self, parameters: Sequence[Tensor], idle: Sequence[Tensor] = ()
    ) -> list[WorkingCopy]:
        """Working copies, whose states are stored; those of idle ones only if a step moves them."""
        self.recipe = get_recipe(self.recipe)
        engine, members, changes = self._engine, [], Changes()
        engine.overview = None
        for shard, number, label in collect(self, parameters):
            with prefix_errors(label):
                gathers = self._gathers(shard, number)
            parameter, group = shard.parameter, self.param_groups[number]
            state = self._complete(self.state.get(parameter, {}), shard, group, label, changes)
            snapshot = snapshot_of(self, shard)
            weights = self.recipe.format_of("weights", shard.shape, parameter.dtype)
            formats = functools.partial(self._format_of, shard=shard)
            members.append(WorkingCopy(shard, number, state, snapshot, weights, formats, gathers))
        without_gradient = {*idle}
        keep_states(self, [m for m in members if m.parameter not in without_gradient], changes)
        return members

    def _gathers(self, shard: Shard, number: int) -> bool:
        """Whether ranks hold parts of a parameter and the step must see the whole."""
        if not shard.groups():
            return False
        for role in set(self.roles.values()):
            block = self.recipe.format_of(role, shard.shape, shard.parameter.dtype).block
            if block > 1:
                shard.check_blocks(block)
        if is_elementwise(self.torch_class, self.param_groups[number], self._engine.traits):
            return False
        if not shard.can_gather:
            raise NotImplementedError(
                f"is sharded by FSDP1, and the step of {self.torch_class.__name__} "
                f"{why_whole(self._engine.traits)}. Shard with torch.distributed.fsdp.fully_shard "
                "(FSDP2), whose tensors are gathered for it, train with DDP, or convert(..., "
                "elementwise=True) if each element is updated by its own numbers alone"
            )
        return True

    def _format_of(self, key: str, shard: Shard) -> Format | None:
        role = self.roles.get(key)
        if role is None or key in self._engine.traits.narrow:
            return None
        return self.recipe.format_of(role, shard.shape, shard.parameter.dtype)

    def _complete(
        self, state: Mapping[str, Any], shard: Shard, group: Any, label: Label, changes: Changes
    ) -> dict[str, Any]:
        complete: dict[str, Any] = {}
        local_states: dict[str, Any] = {}
        done = {COUNTER, *MASTERS}
        home = Home.of(shard, self.recipe)
        for key, value in state.items():
            if key in done:
                continue
            if not is_like(value, shard.parameter):
                # A state whose shape is not the parameter's is the same on every rank.
                moves = isinstance(value, Tensor) and key != "step"
                complete[key] = self._move(key, state, whole(value), shard) if moves else value
            elif (format_ := self._format_of(key, shard)) is None or not (
                # Codes in none of our formats are the class's own.
                value.is_floating_point() or stored_format(state, key)
            ):
                local_states[key] = self._move(key, state, shard.take(value), shard)
            else:
                known = {n for each in MOMENTS for n in each.plane_names(key)}
                saved = {k: shard.take(each) for k, each in state.items() if k in known}
                planes = complete_moment(saved, key, format_, home, label, changes)
                local_states.update(zip(format_.plane_names(key), planes, strict=True))
                done |= known
        complete[COUNTER] = int(state.get(COUNTER, state.get("step", 0)) or 0)
        masters = {k: shard.take(each) for k, each in state.items() if k in MASTERS}
        local_states |= complete_master(masters, shard, self.recipe, home, label, changes)
        return complete | place_states(local_states, state, shard)

    def _check_options(self, group: Mapping[str, Any], number: int) -> None:
        """Nothing to check: the class's own step reads its options."""

    def _move(self, key: str, state: Mapping[str, Any], value: Tensor, shard: Shard) -> Tensor:
        """Move a state to the parameter's device, and to fp32 if it only inherited its dtype."""
        # Our copies are fp32: a class that makes narrow states beside them does so by choice.
        chosen = key in self._engine.traits.narrow or (COUNTER in state and key not in self.roles)
        inherited = value.dtype in NARROW and value.dtype == shard.parameter.dtype
        widens = inherited and not chosen
        return value.to(shard.parameter.device, torch.float32 if widens else value.dtype)

    def __getstate__(self) -> dict[str, Any]:
        skipped = {"step", "observers"}
        own = {k: v for k, v in vars(self).items() if k not in skipped and not k.endswith("_hooks")}
        return own | super().__getstate__()

    def __reduce__(self) -> tuple[Any, ...]:
        # The class is made at run time; unpickling makes it again from the class it wraps.
        return _restore, (self.torch_class,), self.__getstate__()


@functools.cache
def foreign_class(kind: type[torch.optim.Optimizer]) -> type[ForeignOptimizer]:
    """The class of converted optimizers of ``kind``: a subclass of it and of ForeignOptimizer."""
    names: dict[str, Any] = {
        "torch_class": kind,
        "__module__": kind.__module__,
        "__doc__": kind.__doc__,
    }
    if rewrites_weights(kind):
        names |= {name: _rewriting(name, getattr(kind, name)) for name in ("train", "eval")}
    root: type = kind
    while root.__base__ is not None and root.__base__.__dictoffset__:
        root = root.__base__
    ours: type = ForeignOptimizer
    if root is not torch.optim.Optimizer and root.__base__ is not None:
        # An object can change its class only if both get their __dict__ from the same base, such
        # as ABC. With that base in front, our methods come after the class's own; so they are
        # copied into the new class, except where the class's own calls ours by super().
        ours = types.new_class(ours.__name__, (root.__base__, ours))
        excluded = {"__dict__", "__weakref__", "__annotations__", "__abstractmethods__"}
        excluded |= {name for name in _EXTENDED if _calls_super(getattr(kind, name))}
        methods = {
            name: each
            for base in (BF16Optimizer, ForeignOptimizer)
            for name, each in vars(base).items()
            if name not in excluded
        }
        names = methods | names
    return types.new_class(kind.__name__, (ours, kind), exec_body=lambda body: body.update(names))


def _calls_super(method: Any) -> bool:
    code = getattr(method, "__code__", None)
    return code is not None and "super" in code.co_names


def _rewriting(name: str, own: Any) -> Any:
    @functools.wraps(own)
    def method(self: ForeignOptimizer) -> None:
        self._rewrite(name)

    return method


def _restore(kind: type[torch.optim.Optimizer]) -> ForeignOptimizer:
    return object.__new__(foreign_class(kind))
