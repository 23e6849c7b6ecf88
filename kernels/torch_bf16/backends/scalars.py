"""The scalars of a step: what rules make of hyperparameters and step numbers.

A backend has one object for all tensors of a rule on a device. :class:`HostScalars` computes on the
host, and reads there what lives on a device; Triton's counterpart computes on the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from torch_bf16.rules import Rule

from .bucket import Bucket

__all__ = ["HostScalars", "StepInputs", "evaluate", "sign_of"]


@dataclass(frozen=True)
class StepInputs:
    """What one step was told beside the hyperparameters.

    Attributes:
        coefficient: multiplied into every gradient: a number or a tensor with one element.
        grad_scale: what the loss was multiplied by, divided out of every gradient; None for 1.
        found_inf: not 0 where a gradient is not finite: then nothing is updated, and the step does
            not count. None where nobody looked.
    """

    coefficient: float | Tensor = 1.0
    grad_scale: float | Tensor | None = None
    found_inf: float | Tensor | None = None

    @property
    def multiplier(self) -> float | Tensor:
        """What all this multiplies gradients by."""
        return self.coefficient if self.grad_scale is None else self.coefficient / self.grad_scale


class HostScalars:
    """Scalars computed on the host, in float64, for buckets that share a rule.

    Args:
        rule: the rule of all buckets.
        buckets: their ``steps``, ``rows`` and ``scalars`` are set here, at every step.
        groups: number of the parameter group of each tensor, bucket after bucket.
        steps: the tensors that count its steps, likewise: fp32, 0-d, on the CPU.

    Attributes:
        steps: the tensors that count from now on.
        skipped: whether the step that was set is to leave everything as it is.
    """

    def __init__(
        self,
        rule: Rule,
        buckets: Sequence[Bucket],
        groups: Sequence[int],
        steps: Sequence[Tensor],
    ) -> None:
        self.steps = list(steps)
        self.skipped = False
        self._rule, self._buckets = rule, buckets
        self._groups = np.array(groups, np.int64)
        # Views of the steps: to add to a 0-d tensor takes torch a microsecond.
        self._counters = [each.detach().numpy() for each in steps]
        self._numbers = np.empty(0, np.int64)

    def set(self, groups: Sequence[Mapping[str, Any]], call: StepInputs) -> None:
        """Bring the next step's scalars into the buckets.

        Raises:
            ValueError: no step follows from a group's options; nothing has been updated.
        """
        self.skipped = call.found_inf is not None and float(call.found_inf) != 0.0
        scale = float(call.coefficient)
        divisor = 1.0 if call.grad_scale is None else float(call.grad_scale)
        n = len(groups)
        self._numbers = np.array([int(each.item()) for each in self._counters], np.int64) + 1
        pairs = self._numbers * n + self._groups
        rows = np.zeros(len(pairs), np.int64)
        if (
            len(pairs) > 1
        ):  # sorting one takes longer than all the rest, where gradients are released
            pairs, rows = np.unique(pairs, return_inverse=True)
        table = np.array(
            [
                evaluate(self._rule, groups[pair % n], pair % n, pair // n, scale, divisor)
                for pair in pairs.tolist()
            ],
            np.float64,
        ).astype(np.float32)
        first = 0
        for bucket in self._buckets:
            here = slice(first, first := first + len(bucket.numels))
            bucket.steps, bucket.rows, bucket.scalars = self._numbers[here], rows[here], table

    def count(self) -> None:
        """Count the step, once its tensors are updated."""
        for counter, number in zip(self._counters, self._numbers.tolist(), strict=True):
            counter[()] = number


def evaluate(
    rule: Rule,
    group: Mapping[str, Any],
    number: int,
    step: int,
    scale: float = 1.0,
    divisor: float = 1.0,
) -> tuple[float, ...]:
    """The scalars of parameter group ``number`` at its 1-based ``step``, in float64.

    Raises:
        ValueError: none follow from the group's options.
    """
    try:
        options = tuple(float(option) for option in rule.options(group))
        return rule.scalars(options, step, sign_of(group) * scale / divisor)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        given = {k: v for k, v in group.items() if not k.startswith("param")}
        raise ValueError(
            f"no step follows from the options of group {number}: {given}; "
            "set them to numbers. Nothing was updated"
        ) from error


def sign_of(group: Mapping[str, Any]) -> float:
    """-1 for a group that maximizes: its gradients are turned around."""
    return -1.0 if group.get("maximize") else 1.0
