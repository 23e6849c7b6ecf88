"""Sums of a rule's statistic over whole tensors, and the factors computed from them.

A kernel adds the sum over its part of a tensor to the tensor's sum, in integer multiples of
``1 / STATISTIC_UNIT``; other parts may be in another kernel's bucket, or on another rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from torch_bf16.rules import STATISTIC_UNIT, Rule

from .inputs import KernelInputs, ScalarRows
from .subnormals import subnormals_kept_here

__all__ = ["Totals", "with_factors"]


@dataclass(frozen=True)
class Totals:
    """Where the sums of a bucket's ``n`` tensors are.

    Attributes:
        sums: int64, on the bucket's device, cleared by the code that needs sums; kernels add to it.
        places: int64 ``[n]``, the index of each tensor's sum in ``sums``: parts of one tensor share
            it.
        counts: int64 ``[n]``, how many elements each whole tensor has.
    """

    sums: Tensor
    places: np.ndarray
    counts: np.ndarray

    @classmethod
    def of_whole(cls, numels: np.ndarray, device: torch.device) -> Totals:
        """The totals of tensors of which the bucket has all elements."""
        sums = torch.zeros(len(numels), dtype=torch.int64, device=device)
        return cls(sums, np.arange(len(numels)), numels)

    def rows(self, rows: np.ndarray) -> Totals:
        """The totals of some of the bucket's tensors."""
        return Totals(self.sums, self.places[rows], self.counts[rows])


@subnormals_kept_here
def with_factors(rule: Rule, totals: Totals | None, inputs: KernelInputs) -> KernelInputs:
    """The inputs with each tensor's factor as the last of its scalars, computed on the host.

    Args:
        rule: the bucket's rule; without a statistic, the inputs are returned as they are.
        totals: the bucket's totals, with complete sums.
        inputs: inputs with scalars computed on the host.
    """
    if rule.factor is None or totals is None:
        return inputs
    sums = totals.sums.cpu().numpy()[totals.places].tolist()
    counts = np.maximum(totals.counts, 1).tolist()
    pairs = zip(sums, counts, strict=True)
    factors = [rule.factor(total / (count * STATISTIC_UNIT)) for total, count in pairs]
    scalars = inputs.scalars
    columns = np.asarray(scalars.table)[scalars.rows], np.array(factors, np.float32)[:, None]
    table = np.concatenate(columns, axis=1)
    return inputs._replace(scalars=ScalarRows(scalars.steps, np.arange(len(table)), table))
