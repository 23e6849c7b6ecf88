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
from torch_bf16.sharding import gradients_of, no_torch_function

from .overwritten import drop_remainders
from .planning import make_plan, with_gradients

if TYPE_CHECKING:
    from .optimizer import BF16Optimizer

__all__ = ["GraphedStep"]

# Replays between two looks at everything that an ordinary step looks at.
_EVERY = 64

_NOTHING = nullcontext()


class GraphedStep:
    """What takes steps of an optimizer by replaying a CUDA graph of one.

    Made by :meth:`BF16Optimizer.graphed`. A replay launches one graph instead of the kernels, and
    leaves out most of what a step asks of every tensor. It is the step that ``step()`` would take,
    to the bit: hyperparameters of the groups are read at each replay, so that schedulers work and
    ``lr`` may be a number; clipping, ``skip_next_step_where`` and ``state_dict()`` work as with
    ordinary steps, which may be taken in between.

    Gradients must stay the tensors that they are now. ``zero_grad(set_to_none=False)`` keeps them;
    where one is another tensor or gone, the replay is refused. What is put elsewhere by ``.data``
    is seen at every 64th replay alone. The optimizer, and all that the graph reads, live as long as
    this object. Replays tell autograd nothing: a second ``backward()`` through a graph of before
    the step is not refused. Hooks that torch runs around the steps of all optimizers are not run.

    Args:
        optimizer: the optimizer, whose parameters have their gradients.
        check_every: replays from one look at all gradients, weights and groups to the next. The
            look is most of what a replay costs the host. Those in between go on reading a gradient
            that was replaced, keep the remainder of a weight that was overwritten, and update a
            parameter that its group has no more.

    Raises:
        ValueError: ``check_every`` is not a positive integer.
        RuntimeError: no graph can hold its step; the message says what works. So it is on CPUs,
            with Muon and Adafactor, with released gradients, with hooks on the step, and where a
            parameter or a gradient is not contiguous.
    """

    @torch.no_grad()
    def __init__(self, optimizer: BF16Optimizer, check_every: int = 1) -> None:
        if type(check_every) is not int or check_every < 1:
            raise ValueError(
                f"check_every={check_every!r} must be an integer of at least 1: 1 to look at all "
                "gradients and weights before each replay, 64 before one replay in 64"
            )
        engine, self._optimizer, self._check_every = optimizer._engine, optimizer, check_every
        optimizer._check_step()
        self._setting = setting = optimizer._setting()
        self._refuse_what_steps_do_otherwise()
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
        self._plan, self._taking_part, self._count = plan, plan.taking_part, 0

    def __call__(self) -> None:
        """Take a step of the gradients that are in memory now.

        Raises:
            RuntimeError: a replay would not be the optimizer's step; nothing was updated.
            ValueError: no step follows from a group's options; nothing was updated.
        """
        optimizer, plan = self._optimizer, self._plan
        pending = optimizer._engine.pending
        optimizer._check_step()
        self._refuse_what_steps_do_otherwise()
        # An ordinary step in between may have had another set of gradients.
        looks = self._count % self._check_every == 0 or plan.taking_part is not self._taking_part
        setting = optimizer._setting() if looks else optimizer._engine.setting
        if optimizer._engine.plan is not plan or setting is not self._setting:
            raise self._refusal(
                "other parameters, names, a recipe or a loaded state have come since it was "
                "captured, and replays would update the tensors of then. Call graphed() again"
            )
        if looks:
            self._check_tensors()
        inputs = pending.inputs(optimizer, self._setting.parameters)
        written = plan.overwritten_members if looks else list
        if drop_remainders(optimizer, self._setting.parameters, written):
            plan.note_versions()
        # Not around all of it: to enter no_grad takes a fifth of what a replay does.
        with torch.no_grad() if optimizer.observers else _NOTHING:
            for observer in optimizer.observers:
                set_seen(optimizer.state, True)
                observer.before_update(plan.active_members(), inputs.multiplier)
            with suffix_errors(UNTOUCHED):
                self._recording.replay(optimizer.param_groups, inputs)
            for observer in optimizer.observers:
                observer.after_update()
        data_writes.note_step(optimizer._engine.watches(self._setting.parameters))
        optimizer._count(inputs)
        pending.reset()
        self._count += 1
        # What torch's schedulers ask, which warn where no step came before theirs.
        optimizer._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]

    def _check_tensors(self) -> None:
        """Refuse a replay that would read or write tensors which are not in use any more."""
        with no_torch_function():
            found = gradients_of(self._setting.parameters)
        if not all(map(is_, found, self._gradients)):
            before = self._check_every - 1
            late = (
                f". Up to {before} replays before this one did not look, and may have read the "
                "gradients of then"
                if before
                else ""
            )
            raise self._refusal(self._describe(found) + late)
        plan, setting, states = self._plan, self._setting, self._optimizer.state
        # Addresses take longer than identities.
        due = self._count % _EVERY < self._check_every or plan.taking_part is not self._taking_part
        fits = not due or (
            plan.fits(setting, setting.parameters, states) and plan.suits(self._recording)
        )
        if not fits:
            raise self._refusal(
                "a parameter, a gradient or a state was put elsewhere by .data or replaced, "
                f"within the last {_EVERY + self._check_every - 1} replays, which updated what was "
                "there before. Put tensors elsewhere before graphed(), or call it again afterwards"
            )
        self._taking_part = plan.taking_part

    def _describe(self, found: list[Any]) -> str:
        pairs = zip(found, self._gradients, strict=True)
        number = next(n for n, (now, then) in enumerate(pairs) if now is not then)
        groups = enumerate(self._optimizer.param_groups)
        places = [(group, place) for group, each in groups for place in range(len(each["params"]))]
        label = self._optimizer.label(*places[number])
        if found[number] is None:
            return (
                f"{label} has no gradient any more. Keep gradients where they are by "
                "zero_grad(set_to_none=False), also of the model, or call graphed() again"
            )
        return (
            f"{label} has another gradient than when it was captured, and replays read that one. "
            "Keep gradients where they are by zero_grad(set_to_none=False), also of the model, "
            "write into them (p.grad.copy_(...)), or call graphed() again"
        )

    def _refuse_what_steps_do_otherwise(self) -> None:
        optimizer = self._optimizer
        if optimizer._engine.release is not None:
            raise self._refusal("gradients are released: its steps run inside backward()")
        if (host := optimizer._engine.host) is not None:
            raise self._refusal(f"{host} takes its steps, by several calls each")
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
