"""What all our optimizers share: the step, and what it asks of their parameters."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from torch_bf16.backends import BACKENDS, StepInputs, cuda_graphs
from torch_bf16.engine.guard import no_torch_function
from torch_bf16.engine.pending import Pending, check_capturable
from torch_bf16.engine.plan import Member, Plan
from torch_bf16.gradients.accumulation import GradientAccumulation, accumulate_as
from torch_bf16.gradients.release import GradientRelease
from torch_bf16.model import residuals
from torch_bf16.model.casting import kept
from torch_bf16.recipe import Recipe, get_recipe
from torch_bf16.sharding.dtensor import local, place_like, version_of
from torch_bf16.sharding.fsdp1 import shapes_of, spans_of
from torch_bf16.sharding.zero import whole_of_the_made
from torch_bf16.states import schema
from torch_bf16.states.recoding import Changes, stored_format
from torch_bf16.states.views import REMAINDERS, masters_in

from .state_dict import Checkpointed
from .validation import (
    Snapshot,
    check_formats,
    check_gradient,
    check_group,
    check_parameter,
    check_replaced,
    check_unchanged,
    check_whole,
)
from .weight_decay import FULLY_DECOUPLED, resolve_peak_lr

__all__ = ["BF16Optimizer", "Direction"]

Direction = Callable[[Tensor, int, StepInputs], Tensor]

_logger = logging.getLogger("torch_bf16")


class Observer(Protocol):
    """What looks on at updates, for example :class:`torch_bf16.UpdateMonitor`."""

    def before_update(self, members: Sequence[Member], scale: float | Tensor) -> None:
        """Gradients are there, states are complete, nothing is updated yet."""

    def after_update(self) -> None:
        """Everything is updated."""


class BF16Optimizer(Checkpointed):
    """Base of the optimizers that store their numbers by a recipe.

    Not made directly: use :class:`AdamW`, :class:`Adam`, :class:`SGD` or :func:`convert`. It is a
    mixin in front of a ``torch.optim`` class, whose constructor, parameter groups and hooks stay as
    they are. All tensors of a bucket are updated in one call. Gradients are read, never rewritten.

    Attributes:
        recipe: how numbers are stored.
        backend: name of the backend, or None for the best that works.
        observers: told of each update before and after it happens; copies start without them.
    """

    torch_class: ClassVar[type[torch.optim.Optimizer]]

    backend: str | None
    observers: list[Observer]
    _plan: Plan | None
    _captured: list[Plan]
    _seen: dict[Tensor, Snapshot]
    _next: Pending
    _accumulation: GradientAccumulation | None = None
    _release: GradientRelease | None = None

    def _setup(
        self,
        recipe: str | Recipe,
        backend: str | None = None,
        *,
        fully_decoupled_weight_decay: bool | float = False,
    ) -> None:
        """Set up what torch's constructor does not know; it has run already."""
        if fully_decoupled_weight_decay:
            self.defaults[FULLY_DECOUPLED] = fully_decoupled_weight_decay
        for number, group in enumerate(self.param_groups):
            if fully_decoupled_weight_decay:
                group.setdefault(FULLY_DECOUPLED, fully_decoupled_weight_decay)
            resolve_peak_lr(group, number, self.decouples_decay(group))
        self.recipe = get_recipe(recipe)
        if backend is not None and backend not in BACKENDS:
            raise ValueError(f"unknown backend {backend!r}; known backends: {', '.join(BACKENDS)}")
        self.backend = backend
        check_formats(self)
        self._names, self._whole = {}, whole_of_the_made()
        self.observers = []
        self._invalidate()
        # GradScaler leaves unscaling to the step, in its attributes grad_scale and found_inf.
        self._step_supports_amp_scaling = True
        self._captured = []
        self._accumulation = self._release = None
        accumulate_as(self.recipe, self)

    def direction_of(self, parameter: Tensor, number: int, name: str, state: Any) -> Direction:
        """What makes the direction of a parameter's step of its whole gradient.

        Asked once for a plan, where the rule has ``stage_states``.

        Args:
            parameter: dense, not sharded.
            number: of its parameter group.
            name: what keys its noise.
            state: its state, complete.
        """
        raise NotImplementedError

    def decouples_decay(self, group: dict[str, Any]) -> bool:
        """Whether a group's weight decay acts on the weights and not through the gradient."""
        return bool(group.get("decoupled_weight_decay"))

    def _invalidate(self) -> None:
        self._plan = None
        self._seen = {}
        self._next = Pending()

    # Kernels read addresses, which a traced step would not have.
    @torch._disable_dynamo  # pyright: ignore[reportPrivateImportUsage]
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore
        """Take one step for every parameter that has a gradient.

        Args:
            closure: evaluates the model again and returns the loss.

        Returns:
            What ``closure`` returned, else None.

        Raises:
            ValueError: a gradient is sparse or of another dtype than bf16 or fp32.
            StateMismatchError: a parameter was moved, recast or replaced since its state was made.
            RuntimeError: a CUDA graph is being captured whose replays would not be steps.
            In all cases nothing has been updated.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = self.param_groups
        for number, group in enumerate(groups):
            self._check_options(group, number)
        with no_torch_function():
            taking_part = [p for group in groups for p in group["params"] if p.grad is not None]
        if self._release is not None:
            self._release.finish()
        if taking_part or self._release is None:
            self._next.drop_if_stale(p.grad for p in taking_part)  # pyright: ignore
            call = self._next.call(
                getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
            )
            self._plan = self._update(
                taking_part, self._plan, self._setting(), call, self.observers
            )
            self._next.count(call)
        self._next.reset()
        return loss

    @torch.no_grad()
    def _update(
        self,
        parameters: list[Tensor],
        plan: Plan | None,
        setting: Any,
        call: StepInputs,
        observers: Sequence[Observer] = (),
    ) -> Plan:
        """Take the step of some parameters, in their order; the plan to give again for the next."""
        fits = plan is not None and plan.fits(setting, parameters, self.state)
        if cuda_graphs.capturing():
            obstacle = plan.obstacle_to_capture() if plan is not None and fits else None
            check_capturable(self, fits, obstacle)
            # The graph refers to the plan's tables as long as it lives.
            self._captured += [plan] if plan is not None else []
        if plan is None or not fits:
            plan = self._make_plan(parameters, setting)
        self._invalidate_remainders(plan.written())
        for observer in observers:
            observer.before_update(plan.members, call.multiplier)
        plan.run(self.param_groups, call)
        for observer in observers:
            observer.after_update()
        # The kernels write through addresses, which autograd does not see.
        with no_torch_function():
            torch.autograd.graph.increment_version(parameters)
        plan.note_versions()
        return plan

    def exact_weight(self, parameter: Tensor) -> Tensor:
        """The fp32 number that the next step starts from, of one of this optimizer's parameters.

        Returns:
            New fp32 tensor, shaped like the parameter; the parameter itself if it is fp32.
        """
        if parameter.dtype != torch.bfloat16:
            return parameter.detach()
        visible = local(parameter).detach().contiguous()
        state, seen = self.state.get(parameter, {}), self._seen.get(parameter)
        masters = masters_in({key: local(each) for key, each in state.items()})
        written = seen is not None and seen.version != version_of(parameter)
        if (known := residuals.second_plane(parameter, torch.int16)) is not None and not masters:
            masters = {"remainder16": known}
        format_ = stored_format(masters, "", torch.bfloat16) if masters else None
        if format_ is None or (written and "master" not in masters):
            return place_like(parameter, visible.float())
        planes = [visible, *(masters[key] for key in format_.plane_names("")[1:])]
        return place_like(parameter, format_.decode(planes))

    def scale_next_step(self, coefficient: float | Tensor) -> None:
        """Multiply every gradient by ``coefficient`` in the next step, and only there.

        A second call replaces what the first one said.

        This is how clipping by norm costs no pass over the gradients: they stay as they are in
        memory. ``zero_grad`` and ``step`` reset it to 1.

        Args:
            coefficient: a number or a 0-d tensor.

        Raises:
            ValueError: it is neither.
            NotImplementedError: gradients are released: the step is over already.
        """
        if self._release is not None:
            raise NotImplementedError(
                "gradients are released, so that the step runs inside backward() and nothing that "
                "is known only after it can scale them. To clip, call release_gradients(model, "
                "optimizer, max_norm=..., norm='parameter' or 'last_step')"
            )
        self._next.scale(coefficient)

    def skip_next_step_where(self, found_inf: Tensor) -> None:
        """Let the next step leave everything as it is if ``found_inf`` is not 0 by then.

        Weights, states and step counts keep their bits, and :attr:`skipped_steps` counts it. With
        the Triton backend the device decides, and nothing waits for it. ``zero_grad`` and ``step``
        take it back.

        Args:
            found_inf: tensor with one element.

        Raises:
            NotImplementedError: gradients are released: the step is over already.
        """
        if self._release is not None:
            raise NotImplementedError(
                "gradients are released, so that the step runs inside backward() and cannot be "
                "skipped after it; remove() the release to decide about steps"
            )
        self._next.skip_where(found_inf.reshape(()).float())

    @property
    def skipped_steps(self) -> int:
        """How many steps a gradient that was not finite has skipped; reading waits for the device.

        Counted since the optimizer was made or its state was loaded.
        """
        return self._next.skipped_steps

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, as in torch, and what :meth:`scale_next_step` was told."""
        self._next.reset()
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as in torch.

        Raises:
            ValueError: a parameter's dtype cannot be trained by these optimizers.
            NotImplementedError: an option of the group is not supported.
        """
        super().add_param_group(param_group)
        try:
            number, group = len(self.param_groups) - 1, self.param_groups[-1]
            check_group(self, number)
            resolve_peak_lr(group, number, self.decouples_decay(group))
        except Exception:
            self.param_groups.pop()
            raise
        if self._accumulation is not None:
            self._accumulation.hook_parameters()

    def __getstate__(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("recipe", "backend", "_names")}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.observers = []
        self._captured = []
        self._invalidate()
        accumulate_as(self.recipe, self)

    def _setting(self) -> tuple[Any, ...]:
        """What a plan follows from beside the tensors that take part."""
        groups = self.param_groups
        return (
            self.recipe,
            self.backend,
            [self.rule_of(group) for group in groups],
            # Names, or places where there are none, key the noise.
            [tuple(group.get("param_names") or ()) for group in groups],
            [[id(parameter) for parameter in group["params"]] for group in groups],
        )

    def _collect(
        self, parameters: Sequence[Tensor]
    ) -> list[tuple[Tensor, int, int, Callable[[], str]]]:
        """Parameter, group, position and label of all that takes part, checked."""
        taking_part = set(parameters)
        places = [
            (parameter, number, position, functools.partial(self.label, number, position))
            for number, group in enumerate(self.param_groups)
            for position, parameter in enumerate(group["params"])
            if parameter in taking_part
        ]
        labels = {parameter: label for parameter, _, _, label in places}
        for parameter, label in labels.items():
            if seen := self._seen.get(parameter):
                check_unchanged(parameter, seen, self.state.get(parameter, {}), label)
            check_gradient(parameter, parameter.grad, label)
            check_parameter(parameter, label)
        check_replaced(self, labels)
        if len(labels) < len(places):
            raise ValueError("a parameter is in the groups twice; remove one. Nothing was updated")
        return places

    def _make_plan(self, parameters: list[Tensor], setting: Any) -> Plan:
        """Check all that takes part, complete its states, and keep these if nothing is wrong."""
        self.recipe = get_recipe(self.recipe)
        places = self._collect(parameters)
        members, changes = [], Changes()
        for parameter, number, position, label in places:
            rule = self.rule_for(self.param_groups[number], parameter)
            state = schema.complete_state(
                self.state.get(parameter, {}), parameter, rule, self.recipe, label(), changes
            )
            spans = spans_of(parameter, self._name(number, position))
            seen = self._seen.get(parameter) or Snapshot.of(parameter)
            direction = None
            if rule.stage_states:
                check_whole(parameter, label)
                name = self._name(number, position)
                direction = self.direction_of(parameter, number, name, state)
            members.append(Member(parameter, number, rule, state, spans, seen, direction))
        plan = Plan(members, self.recipe, self.backend, setting)
        self._next.get_ready({each.parameter.device for each in members})
        # Only now, so that an error above leaves no half-made states.
        if self._release is None:
            self._warn_once(members)
        if changes.lost:
            _logger.warning("the state went into recipe %r: %s", self.recipe.name, changes)
        for each in members:
            self.state[each.parameter] = each.state
            self._seen[each.parameter] = each.seen
            residuals.forget(each.parameter)
        residuals.forget_absent(p for group in self.param_groups for p in group["params"])
        return plan

    def _warn_once(self, members: list[Member]) -> None:
        """Say, once, what cannot have been meant but is no error: a cast that was forgotten."""
        matrices = [e.parameter for e in members if max(map(len, shapes_of(e.parameter))) > 1]
        if any(self.state.get(parameter) for parameter in matrices):
            return
        if matrices and all(p.dtype == torch.float32 and not kept(p) for p in matrices):
            _logger.warning(
                "recipe %r trains float32 parameters only, so that nothing is stored in bf16; call "
                "torch_bf16.cast_module(model, %r) before the first step",
                *(self.recipe.name, self.recipe.name),
            )
        formats = {p: self.recipe.format_of("weights", p) for p in matrices}
        dropped = [p for p in matrices if residuals.remembered(p) and not formats[p].planes[1:]]
        if dropped:
            _logger.warning(
                "the model was cast for exact masters, and recipe %r of the optimizer keeps none "
                "for %d of its parameters; give both one recipe if that is not what you mean",
                *(self.recipe.name, len(dropped)),
            )

    def _invalidate_remainders(self, written: Iterable[Member]) -> None:
        """Drop the lower half of weights that something else has written since the last step."""
        for each in written:
            for key in REMAINDERS & each.state.keys():
                local(each.state[key]).zero_()
