"""What rules that look at whole tensors first take in place of the gradient."""

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
        answer: what the ranks that hold parts of it get; contiguous.
        intermediate: a result on the way that saves work on a rank that holds all of it.
    """

    answer: Tensor
    intermediate: Tensor | None = None


class Direction(Protocol):
    """How one parameter's gradient becomes its direction; made by the optimizer for a plan.

    First each rank prepares its elements, then one rank that has all elements of a tensor, or of
    one matrix of a stack, solves for it, and finally each rank finishes its elements.

    Attributes:
        kind: directions of one kind and shape can be solved in one call.
        answer: how many numbers an answer has, which all ranks get, and their dtype. None means one
            number for each element of what was solved, of which each rank gets its own.
        prepares: the state that :meth:`prepare` updates, which the step that fails later has then
            changed; None where it changes none.
    """

    @property
    def kind(self) -> Hashable: ...

    @property
    def answer(self) -> tuple[int | None, torch.dtype]: ...

    @property
    def prepares(self) -> str | None: ...

    def prepare(self, gradient: Tensor, step: int, inputs: StepInputs) -> tuple[Tensor, ...]:
        """This rank's part of what is solved, contiguous; see :attr:`prepares`."""
        ...

    def solve(
        self, others: Sequence[Any], tensors: Sequence[tuple[Tensor, ...]]
    ) -> Iterable[Solution]:
        """The solutions for some tensors, one at a time if that saves memory.

        Args:
            others: for each its direction, of one kind.
            tensors: for each what :meth:`prepare` made, of all elements.
        """
        ...

    def finish(
        self, prepared: tuple[Tensor, ...], answer: Tensor, intermediate: Tensor | None
    ) -> Tensor:
        """This rank's part of the direction: fp32.

        Args:
            prepared: what :meth:`prepare` made in this step.
            answer: this rank's part of the answers, or the one answer.
            intermediate: of the solution, on a rank that has found and holds all of it.
        """
        ...
