"""Ways to take steps: with gradients that stay or move, in a CUDA graph, or with idle rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from torch_bf16.parameters import parameters_of

from .entries import Entry

__all__ = ["WAYS", "in_ways", "step_of"]

Step = Callable[[], object]
# The last of every ten rows of a matrix has no gradient, like rows of words that do not occur.
_IDLE = slice(9, None, 10)


def _moved_step(optimizer: torch.optim.Optimizer) -> Step:
    parameters: list[Any] = parameters_of(optimizer)
    held = [[p.grad for p in parameters], [p.grad.clone() for p in parameters]]
    turns = itertools.cycle(held)

    def step() -> None:
        for parameter, gradient in zip(parameters, next(turns), strict=True):
            parameter.grad = gradient
        optimizer.step()

    return step


def _graph_step(optimizer: torch.optim.Optimizer) -> Step:
    replay: list[Step] = []

    def step() -> None:
        if replay:
            replay[0]()
        elif not optimizer.state:
            # States and tables must exist before the capture.
            side, main = torch.cuda.Stream(), torch.cuda.current_stream()
            side.wait_stream(main)
            with torch.cuda.stream(side):
                optimizer.step()
            main.wait_stream(side)
        else:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                optimizer.step()
            replay.append(graph.replay)
            graph.replay()

    return step


def _zero_rows_step(optimizer: torch.optim.Optimizer) -> Step:
    for parameter in parameters_of(optimizer):
        if parameter.ndim > 1 and parameter.grad is not None:
            parameter.grad[_IDLE] = 0
    return optimizer.step


_STEPS: dict[str, Callable[[torch.optim.Optimizer], Step]] = {
    "moved": _moved_step,
    "graph": _graph_step,
    "zero-rows": _zero_rows_step,
}

WAYS = tuple(_STEPS)
"""Names of the ways beside plain steps: gradients at other addresses than in the step before; a
replayed CUDA graph; a tenth of all rows without gradients and moments from the start."""


def step_of(optimizer: torch.optim.Optimizer, way: str | None) -> Step:
    """A function that takes a step of an optimizer whose parameters have gradients.

    Args:
        optimizer: an optimizer that has taken no step yet.
        way: one of :data:`WAYS`; None for gradients that stay where they are.
    """
    return optimizer.step if way is None else _STEPS[way](optimizer)


def in_ways(entries: Iterable[Entry], ways: Iterable[str]) -> list[Entry]:
    """The same entries once more for each way, which their names then say."""
    return [_in_way(each, way) for each in entries for way in ways]


def _in_way(entry: Entry, way: str) -> Entry:
    name = f"{entry.name}, {way}"
    if way == "graph":
        options = {**entry.options, "capturable": True}
        return replace(entry, name=name, way=way, options=options, only_on="cuda")
    # Moving gradients need two sets of them.
    more = entry.dtype.itemsize if way == "moved" else 0
    return replace(entry, name=name, way=way, estimate=entry.estimate + more)
