"""The scalars of a step, computed on the host, which reads hyperparameters on a device back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_bf16.argument_checks import check_ranges
from torch_bf16.rules import Rule

from .inputs import ScalarRows, StepInputs
from .subnormals import subnormals_kept_here

__all__ = ["HostScalars", "evaluate", "multiplier_of", "naming_group", "sign_of"]


class HostScalars:
    """Scalars computed on the host, in float64; see :class:`.backend.ScalarSource`.

    Args:
        rule: the rule of all buckets.
        device: the device of the buckets.
        sizes: the number of tensors of each bucket.
        groups: number of the parameter group of each tensor, bucket after bucket.
        steps: the step counter of each tensor, in the same order: fp32, 0-d, on the CPU.
    """

    def __init__(
        self,
        rule: Rule,
        device: torch.device,
        sizes: Sequence[int],
        groups: Sequence[int],
        steps: Sequence[Tensor],
    ) -> None:
        self.steps = list(steps)
        self.skipped = False
        self._rule = rule
        self._groups = np.array(groups, np.int64)
        self._buckets = [slice(*ends) for ends in pairwise(accumulate(sizes, initial=0))]
        # Views of the steps: adding to a 0-d tensor takes torch a microsecond.
        self._counters = [each.detach().numpy() for each in steps]
        self._numbers = np.empty(0, np.int64)
        self._is_active: Any = slice(None)

    @subnormals_kept_here
    def set(
        self,
        groups: Sequence[Mapping[str, Any]],
        inputs: StepInputs,
        is_active: np.ndarray | None = None,
    ) -> list[ScalarRows]:
        """Compute the scalars of the next step, for each bucket.

        Raises:
            ValueError: no step can be computed from a group's options or from what a state counts,
                or gradients were scaled by 0; nothing has been updated.
        """
        self.skipped = inputs.is_skipped
        n = len(groups)
        steps = self._numbers = np.array(self._counts(), np.int64)
        steps += 1
        which: Any = slice(None) if is_active is None else is_active
        self._is_active = which
        pairs = (steps * n + self._groups)[which]
        rows = np.zeros(len(steps), np.int64)
        if self.skipped:
            # The numbers of such a step need not make sense: a GradScaler's scale may be 0.
            table = np.empty((0, 0), np.float32)
            return [ScalarRows(steps[bucket], rows[bucket], table) for bucket in self._buckets]
        multiplier = multiplier_of(inputs)
        # Sorting a single one, as with released gradients, takes longer than all the rest.
        if len(pairs) > 1:
            pairs, rows[which] = np.unique(pairs, return_inverse=True)
        table = np.array(
            [
                evaluate(self._rule, groups[pair % n], pair % n, pair // n, multiplier)
                for pair in pairs.tolist()
            ],
            np.float64,
        ).astype(np.float32)
        return [ScalarRows(steps[bucket], rows[bucket], table) for bucket in self._buckets]

    def _counts(self) -> list[int]:
        """The numbers of steps taken."""
        try:
            counts = [int(each.item()) for each in self._counters]
        except (OverflowError, ValueError):  # infinity or NaN
            counts = [-1]
        if min(counts, default=0) < 0:
            numbers = zip(self._groups.tolist(), self._counters, strict=True)
            group, number = next((g, n) for g, n in numbers if not 0 <= n < np.inf)
            raise ValueError(
                f"step of a parameter of group {group} is {number.item()} and must be a number of "
                "steps; the state is damaged, load it as it was saved. Nothing was updated"
            )
        return counts

    def count(self, updated: np.ndarray | None = None) -> None:
        """Count the step, once its tensors are updated; see :class:`.backend.ScalarSource`."""
        counted = np.zeros(len(self._numbers), bool)
        which = self._is_active
        counted[which] = True if updated is None else updated[which]
        numbers = zip(self._counters, self._numbers.tolist(), counted.tolist(), strict=True)
        for counter, number, flag in numbers:
            if flag:
                counter[()] = number


def multiplier_of(inputs: StepInputs) -> float:
    """The total factor of the gradients, as a number.

    Raises:
        ValueError: gradients were scaled by 0. On a device, where nothing can be raised, such a
            step is skipped.
    """
    scale = float(inputs.coefficient)
    if inputs.grad_scale is None:
        return scale
    divisor = float(inputs.grad_scale)
    if divisor == 0.0:
        raise ValueError(
            "grad_scale=0.0: the loss was multiplied by 0, and its gradients cannot be divided by "
            "it. A GradScaler halves its scale whenever gradients are not finite, down to 0: find "
            "where they come from (torch.autograd.set_detect_anomaly), and make a new GradScaler"
        )
    return scale / divisor


def evaluate(
    rule: Rule,
    group: Mapping[str, Any],
    number: int,
    step: int,
    multiplier: float = 1.0,
) -> tuple[float, ...]:
    """The scalars of parameter group ``number`` at its 1-based ``step``, in float64.

    Gradients are multiplied by ``multiplier``, and by -1 in a group that maximizes.

    Raises:
        ValueError: they cannot be computed from the group's options.
    """
    with naming_group(rule, group, number):
        options = tuple(float(option) for option in rule.options(group))
        return rule.scalars(options, step, sign_of(group) * multiplier)


@contextmanager
def naming_group(rule: Rule, group: Mapping[str, Any], number: int) -> Iterator[None]:
    """Turn an error in the options of a parameter group into one that names group and options.

    Raises:
        ValueError: there was an error.
    """
    try:
        yield
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise ValueError(
            f"no step can be computed from the options of group {number}: {_fault(rule, group)} "
            f"({type(error).__name__}: {error}). Nothing was updated"
        ) from error


def _fault(rule: Rule, group: Mapping[str, Any]) -> str:
    """What is wrong with a group's options, or else those that a rule reads."""
    read = _Read(group)
    with suppress(Exception):
        rule.options(read)
    faults = []
    for name in read.names:
        try:
            check_ranges(**{name: group[name]})
        except KeyError:
            faults.append(f"{name} is missing")
        except ValueError as error:
            faults.append(str(error))
        except Exception:  # a tensor that cannot be compared
            faults.append(f"{name}={group[name]!r}")
    return "; ".join(faults or [f"{name}={group[name]!r}" for name in read.names])


class _Read(dict[str, Any]):
    """A parameter group that notes which options are read, in this order."""

    def __init__(self, group: Mapping[str, Any]) -> None:
        super().__init__(group)
        self.names: dict[str, None] = {}

    def __getitem__(self, name: str) -> Any:
        self.names[name] = None
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        if name in self:
            self.names[name] = None
        return super().get(name, default)


def sign_of(group: Mapping[str, Any]) -> float:
    """-1 for a group that maximizes, whose gradients change sign; else 1."""
    return -1.0 if group.get("maximize") else 1.0
