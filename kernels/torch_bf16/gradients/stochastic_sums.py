"""Sums in ``bf16_stochastic``: which gradients wait for others, and what numbers their noise."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torch_bf16.backends import cuda_graphs
from torch_bf16.memory import TransposedOrder, as_it_lies
from torch_bf16.model.gradient_hooks import has_node_hooks
from torch_bf16.sharding import is_dtensor, local

from .ddp_hook import ddp_modules
from .ddp_sums import DdpReader
from .gathering import Gathering, Group
from .step_numbers import StepNumbers
from .summed_pass import SummedPass
from .sums import Addition, Sums, with_graph_of

__all__ = ["StochasticSums"]


class StochasticSums:
    """Adds gradients to their sums in ``p.grad``, many in one kernel call where nothing reads them.

    Args:
        optimizer: its seed, names and steps number the noise; not kept alive.
        model: the module whose DDP modules may read sums as they arrive; None if unknown.

    Attributes:
        hooks: handles of the hooks on the DDP modules.
    """

    def __init__(self, optimizer: Any, model: nn.Module | None) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._readers = [] if model is None else [*map(DdpReader, ddp_modules(model))]
        self.hooks = [each.hook for each in self._readers]
        self._steps = StepNumbers()
        # Numbers of additions, by id of the parameter, which its hooks keep alive.
        self._numbers: dict[int, int] = {}
        self.make_groups()
        self.find_names()

    def make_groups(self) -> None:
        """Forget which gradients are added together."""
        self._gathering = Gathering(self._add_all)
        # Whether its node has hooks of others, which may read the sum; by id of the parameter.
        self._watched: dict[int, bool] = {}
        # Groups of one parameter each, whose sums must not wait for others.
        self._alone: dict[Tensor, Group] = {}

    def find_names(self) -> None:
        """Look up again what the parameters are called, before the next sum."""
        self._sums = Sums()

    def begin(self, parameter: Tensor) -> None:
        """Count from here: ``p.grad`` is the first gradient of a sum."""
        self._numbers[id(parameter)] = 0

    def add(self, running: SummedPass, parameter: Tensor, total: Tensor, new: Tensor) -> None:
        """Add a gradient to the sum, at the latest by :meth:`finish`.

        Args:
            running: the pass in which the gradient arrives.
            parameter: its ``p.grad`` is ``total``.
            total: the sum, bf16; modified in place.
            new: the gradient, which :func:`.sums.addable` accepts; with a graph, ``p.grad`` becomes
                a new sum that has one.

        Raises:
            RuntimeError: a CUDA graph is being captured; nothing was added.
        """
        if cuda_graphs.capturing([new.device]):
            raise RuntimeError(
                "a CUDA graph cannot record the sum of a second micro-batch in 'bf16_stochastic': "
                "every replay would draw the same noise. Accumulate in 'fp32', or capture passes "
                "with one micro-batch each. The sum so far is in p.grad; this gradient was not "
                "added"
            )
        # A gradient that arrived in an enclosing pass is added first.
        self._gathering.settle(parameter)
        number = self._numbers[id(parameter)] = self._numbers.get(id(parameter), -1) + 1
        gradient, sums = local(new.detach()).resolve_neg(), local(total)
        if new.requires_grad:
            # backward(create_graph=True): a sum in memory would have no graph.
            copy = total.detach().clone(memory_format=torch.contiguous_format)
            self._add_all(Group(parameter), {0: Addition(copy, gradient.contiguous(), number)})
            parameter.grad = with_graph_of(total + new, copy)
            return
        order = None if is_dtensor(parameter) else TransposedOrder.of(sums)
        memory = as_it_lies(gradient, order).contiguous()
        addition = Addition(total, memory, number, order)
        if not addition.memory.is_contiguous():
            copy = sums.contiguous()
            self._add_all(Group(parameter), {0: replace(addition, total=copy)})
            sums.copy_(copy)
        elif self._may_wait(parameter):
            self._gathering.add(running, parameter, memory, addition, memory.dtype)
        else:
            alone = self._alone.setdefault(parameter, Group(parameter))
            self._add_all(alone, {0: addition})

    def finish(self, running: SummedPass) -> None:
        """Add the gradients that wait, at the end of their pass."""
        self._gathering.finish(running)
        for each in self._readers:
            each.over |= running.merged

    def after_step(self, states: dict[Any, Any]) -> None:
        """Number the next sums for the step after the one that was just taken.

        Args:
            states: the optimizer's.
        """
        self._steps.ask(states)
        # Sums that are zeroed instead of freed also count from the start, as in a resumed run.
        self._numbers.clear()
        for group in (*self._gathering, *self._alone.values()):
            if group.made is not None:
                group.made.forget()

    def _may_wait(self, parameter: Any) -> bool:
        """Whether nothing reads the sum before the backward pass is over."""
        optimizer: Any = self._optimizer()
        release = None if optimizer is None else optimizer._engine.release
        reads = release is not None and release.steps_next(parameter)
        others = len(parameter._post_accumulate_grad_hooks) - 1 - (release is not None)
        if reads or others:
            return False
        # A DDP module that is not known here may reduce the sum as soon as it is there.
        unknown = not self._readers or any(each.reads for each in self._readers)
        ranks = dist.is_available() and dist.is_initialized()
        if unknown and ranks and not is_dtensor(parameter):
            return False
        # A search of the node takes 30 microseconds, so there is one, before its first sum.
        if (watched := self._watched.get(id(parameter))) is None:
            watched = self._watched[id(parameter)] = bool(has_node_hooks(parameter))
        return not watched

    def _add_all(self, group: Group, additions: dict[int, Addition]) -> None:
        optimizer: Any = self._optimizer()
        with torch.no_grad():
            if optimizer is not None:
                steps = self._steps.read(optimizer.state)
                self._sums.add_all(group, additions, optimizer, steps)
            else:
                for each in additions.values():
                    local(each.total).add_(each.new)
