"""What a backward pass that adds to sums leaves to its end."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .gathering import Waiting

__all__ = ["SummedPass"]


class SummedPass(Waiting):
    """A backward pass, with the sums to which its gradients are to be added.

    Attributes:
        aside: parameters and their sums, by the parameters' ids; a sum is out of ``p.grad`` while
            autograd puts the next gradient there.
        written: ids of the parameters whose sums something has written since a pass put them back.
        merged: whether any gradient has arrived.
    """

    def __init__(self) -> None:
        super().__init__()
        self.aside: dict[int, tuple[Any, Tensor]] = {}
        self.written: set[int] = set()
        self.merged = False

    def put_back(self) -> dict[int, int]:
        """Put the sums for which no gradient has arrived back into ``p.grad``.

        Returns:
            The versions of these sums, by the parameters' ids.
        """
        versions = {}
        for key, (parameter, total) in self.aside.items():
            if parameter.grad is None:
                parameter.grad = total
                versions[key] = total._version
        self.aside.clear()
        return versions

    # A pass that fails calls nothing else.
    __del__ = put_back
