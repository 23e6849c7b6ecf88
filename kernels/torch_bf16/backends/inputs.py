"""What changes from one call of a kernel to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

__all__ = ["KernelInputs", "ScalarRows", "StepInputs"]


class StepInputs(NamedTuple):
    """What one step was told besides the hyperparameters.

    Attributes:
        coefficient: multiplied into every gradient: a number or a tensor with one element.
        grad_scale: what the loss was multiplied by, divided out of every gradient; None for 1.
        found_inf: not 0 where a gradient is not finite: then nothing is updated, and the step does
            not count. None where that was not checked.
    """

    coefficient: float | Tensor = 1.0
    grad_scale: float | Tensor | None = None
    found_inf: float | Tensor | None = None

    @property
    def multiplier(self) -> float | Tensor:
        """What gradients are multiplied by in all."""
        return self.coefficient if self.grad_scale is None else self.coefficient / self.grad_scale

    def on_host(self) -> StepInputs:
        """The same as numbers, for code that reads them often: each read waits for a device."""
        found_inf = None if self.found_inf is None else float(self.found_inf)
        return StepInputs(float(self.multiplier), None, found_inf)


@dataclass(frozen=True, slots=True)
class ScalarRows:
    """A rule's scalars for the ``n`` tensors of one bucket.

    Attributes:
        steps: int64 ``[n]``, the 1-based number of this step for each tensor; None where only the
            device has it.
        rows: int64 ``[n]``, which row of ``table`` each tensor uses.
        table: fp32 ``[rows, scalars of the rule]`` where the host computed them; a tensor, fp32
            ``[rows, scalars of the rule + 2]``, where the device did: the scalars, the number of
            the step, and 1 where it is skipped.
    """

    steps: np.ndarray | None
    rows: np.ndarray
    table: np.ndarray | Tensor


class KernelInputs(NamedTuple):
    """What one call of a kernel is given.

    Attributes:
        gradients: one tensor for each tensor of the bucket, contiguous; None leaves that one as it
            is.
        scalars: the rule's scalars for them.
        bases: uint32 ``[n, s, 2]``, in place of the bucket's, where what the noise starts from
            changes from call to call.
        given_addresses: :attr:`addresses`, where they are known already.
    """

    gradients: Sequence[Tensor | None]
    scalars: ScalarRows
    bases: np.ndarray | None = None
    given_addresses: np.ndarray | None = None

    @property
    def addresses(self) -> np.ndarray:
        """Where the gradients are, int64 ``[n]``; 0 tells kernels to leave a tensor as it is.

        Raises:
            ValueError: a gradient has elements and no address.
        """
        if self.given_addresses is not None:
            return self.given_addresses
        found = [0 if each is None else each.data_ptr() for each in self.gradients]
        for each, address in zip(self.gradients, found, strict=True):
            if each is not None and not address and each.numel():
                raise ValueError(
                    f"a gradient is a {type(each).__name__} of shape {tuple(each.shape)}, whose "
                    "numbers are not in memory of its own, where a kernel could read them. Replace "
                    "it by a plain tensor, or train with backend='eager'"
                )
        return np.array(found, np.int64)
