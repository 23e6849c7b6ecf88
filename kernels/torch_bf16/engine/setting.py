"""What a plan depends on besides the memory of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from torch_bf16.sharding import all_same

__all__ = ["Setting"]


class Setting:
    """The parameters of each group, and what else decides how they step.

    Args:
        fixed: compared by ``==``: recipe, backend, rules.
        groups: the optimizer's parameter groups; their lists are copied.

    Attributes:
        parameters: of all groups, in order.
    """

    def __init__(self, fixed: tuple[Any, ...], groups: Sequence[Mapping[str, Any]]) -> None:
        self._fixed = fixed
        # Names, or places where there are none, key the noise.
        self._names = [list(group.get("param_names") or ()) for group in groups]
        self._members: list[list[Tensor]] = [list(group["params"]) for group in groups]
        self.parameters = [each for members in self._members for each in members]

    @classmethod
    def of(
        cls,
        fixed: tuple[Any, ...],
        groups: Sequence[Mapping[str, Any]],
        last: Setting | None,
    ) -> Setting:
        """The last one where it still holds, else another."""
        return last if last is not None and last.holds(fixed, groups) else cls(fixed, groups)

    def holds(self, fixed: tuple[Any, ...], groups: Sequence[Mapping[str, Any]]) -> bool:
        """Whether all of it is still the same; if so, the object stays, compared by identity."""
        return (
            fixed == self._fixed
            and [list(group.get("param_names") or ()) for group in groups] == self._names
            and all(map(all_same, [group["params"] for group in groups], self._members))
        )
