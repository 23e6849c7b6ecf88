"""What a rule takes for the gradient where it looks at whole tensors first."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from torch_bf16.backends import StepInputs

__all__ = ["Direction", "Solution"]


class Solution(NamedTuple):
    """What the numbers of a whole tensor, or of one matrix of a stack, make.

    Attributes:
        answer: what ranks get that hold parts of it; contiguous.
        kept: what spares a rank that holds all of it some work.
    """

    answer: Tensor
    kept: Tensor | None = None


class Direction(Protocol):
    """How one parameter's gradient becomes its direction; the optimizer's, made for a plan.

    First each rank prepares its elements, then one rank that has all elements of a tensor, or of
    one matrix of a stack, solves for it, and at last each rank finishes its elements.

    Attributes:
        kind: those of one kind and shape can be solved in one call.
        answer: how many numbers an answer has, and their dtype. All ranks get them; None numbers
            are one for each element of what was solved, and each rank gets those of its elements.
    """

    @property
    def kind(self) -> Hashable: ...

    @property
    def answer(self) -> tuple[int | None, torch.dtype]: ...

    def prepare(self, gradient: Tensor, step: int, told: StepInputs) -> tuple[Tensor, ...]:
        """This rank's part of what is solved, contiguous; updates its part of the states."""
        ...

    def solve(
        self, others: Sequence[Any], tensors: Sequence[tuple[Tensor, ...]]
    ) -> Iterable[Solution]:
        """The solutions for some tensors, each when it is asked for where that spares memory.

        Args:
            others: for each its direction, of one kind.
            tensors: for each what :meth:`prepare` made, of all elements.
        """
        ...

    def finish(self, prepared: tuple[Tensor, ...], answer: Tensor, kept: Tensor | None) -> Tensor:
        """This rank's part of the direction: fp32.

        Args:
            prepared: what :meth:`prepare` made in this step.
            answer: this rank's part of the answers, or the one answer.
            kept: of the solution, on a rank that has found and holds all of it.
        """
        ...
