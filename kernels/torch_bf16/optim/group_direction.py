"""What the directions of Adafactor and Muon share: they follow the options of a parameter group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import proxy

from torch_bf16.backends import StepInputs
from torch_bf16.backends.host_scalars import sign_of
from torch_bf16.engine.member import Member

if TYPE_CHECKING:
    from .optimizer import BF16Optimizer

__all__ = ["GroupDirection"]


class GroupDirection:
    """Base of a :class:`.Direction` that reads the current options of the parameter's group.

    Args:
        optimizer: the optimizer that steps.
        member: the parameter.
    """

    def __init__(self, optimizer: BF16Optimizer, member: Member) -> None:
        # A weak reference, because the optimizer's plan holds this object; and not to the groups,
        # because loading a state dict replaces them.
        self._optimizer, self._group = proxy(optimizer), member.group

    @property
    def _options(self) -> dict[str, Any]:
        return self._optimizer.param_groups[self._group]

    def store(self) -> None:
        """See :class:`.Direction`; for a direction whose step changes no state but the weight's."""

    def _scale_of(self, inputs: StepInputs) -> float:
        """What gradients are multiplied by in a step, negative to ascend."""
        return float(inputs.multiplier) * sign_of(self._options)
