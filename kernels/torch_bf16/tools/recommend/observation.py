"""Observe the optimizers of a process, whoever calls them, and end it after enough steps."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from torch_bf16.backends import StepInputs
from torch_bf16.foreign.convert import convert
from torch_bf16.optim.optimizer import BF16Optimizer
from torch_bf16.parameters import parameters_of
from torch_bf16.sharding import local
from torch_bf16.tools.sampling import is_foreseen, places, sample_of

from .host import Host, host_of, rate_of, schedulers_of
from .models import Models
from .updates import ParameterSums

__all__ = ["Enough", "Observation", "Observer", "Refused"]

_SAMPLE = 4096


class Enough(BaseException):
    """Ends a training that has been measured.

    It is not an ``Exception``, which a script, a search for a batch size or a loop that restarts
    would take for a failed step.
    """


class Refused(Enough):
    """Ends a training that cannot be measured; the message says why."""


@dataclass
class Observation:
    """What was observed of a training.

    Attributes:
        optimizers: in the order of their first steps.
        steps: how many steps each optimizer took.
        rates: learning rates of each optimizer's groups, one row per step; NaN for a group that has
            none.
        schedulers: the schedulers of each optimizer. They may be known to a function of the script
            alone, and are lost once that has ended.
        parameters: the sums of each parameter, by its ``id``.
        host: who calls the optimizers, and for how many steps.
        models: the outermost modules that own the parameters.
        converted: classes of optimizers over bf16 weights, whose intended updates could only be
            seen by converting them.
        unseen: names of parameters whose updates cannot be known before they are stored.
        infinite: observed steps with gradients that are not finite.
        caught: whether the program caught the exception that ends it, and went on.
    """

    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    rates: list[list[list[float]]] = field(default_factory=list)
    schedulers: list[list[Any]] = field(default_factory=list)
    parameters: dict[int, ParameterSums] = field(default_factory=dict)
    host: Host = field(default_factory=Host)
    models: Models = field(default_factory=Models)
    converted: list[str] = field(default_factory=list)
    unseen: set[str] = field(default_factory=set)
    infinite: int = 0
    caught: bool = False

    @property
    def observed_steps(self) -> int:
        """How many steps were observed."""
        return max((each.observed_steps for each in self.parameters.values()), default=0)


@dataclass
class _Before:
    """Some elements of a parameter before a step, on the CPU.

    Attributes:
        parameter: the parameter.
        rate: its learning rate.
        at: the numbers of its optimizer and group.
        where: the elements' indices.
        weight: the elements.
        gradient: their gradient; None until there is one.
    """

    parameter: Tensor
    rate: float
    at: tuple[int, int]
    where: Tensor
    weight: Tensor
    gradient: Tensor | None = None


class Observer:
    """Observes the second half of some steps of every optimizer, then ends the ``with`` block.

    It writes nothing, so those steps are what they would have been, with one exception: optimizers
    over bf16 weights are converted to exact masters, because what they intend is rounded away
    otherwise.

    Args:
        steps: how many steps an optimizer takes, at least 1.
        progress: called with a line of text after each step.
        leave: called if the program has caught the exception that ends it and takes another step.
            It is given what raises the error, or returns what was observed, and must not return.

    Raises:
        ValueError: at the end of the block, if the training cannot be measured.
    """

    def __init__(
        self,
        steps: int,
        progress: Callable[[str], None],
        leave: Callable[[Callable[[], Observation]], object] | None = None,
    ) -> None:
        self.found = Observation()
        self._steps, self._progress, self._leave = steps, progress, leave
        self._end: Enough | None = None
        self._depth, self._outer = 0, None
        self._before: list[_Before] = []
        self._watching: dict[int, _Watcher] = {}

    def __enter__(self) -> Observer:
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> bool:
        self._release()
        if self._end is None or isinstance(error, KeyboardInterrupt):
            return False
        # What a program does after it has caught its end, as failing, is no matter any more.
        self.found.caught = error is not self._end
        self._conclude()
        return True

    def _release(self) -> None:
        for handle in self._handles:
            handle.remove()
        for each in self._watching.values():
            each.optimizer.observers.remove(each)
        self._watching.clear()
        self.found.models.release()

    def _conclude(self) -> Observation:
        if isinstance(self._end, Refused):
            raise ValueError(str(self._end)) from self._end
        return self.found

    def _stop(self, end: Enough) -> NoReturn:
        if self._end is not None and self._leave is not None:
            self.found.caught = True
            self._release()
            self._leave(self._conclude)
        self._end = self._end or end
        raise self._end

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        if self._end is not None:
            self._stop(self._end)
        # The step of the frame above this one is about to begin.
        if not _is_in_method_of(self._outer, sys._getframe(2)):
            self._depth = 0  # a step that raised had no end
        self._depth += 1
        # If an optimizer steps another one, the outer one decides how the weights move.
        if self._depth > 1:
            return None
        self._outer = optimizer
        number = self._number(optimizer)
        found = self.found
        found.steps[number] += 1
        found.rates[number].append([rate_of(group) for group in optimizer.param_groups])
        looking = found.steps[number] > self._steps // 2
        if looking and not found.models.measuring:
            found.models.measure()
            # Of a script that ends by itself, before this observer ends it.
            found.schedulers = schedulers_of(found.optimizers)
        if not looking:
            return None
        if isinstance(optimizer, BF16Optimizer):
            if number not in self._watching:
                # A script may convert its optimizer after its first steps.
                self._watch(optimizer, number)
            self._watching[number].looking = True
            return None
        self._before = [*_sampled(optimizer, number)]
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            self._take_gradients(optimizer)
            return None

        def observed(*given: Any, **named: Any) -> Any:
            # Gradients of before are of another step.
            loss = closure(*given, **named)
            self._take_gradients(optimizer)
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": observed}
        return (args[0], observed, *args[2:]), kwargs

    def _take_gradients(self, optimizer: Any) -> None:
        # Of a GradScaler, which leaves it to fused optimizers to divide by it.
        scale = getattr(optimizer, "grad_scale", None)
        for each in self._before:
            if (found := each.parameter.grad) is None:
                continue
            gradient = local(found).detach()
            gradient = gradient.to_dense() if gradient.is_sparse else gradient
            sample = gradient.reshape(-1)[each.where].float().cpu()
            each.gradient = sample if scale is None else sample / float(scale)

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._depth -= 1
        if self._depth > 0:
            return
        number = self.found.optimizers.index(optimizer)
        if number in self._watching:
            self._watching[number].looking = False
        else:
            # A fused optimizer takes no step if a GradScaler has found infinities.
            skipped = bool(getattr(optimizer, "found_inf", None))
            self._compare(skipped)
            self._convert_if_rounding(optimizer, number)
        taken = self.found.steps[number]
        self._progress(f"step {taken} of {self._steps}")
        if taken >= self._steps:
            self.found.schedulers = schedulers_of(self.found.optimizers)
            self._stop(Enough())

    def _number(self, optimizer: torch.optim.Optimizer) -> int:
        found = self.found
        if optimizer in found.optimizers:
            return found.optimizers.index(optimizer)
        found.optimizers.append(optimizer)
        found.steps.append(0)
        found.rates.append([])
        found.schedulers.append([])
        parameters = parameters_of(optimizer)
        trainable = {torch.float32, torch.bfloat16, torch.complex64}
        kinds = {p.dtype for p in parameters} - trainable
        if kinds:
            self._refuse(
                f"{type(optimizer).__name__} trains weights in "
                f"{', '.join(sorted(map(str, kinds)))}, but recipes are for fp32 weights that "
                "become bf16: give it weights in fp32 (precision='32-true', dtype=torch.float32)"
            )
        if len(found.optimizers) == 1:
            found.host = host_of(sys._getframe())
        found.models.add(parameters)
        if isinstance(optimizer, BF16Optimizer):
            self._watch(optimizer, len(found.optimizers) - 1)
        return len(found.optimizers) - 1

    def _watch(self, optimizer: BF16Optimizer, number: int) -> None:
        if optimizer._engine.release is not None:
            self._refuse(
                f"{type(optimizer).__name__} releases gradients: it steps inside the backward "
                "pass, one parameter at a time. Leave release_gradients out to measure it"
            )
        watcher = _Watcher(self, optimizer, number)
        self._watching[number] = watcher
        optimizer.observers.append(watcher)

    def _refuse(self, why: str) -> NoReturn:
        self._stop(Refused(why))

    def _convert_if_rounding(self, optimizer: Any, number: int) -> None:
        groups = optimizer.param_groups
        if all(p.dtype != torch.bfloat16 for group in groups for p in group["params"]):
            return
        kind = type(optimizer).__name__
        try:
            convert(optimizer, "bf16-fp32-master")
        except (ValueError, NotImplementedError) as error:
            self._refuse(
                f"{kind} steps over bf16 weights and rounds what it intends to nearest, and it "
                f"cannot be converted to exact masters to be watched: {error}. Give it weights in "
                "fp32"
            )
        self.found.converted.append(kind)
        self._watch(optimizer, number)

    def _compare(self, skipped: bool) -> None:
        finite = not skipped
        for each in self._before:
            if skipped or each.gradient is None:
                continue
            if not bool(each.gradient.isfinite().all()):
                finite = False
                continue
            after = local(each.parameter).detach().reshape(-1)[each.where].cpu()
            if each.parameter.dtype == torch.float32:
                self.sums(each.parameter, each.at).add(
                    each.weight, after.double() - each.weight, each.gradient, _positive(each.rate)
                )
        self.found.infinite += not finite
        self._before.clear()

    def sums(self, parameter: Tensor, at: tuple[int, int]) -> ParameterSums:
        """The sums of a parameter, created at its first step."""
        known = self.found.parameters
        if id(parameter) not in known:
            name = self.found.models.name_of(parameter) or f"parameter {len(known)}"
            stays_fp32 = self.found.models.stays_fp32(parameter)
            known[id(parameter)] = ParameterSums(name, tuple(parameter.shape), at, stays_fp32)
        return known[id(parameter)]


class _Watcher:
    """Observes the updates that one of our optimizers intends, before they are rounded."""

    def __init__(self, observer: Observer, optimizer: BF16Optimizer, number: int) -> None:
        self.optimizer, self.looking = optimizer, False
        self._observer, self._number = observer, number

    def before_update(self, members: Sequence[Any], inputs: StepInputs) -> None:
        """Called by the optimizer."""
        if not self.looking:
            return
        if inputs.is_skipped:
            self._observer.found.infinite += 1
            return
        multiplier = float(inputs.multiplier)
        found, finite = self._observer.found, True
        for each in members:
            parameter = each.shard.parameter
            if not is_foreseen(each):
                found.unseen.add(found.models.name_of(parameter) or each.shard.name)
                continue
            group = self.optimizer.param_groups[each.group]
            rate = rate_of(group)
            if rate == 0 or not each.shard.memory.numel() or parameter.is_complex():
                continue
            taken = sample_of(each, group, multiplier, _SAMPLE)
            gradient = each.shard.gradient().reshape(-1)[taken.where].float().cpu() * multiplier
            if not bool(gradient.isfinite().all()):
                finite = False
                continue
            sums = self._observer.sums(parameter, (self._number, each.group))
            sums.add(taken.before.cpu(), taken.intended.cpu(), gradient, _positive(rate))
        found.infinite += not finite

    def after_update(self) -> None:
        """Called by the optimizer."""


def _sampled(optimizer: torch.optim.Optimizer, number: int) -> Iterator[_Before]:
    for at, group in enumerate(optimizer.param_groups):
        rate = rate_of(group)
        # Complex parameters are fp32 by every recipe.
        for parameter in (p for p in group["params"] if not p.is_complex()):
            memory = local(parameter).detach()
            trained = parameter.requires_grad or parameter.grad is not None
            if trained and rate != 0 and memory.numel():
                where = places(memory.numel(), _SAMPLE, memory.device)
                elements = memory.reshape(-1)[where].cpu().double()
                yield _Before(parameter, rate, (number, at), where, elements)


def _positive(rate: float) -> float:
    # Without a learning rate, updates are not divided by anything.
    return 1.0 if math.isnan(rate) else abs(rate)


def _is_in_method_of(owner: object, frame: FrameType | None) -> bool:
    """Whether a frame, or one of its callers', is a call of a method of ``owner``."""
    while frame is not None:
        if owner is not None and frame.f_locals.get("self") is owner:
            return True
        frame = frame.f_back
    return False
