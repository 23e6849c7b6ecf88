"""A step as a CUDA graph, captured and replayed without the rest of the training loop."""

from __future__ import annotations

from contextlib import nullcontext
from operator import is_
from typing import TYPE_CHECKING, Any

import torch

from torch_bf16.backends import cuda_graphs
from torch_bf16.engine import data_writes
from torch_bf16.engine.states import set_seen
from torch_bf16.errors import UNTOUCHED, suffix_errors
from torch_bf16.rules import STORE
from torch_bf16.sharding import gradients_of, no_torch_function

from .overview import placed
from .overwritten import drop_remainders
from .planning import make_plan, with_gradients

if TYPE_CHECKING:
    from .optimizer import BF16Optimizer

__all__ = ["GraphedStep"]

# Replays from one check of all that an ordinary step checks to the next.
_REPLAYS_PER_CHECK = 64

_NOTHING = nullcontext()


class GraphedStep:
    """Takes steps of an optimizer by replaying a CUDA graph of one step.

    Made by :meth:`BF16Optimizer.graphed`. A replay launches one graph instead of the kernels, and
    omits most of the checks that a step makes on every tensor. It takes the same step as ``step()``
    would, to the bit: it reads the hyperparameters of the groups each time, so that schedulers work
    and ``lr`` may be a number; clipping, ``skip_next_step_where`` and ``state_dict()`` work as with
    ordinary steps, which may be taken in between.

    Gradients must remain the same tensors. ``zero_grad(set_to_none=False)`` keeps them; if one was
    replaced or is gone, the replay is refused. A tensor that was moved by ``.data`` is only noticed
    at every 64th replay. The optimizer, and all that the graph reads, live as long as this object.
    Autograd does not learn of replays: a second ``backward()`` through a graph from before the step
    is not refused. Hooks that torch runs around the steps of all optimizers are not run.

    Args:
        optimizer: the optimizer; its parameters must have their gradients.
        check_every: number of replays from one check of all gradients, weights and groups to the
            next. The check is most of what a replay costs the host. Without it, a replay still
            reads a gradient that was replaced, keeps the remainder of a weight that was
            overwritten, and updates a parameter that was removed from its group.

    Raises:
        ValueError: ``check_every`` is not a positive integer.
        RuntimeError: no graph can hold the step; the message says what works instead. This is so on
            CPUs, with Muon and Adafactor, with released gradients, with hooks on the step, and if a
            step copies a parameter or a gradient, because of its order in memory.

    Example:
        >>> step = optimizer.graphed()  # doctest: +SKIP
        >>> for batch in batches:  # doctest: +SKIP
        ...     optimizer.zero_grad(set_to_none=False)
        ...     model(batch).sum().backward()
        ...     step()
    """

    @torch.no_grad()
    def __init__(self, optimizer: BF16Optimizer, check_every: int = 1) -> None:
        if type(check_every) is not int or check_every < 1:
            raise ValueError(
                f"check_every={check_every!r} must be an integer of at least 1: 1 to check all "
                "gradients and weights before each replay, 64 before one replay in 64"
            )
        engine, self._optimizer, self._check_every = optimizer._engine, optimizer, check_every
        optimizer._check_step()
        self._setting = setting = optimizer._setting()
        self._refuse_unsupported()
        if any(optimizer.rule_of_group(group) is STORE for group in optimizer.param_groups):
            raise self._refusal(
                "it has no fused rule, and its own step runs on copies that are made every time. "
                "Use an optimizer of torch_bf16, or take ordinary steps"
            )
        plan = engine.plan
        if plan is None or not plan.fits(setting, setting.parameters, optimizer.state):
            parameters = with_gradients(setting.parameters)
            with suffix_errors(UNTOUCHED):
                plan = engine.plan = make_plan(optimizer, parameters, setting, plan)
        if not plan.active_parameters():
            raise self._refusal("no parameter has a gradient. Call it after a backward()")
        drop_remainders(optimizer, setting.parameters, plan.overwritten_members)
        plan.note_versions()
        if why := plan.obstacle_to_capture():
            raise self._refusal(why)
        with no_torch_function():
            self._gradients = gradients_of(setting.parameters)
        try:
            self._recording = plan.record(optimizer.param_groups)
        except RuntimeError as error:
            raise self._refusal(str(error)) from error
        self._plan, self._is_active, self._count = plan, plan.is_active, 0

    def __call__(self) -> None:
        """Take a step with the gradients that are in memory now.

        Raises:
            RuntimeError: a replay would differ from the optimizer's step; nothing was updated.
            ValueError: a group's options are invalid; nothing was updated.
        """
        optimizer, plan = self._optimizer, self._plan
        pending = optimizer._engine.pending
        optimizer._check_step()
        self._refuse_unsupported()
        # An ordinary step in between may have had another set of gradients.
        checks = self._count % self._check_every == 0 or plan.is_active is not self._is_active
        setting = optimizer._setting() if checks else optimizer._engine.setting
        if optimizer._engine.plan is not plan or setting is not self._setting:
            raise self._refusal(
                "parameters, names or the recipe have changed or a state was loaded since it was "
                "captured, and replays would update the old tensors. Call graphed() again"
            )
        if checks:
            self._check_tensors()
        inputs = pending.inputs(optimizer, self._setting.parameters)
        written = plan.overwritten_members if checks else lambda: ()
        if drop_remainders(optimizer, self._setting.parameters, written):
            plan.note_versions()
        # Only if needed: entering no_grad takes a fifth of the time of a replay.
        with torch.no_grad() if optimizer.observers else _NOTHING:
            for observer in optimizer.observers:
                set_seen(optimizer.state, True)
                observer.before_update(plan.active_members(), inputs)
            with suffix_errors(UNTOUCHED):
                self._recording.replay(optimizer.param_groups, inputs)
            for observer in optimizer.observers:
                observer.after_update()
        data_writes.note_step(optimizer._engine.watches(self._setting.parameters))
        optimizer._count(inputs)
        pending.reset()
        self._count += 1
        # torch's schedulers check this, to warn if no step of the optimizer came before theirs.
        optimizer._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]

    def _check_tensors(self) -> None:
        """Refuse a replay that would read or write tensors that are no longer in use."""
        with no_torch_function():
            gradients = gradients_of(self._setting.parameters)
        if not all(map(is_, gradients, self._gradients)):
            before = self._check_every - 1
            why = self._describe(gradients)
            if before:
                why += f". Up to {before} replays before this one did not check, and may have read "
                why += "the old gradients"
            raise self._refusal(why)
        plan, setting, states = self._plan, self._setting, self._optimizer.state
        # Comparing addresses takes longer than comparing identities.
        due = self._count % _REPLAYS_PER_CHECK < self._check_every
        if (due or plan.is_active is not self._is_active) and not (
            plan.fits(setting, setting.parameters, states) and plan.suits(self._recording)
        ):
            raise self._refusal(
                "a parameter, a gradient or a state was moved by .data or replaced within the last "
                f"{_REPLAYS_PER_CHECK + self._check_every - 1} replays, which updated the old "
                "memory. Move tensors before graphed(), or call it again afterwards"
            )
        self._is_active = plan.is_active

    def _describe(self, gradients: list[Any]) -> str:
        rows = zip(gradients, self._gradients, placed(self._optimizer), strict=True)
        gradient, place = next((now, place) for now, then, (place, _) in rows if now is not then)
        label = self._optimizer.label(*place)
        if gradient is None:
            return (
                f"{label} has no gradient any more. Keep gradients where they are by "
                "zero_grad(set_to_none=False), also of the model, or call graphed() again"
            )
        return (
            f"{label} has another gradient than when it was captured, and replays read the old "
            "one. Keep gradients where they are by zero_grad(set_to_none=False), also of the "
            "model, write into them (p.grad.copy_(...)), or call graphed() again"
        )

    def _refuse_unsupported(self) -> None:
        optimizer = self._optimizer
        if optimizer._engine.release is not None:
            raise self._refusal("gradients are released: its steps run inside backward()")
        if (host := optimizer._engine.host) is not None:
            raise self._refusal(f"{host} takes each of its steps by several calls")
        if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
            raise self._refusal(
                "hooks are registered on its step, and replays would not run them. Remove them, "
                "or take ordinary steps"
            )
        if cuda_graphs.capturing(p.device for p in self._setting.parameters[:1]):
            raise self._refusal(
                "another graph is being captured, which cannot hold this one. Call step() there"
            )

    def _refusal(self, why: str) -> RuntimeError:
        name = type(self._optimizer).__name__
        return RuntimeError(f"a graphed step of {name} is refused: {why}. {UNTOUCHED}")
