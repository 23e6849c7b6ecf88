"""What a backend is given: many tensors that one kernel updates in one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_bf16 import rules
from torch_bf16.formats import Format
from torch_bf16.numerics.counter_rng import FIRST_MOMENT, GRADIENT, SECOND_MOMENT, WEIGHT, Draw
from torch_bf16.rules import Rule

__all__ = ["Bucket", "Variant"]

_DRAWS = {
    rules.WEIGHTS: WEIGHT,
    rules.GRADIENT: GRADIENT,
    rules.FIRST_MOMENT: FIRST_MOMENT,
    rules.SECOND_MOMENT: SECOND_MOMENT,
    # Never drawn from: its format is fp32.
    rules.EXACT: FIRST_MOMENT,
}


@dataclass(frozen=True)
class Variant:
    """What a compiled kernel depends on.

    Attributes:
        rule: the update rule.
        weights: format of the weights.
        states: format of each of the rule's states, in the rule's order.
        gradient: dtype of the gradients, bfloat16 or float32.
        device: where all tensors are.
        strided: whether there are tensors whose elements are several runs of the whole tensor.
    """

    rule: Rule
    weights: Format
    states: tuple[Format, ...]
    gradient: torch.dtype
    device: torch.device
    strided: bool = False

    @property
    def formats(self) -> tuple[Format, ...]:
        """The formats of the weights and then of each state."""
        return (self.weights, *self.states)

    @property
    def draws(self) -> tuple[Draw, ...]:
        """The noise of the weights and then of each state."""
        return (_DRAWS[self.rule.role], *(_DRAWS[state.role] for state in self.rule.states))

    @property
    def name(self) -> str:
        """A readable identifier, for example ``adamw_bf16+16_fp32_fp32_bfloat16``."""
        parts = [self.rule.name, *(each.name for each in self.formats)]
        return "_".join([*parts, str(self.gradient).removeprefix("torch.")])


@dataclass
class Bucket:
    """Tensors that share a variant, and what this step brings.

    The first block is fixed when the plan is made; the second is set at every step. All tensors are
    contiguous. ``n`` is the number of tensors, ``f`` the number of formats.

    Attributes:
        variant: what the kernel is compiled for.
        planes: for each tensor, for each format, its plane tensors; updated in place by a step.
        numels: int64 ``[n]``.
        offsets: int64 ``[n]``, global index of each tensor's first element.
        widths: int64 ``[n]``, how many elements of a tensor have global indices that follow one
            another, at least 1; all of them unless the variant is strided.
        pitches: int64 ``[n]``, global indices from there to the same place of the next such run.
        bases: uint32 ``[n, f, 2]``, what each tensor's noise for each format starts from.
        gradients: one tensor for each tensor.
        steps: int64 ``[n]``, the 1-based number of this step for each tensor.
        rows: int64 ``[n]``, which row of ``scalars`` each tensor uses.
        scalars: fp32 ``[rows, scalars of the rule]``.
        table: where a device computes them, fp32 ``[rows, scalars of the rule + 2]``: the scalars,
            the number of the step, and 1 where it is skipped. Else None.
        prepared: whatever a backend wants to keep between steps.
    """

    variant: Variant
    planes: Sequence[Sequence[tuple[Tensor, ...]]]
    numels: np.ndarray
    offsets: np.ndarray
    widths: np.ndarray
    pitches: np.ndarray
    bases: np.ndarray

    gradients: Sequence[Tensor] = ()
    steps: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    rows: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    scalars: np.ndarray = field(default_factory=lambda: np.empty((0, 0), np.float32))
    table: Tensor | None = None
    prepared: Any = None
