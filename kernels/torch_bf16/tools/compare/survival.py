"""Measure, for each layer, the share of updates that was stored, and elements that never moved.

A twin of the optimizer runs beside it in fp32, over some elements of each parameter and with the
same gradients. In each window of steps it starts from the weights that are stored; its movement is
what the optimizer intended, and the stored weights' movement along it is what survived. That does
not depend on how numbers are stored, so it works for every optimizer that updates elements one by
one.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from torch_bf16.optim.optimizer import BF16Optimizer
from torch_bf16.tools.foreign_states import MASTER, SUM, extra_bits
from torch_bf16.tools.sampling import layer_of, places

from .rows import Trained, rate_of, set_rate

__all__ = ["Survival", "exact_weight"]

_SAMPLE = 4096
_WINDOWS = 24


def exact_weight(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> Tensor:
    """A copy of a parameter as the optimizer stores it, in fp32, with what it keeps beyond it."""
    if isinstance(optimizer, BF16Optimizer):
        found = optimizer.exact_weight(parameter).float()
        # Of an fp32 parameter it is the parameter itself, which later steps change.
        return found.clone() if parameter.dtype == torch.float32 else found
    weight = parameter.detach().float()
    for name, each in optimizer.state.get(parameter, {}).items():
        kind = extra_bits(name)
        if kind in (SUM, MASTER) and isinstance(each, Tensor) and each.shape == weight.shape:
            return weight + each.float() if kind == SUM else each.detach().float().clone()
    return weight.clone()


class Survival:
    """Measures the updates of one run.

    Args:
        trained: the run's model and optimizer, before the first step.
        steps: how many steps the run takes.

    Attributes:
        ends: the last step of each window, from 1.
        sums: of each layer, for each window, ``<stored, intended>`` and ``<intended, intended>``.
        missing: why updates are not measured; None if they are.
    """

    def __init__(self, trained: Trained, steps: int) -> None:
        self._trained = trained
        self._every = -(-steps // _WINDOWS)
        self._steps = steps
        named = trained.model.named_parameters()
        self._named = {n: p for n, p in named if p.requires_grad and p.numel()}
        self._first = {n: self._exact(n) for n in self._named}
        self._moved = {n: torch.zeros_like(w, dtype=torch.bool) for n, w in self._first.items()}
        self._places = {n: places(p.numel(), _SAMPLE, p.device) for n, p in self._named.items()}
        self._start = {n: self._sample(n, w) for n, w in self._first.items()}
        self._twins = {n: nn.Parameter(self._start[n].clone()) for n in self._named}
        self._twin: torch.optim.Optimizer | None = None
        self.ends: list[int] = []
        self.sums: dict[str, list[list[float]]] = defaultdict(list)
        self.missing: str | None = None
        try:
            self._twin = trained.twin({p: self._twins[n] for n, p in self._named.items()})
        # Another library's class may not be made from groups and their options.
        except Exception as error:
            self.missing = f"no fp32 twin of {trained.kind.__name__} can be made: {error}"

    @property
    def decodes(self) -> bool:
        """Whether what the optimizer keeps beyond a weight can be read here."""
        optimizer = self._trained.optimizer
        if isinstance(optimizer, BF16Optimizer):
            return True
        kinds = {extra_bits(name) for state in optimizer.state.values() for name in state}
        return not kinds.isdisjoint((SUM, MASTER))

    def before_step(self) -> None:
        """Copy the gradients to the twin, before the optimizer consumes them."""
        for name, parameter in self._named.items():
            gradient = parameter.grad
            if gradient is not None and gradient.layout != torch.strided:
                self.missing = f"the gradient of {name} is sparse, and has no samples"
                self._twin = gradient = None
            self._twins[name].grad = None if gradient is None else self._sample(name, gradient)

    def after_step(self, step: int) -> None:
        """Step the twin, and at a window's end measure what was stored.

        Args:
            step: the number of the step that was taken, from 1.
        """
        if self._twin is not None:
            for twin_group, group in zip(
                self._twin.param_groups, self._trained.optimizer.param_groups, strict=False
            ):
                set_rate(twin_group, rate_of(group))
            try:
                self._twin.step()
            except Exception as error:
                self.missing = f"{self._trained.kind.__name__} takes no step over samples: {error}"
                self._twin = None
        if step % self._every and step != self._steps:
            return
        self.ends.append(step)
        by_layer: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for name in self._named:
            weight = self._exact(name)
            self._moved[name] |= weight != self._first[name]
            stored = self._sample(name, weight)
            intended = (self._twins[name].detach() - self._start[name]).double()
            sums = by_layer[layer_of(name)]
            sums[0] += float((stored - self._start[name]).double() @ intended)
            sums[1] += float(intended @ intended)
            self._start[name] = stored
            with torch.no_grad():
                self._twins[name].copy_(stored)
        if self._twin is not None:
            for layer, sums in by_layer.items():
                self.sums[layer].append(sums)

    def count_unmoved(self) -> dict[str, tuple[int, int]]:
        """For each layer, elements that had not moved at any window's end, and all elements."""
        found: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        for name, moved in self._moved.items():
            found[layer_of(name)][0] += moved.numel() - int(moved.count_nonzero())
            found[layer_of(name)][1] += moved.numel()
        return {layer: (stood, numel) for layer, (stood, numel) in found.items()}

    def state(self) -> dict[str, Any]:
        """What :meth:`load` resumes from, as tensors and primitives."""
        return {
            **{"first": self._first, "moved": self._moved, "start": self._start},
            **{"ends": self.ends, "sums": dict(self.sums), "missing": self.missing},
            "twins": {name: twin.detach() for name, twin in self._twins.items()},
            "twin": None if self._twin is None else self._twin.state_dict(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Resume from a result of :meth:`state`."""
        self._first, self._moved, self._start = state["first"], state["moved"], state["start"]
        self.ends, self.missing = state["ends"], state["missing"]
        self.sums = defaultdict(list, state["sums"])
        with torch.no_grad():
            for name, twin in self._twins.items():
                twin.copy_(state["twins"][name])
        if self._twin is not None and state["twin"] is not None:
            self._twin.load_state_dict(state["twin"])

    def _exact(self, name: str) -> Tensor:
        return exact_weight(self._trained.optimizer, self._named[name])

    def _sample(self, name: str, tensor: Tensor) -> Tensor:
        return tensor.detach().reshape(-1)[self._places[name]].float()
