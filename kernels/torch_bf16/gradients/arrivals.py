"""How many backward passes have given each parameter a gradient since the last step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from torch import Tensor
from torch.utils.weak import TensorWeakRef

__all__ = ["Arrivals"]


class Arrivals:
    """Counts the gradients of released parameters, which make one step together.

    Args:
        passes: how many of them make a step.

    Attributes:
        stepped: ids of the parameters that have taken their step.
    """

    def __init__(self, passes: int) -> None:
        self.stepped: set[int] = set()
        self._passes = passes
        # By id of the parameter, which its hook keeps alive.
        self._counts: dict[int, int] = defaultdict(int)
        # p.grad at the end of a pass: if it is another tensor later, that pass's sum is gone.
        self._sums: dict[int, TensorWeakRef] = {}

    def __bool__(self) -> bool:
        return bool(self._counts)

    def count(self, parameter: Tensor) -> None:
        """Count a gradient: the first one, unless it was added to that of earlier passes."""
        key = id(parameter)
        if key not in self.stepped:
            reference = self._sums.get(key)
            if reference is None or reference() is not parameter.grad:
                self._counts[key] = 0
        self._counts[key] += 1

    def is_complete(self, parameter: Tensor, following: int = 0) -> bool:
        """Whether ``p.grad`` is the sum that the step takes, after ``following`` more gradients."""
        return self._counts.get(id(parameter), 0) + following >= self._passes

    def end_pass(self, parameters: Iterable[Tensor]) -> None:
        """Remember the sums of all parameters, at the end of a backward pass."""
        if self._passes > 1:
            for parameter in parameters:
                if parameter.grad is not None:
                    self._sums[id(parameter)] = TensorWeakRef(parameter.grad)

    def discard(self) -> None:
        """Restart the count when gradients are zeroed, unless a step was taken."""
        if not self.stepped:
            self._counts.clear()

    def reset(self) -> None:
        """Count for the next step."""
        self._counts.clear()
        self._sums.clear()
        self.stepped.clear()
