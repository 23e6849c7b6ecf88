"""The steps of a random program, which its twin takes alike; see ``random_programs``."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from random_writes import numbers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import torch_bf16

__all__ = ["NAMES", "RandomSteps", "what_differs"]

BF16 = torch.bfloat16
NAMES = ["embedding", "matrix", "large", "conv", "bias", "scale", "late"]


class RandomSteps(RuleBasedStateMachine):
    """A program and its twin, and how they step.

    Attributes:
        net, optimizer: the program's.
        twin, twin_optimizer: its twin's.
        exact: whether the twin has fp32 weights.
        joined: whether ``late`` is trained, too.
        release: the handle on the program's released gradients, or None.
        steps: how many there were.
        stepped: whether all parameters were, since states were loaded or weights written.
        written: whether a weight was, since the last step of all.
    """

    net: nn.Module
    optimizer: Any
    twin: nn.Module
    twin_optimizer: Any
    exact: bool
    joined: bool
    release: Any
    steps: int
    stepped: bool
    written: bool

    def _both(self) -> tuple[tuple[nn.Module, Any], ...]:
        return (self.net, self.optimizer), (self.twin, self.twin_optimizer)

    def _pairs(self) -> dict[str, tuple[nn.Parameter, nn.Parameter]]:
        names = NAMES if self.joined else NAMES[:-1]
        return {name: (getattr(self.net, name), getattr(self.twin, name)) for name in names}

    @rule(
        without=st.sets(st.sampled_from(NAMES), max_size=3),
        size=st.sampled_from([1e-6, 1e-2, 10.0]),
        scale=st.sampled_from([1.0, 1.0, 0.5]),
        skip=st.sampled_from([False, False, True]),
    )
    def step(self, without: set[str], size: float, scale: float, skip: bool) -> None:
        self.steps += 1
        made = {
            name: (numbers(ours, self.steps) * size).to(BF16)
            for name, (ours, _) in self._pairs().items()
            if name not in without and ours.requires_grad
        }
        released = self.release is not None
        for net, optimizer in self._both():
            optimizer.zero_grad()
            gradients = {getattr(net, name): each for name, each in made.items()}
            if released and net is self.net:
                if gradients:
                    sum((p * each.to(p)).sum().float() for p, each in gradients.items()).backward()
            else:
                for parameter, each in gradients.items():
                    parameter.grad = each.to(parameter)
                if not released:
                    optimizer.scale_next_step(scale)
                    optimizer.skip_next_step_where(torch.tensor(float(skip)))
            optimizer.step()
        self.stepped = self.stepped or not (skip or without)

    @precondition(lambda self: self.release is None)
    @rule(
        count=st.integers(1, 3),
        without=st.sets(st.sampled_from(NAMES), max_size=3),
        size=st.sampled_from([1e-6, 1e-2, 10.0]),
        sums=st.sampled_from(["fp32", "bf16_stochastic", "bf16_nearest"]),
        max_norm=st.sampled_from([None, 1e-4, 1.0]),
        to_none=st.booleans(),
    )
    def accumulate(
        self,
        count: int,
        without: set[str],
        size: float,
        sums: str,
        max_norm: float | None,
        to_none: bool,
    ) -> None:
        """A step on the sum of micro-batches, of which some weights have no or one gradient."""
        self.steps += 1
        for pair in self._pairs().values():
            # After a resume the program has none, and zeros take a step.
            if any(each.grad is None for each in pair):
                for each in pair:
                    each.grad = None
        for net, optimizer in self._both():
            optimizer.zero_grad(set_to_none=to_none)
            # The gradients of the twin's fp32 weights are fp32.
            handle = None
            if not (self.exact and net is self.twin):
                sums = "fp32" if self.exact else sums
                handle = torch_bf16.accumulate_gradients(net, optimizer, sums)
            for number in range(count):
                made = {
                    parameter: numbers(parameter, 10 * self.steps + number) * size
                    for name in self._pairs()
                    if (parameter := net.get_parameter(name)).requires_grad
                    and (number == 1 or name not in without)
                }
                if made:
                    sum((p * g.to(BF16).to(p)).sum().float() for p, g in made.items()).backward()
            if max_norm is not None:
                torch_bf16.clip_next_step(optimizer, max_norm)
            optimizer.step()
            if handle is not None:
                handle.remove()
        self.stepped = self.stepped or not without

    def _step_all(self) -> None:
        """A step of all, after which writes are seen number by number."""
        both = [each for pair in self._pairs().values() for each in pair]
        frozen = [each for each in both if not each.requires_grad]
        for each in frozen:
            each.requires_grad_()
        self.stepped = self.written = False
        self.step(set(), 1e-2, 1.0, False)
        for each in frozen:
            each.requires_grad_(False)

    def _step_since_loading(self) -> None:
        if not self.stepped:
            self._step_all()

    @rule(group=st.integers(0, 1), lr=st.sampled_from([1e-4, 0.05]))
    def set_learning_rate(self, group: int, lr: float) -> None:
        for each in (self.optimizer, self.twin_optimizer):
            each.param_groups[group]["lr"] = lr

    @rule(name=st.sampled_from(NAMES), trains=st.booleans())
    def freeze(self, name: str, trains: bool) -> None:
        for net in (self.net, self.twin):
            getattr(net, name).requires_grad_(trains).grad = None


def what_differs(parameter: Any, optimizer: Any, twin: Any, twin_optimizer: Any) -> str | None:
    """What of a parameter, which may be sharded, is not what its twin has; None if all is."""
    exact = _whole(optimizer.exact_weight(parameter)), twin_optimizer.exact_weight(twin)
    if not torch.equal(*exact):
        return "weight"
    state = optimizer.state.get(parameter, {})
    for key, expected in twin_optimizer.state.get(twin, {}).items():
        # What is beside a weight was compared with it.
        compared = isinstance(expected, Tensor) and key[:6] not in ("master", "remain")
        if compared and not torch.equal(_whole(state[key]).float(), expected.float()):
            return key
    return None


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
