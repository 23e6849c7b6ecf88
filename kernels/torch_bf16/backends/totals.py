"""Sums of a rule's statistic over whole tensors, and the factors that follow from them.

A kernel adds to a tensor's sum what it holds of the tensor, in whole parts of
``1 / STATISTIC_UNIT``; another part may be in another kernel's bucket, or on another rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from torch_bf16.rules import STATISTIC_UNIT, Rule

from .inputs import KernelInputs, ScalarRows

__all__ = ["Totals", "with_factors"]


@dataclass(frozen=True)
class Totals:
    """Where the sums of a bucket's ``n`` tensors are.

    Attributes:
        sums: int64, on the bucket's device, cleared by whoever asks for sums; kernels add to it.
        places: int64 ``[n]``, where in ``sums`` each tensor's sum is: parts of one share a place.
        counts: int64 ``[n]``, how many elements each whole tensor has.
    """

    sums: Tensor
    places: np.ndarray
    counts: np.ndarray

    @classmethod
    def of_whole(cls, numels: np.ndarray, device: torch.device) -> Totals:
        """Those of tensors of which the bucket has all elements."""
        sums = torch.zeros(len(numels), dtype=torch.int64, device=device)
        return cls(sums, np.arange(len(numels)), numels)

    def rows(self, rows: np.ndarray) -> Totals:
        """Those of some of the bucket's tensors."""
        return Totals(self.sums, self.places[rows], self.counts[rows])


def with_factors(rule: Rule, totals: Totals | None, inputs: KernelInputs) -> KernelInputs:
    """The inputs with each tensor's factor as the last of its scalars, computed on the host.

    Args:
        rule: of the bucket; for one without a statistic they stay as they are.
        totals: the bucket's, complete.
        inputs: with the host's scalars.
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
