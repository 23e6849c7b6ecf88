"""Directions: what a rule that needs whole tensors takes in place of the gradient."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from torch_bf16.backends import StepInputs

__all__ = ["Direction", "Solution"]


class Solution(NamedTuple):
    """The result for a whole tensor, or for one matrix of a stack.

    Attributes:
        answer: what is sent to the ranks that hold parts of the tensor; contiguous.
        intermediate: an intermediate result that saves work on a rank that holds the whole tensor.
    """

    answer: Tensor
    intermediate: Tensor | None = None


class Direction(Protocol):
    """How one parameter's gradient becomes its direction; made by the optimizer for a plan.

    First each rank prepares its elements. Then one rank, which gets all elements of a tensor, or of
    one matrix of a stack, solves for it. Finally each rank finishes its elements, and once they are
    updated, it stores what the next step starts from.

    Attributes:
        kind: directions of one kind and shape can be solved in one call.
        answer: how many numbers an answer has, and their dtype; every rank gets all of them. None
            for one number per element, of which each rank gets those of its own elements.
        prepares: name of the state that :meth:`prepare` updates, which is then changed even if the
            step fails later; None if it updates no state.
    """

    @property
    def kind(self) -> Hashable: ...

    @property
    def answer(self) -> tuple[int | None, torch.dtype]: ...

    @property
    def prepares(self) -> str | None: ...

    def prepare(self, gradient: Tensor, step: int, inputs: StepInputs) -> tuple[Tensor, ...]:
        """Compute this rank's part of the input of :meth:`solve`, as contiguous tensors."""
        ...

    def solve(
        self, others: Sequence[Any], tensors: Sequence[tuple[Tensor, ...]]
    ) -> Iterable[Solution]:
        """Solve for several tensors; may yield one solution at a time to save memory.

        Args:
            others: the direction of each tensor, all of one kind.
            tensors: for each tensor what :meth:`prepare` returns, for all elements.
        """
        ...

    def finish(
        self, prepared: tuple[Tensor, ...], answer: Tensor, intermediate: Tensor | None
    ) -> Tensor:
        """Compute this rank's part of the direction, in fp32.

        Args:
            prepared: what :meth:`prepare` returned in this step.
            answer: this rank's part of the answers, or the whole answer; see :attr:`answer`.
            intermediate: that of the solution, if this rank solved for the tensor and holds all of
                it; else None.
        """
        ...

    def store(self) -> None:
        """Store the states of the step, once the weight is updated; a second call does nothing."""
