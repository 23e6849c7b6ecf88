"""What a plan depends on, besides where tensors are in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from torch_bf16.sharding import all_same

__all__ = ["Setting"]


class Setting:
    """The parameters of each group, and whatever else decides how they step.

    Args:
        fixed: recipe, backend and rules; compared by ``==``.
        groups: the optimizer's parameter groups; their lists are copied.

    Attributes:
        parameters: the parameters of all groups, in order.
    """

    def __init__(self, fixed: tuple[Any, ...], groups: Sequence[Mapping[str, Any]]) -> None:
        self._fixed = fixed
        # Noise is keyed by names, or by positions if there are none.
        self._names = [list(group.get("param_names") or ()) for group in groups]
        self._members: list[list[Tensor]] = [list(group["params"]) for group in groups]
        self.parameters = [each for members in self._members for each in members]

    def holds(self, fixed: tuple[Any, ...], groups: Sequence[Mapping[str, Any]]) -> bool:
        """Whether nothing has changed; the same object is then kept, as plans compare by ``is``."""
        return (
            fixed == self._fixed
            and [list(group.get("param_names") or ()) for group in groups] == self._names
            and all(map(all_same, [group["params"] for group in groups], self._members))
        )
