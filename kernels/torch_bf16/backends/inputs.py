"""What changes from one call of a kernel to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from torch_bf16.errors import with_article

__all__ = ["KernelInputs", "ScalarRows", "StepInputs"]


class StepInputs(NamedTuple):
    """The inputs of one step besides the hyperparameters.

    Attributes:
        coefficient: multiplied into every gradient: a number or a tensor with one element.
        grad_scale: the factor of the loss, divided out of every gradient; None for 1.
        found_inf: not 0 if a gradient is not finite: then nothing is updated, and the step does not
            count. None if that was not checked.
    """

    coefficient: float | Tensor = 1.0
    grad_scale: float | Tensor | None = None
    found_inf: float | Tensor | None = None

    @property
    def multiplier(self) -> float | Tensor:
        """The total factor of the gradients."""
        return self.coefficient if self.grad_scale is None else self.coefficient / self.grad_scale

    @property
    def is_skipped(self) -> bool:
        """Whether ``found_inf`` skips the step; reading it waits for the device."""
        return self.found_inf is not None and float(self.found_inf) != 0.0

    def on_host(self) -> StepInputs:
        """The same inputs as numbers, for code that reads them often: a read waits for a device."""
        found_inf = None if self.found_inf is None else float(self.found_inf)
        return StepInputs(float(self.multiplier), None, found_inf)


@dataclass(frozen=True, slots=True)
class ScalarRows:
    """A rule's scalars for the ``n`` tensors of one bucket.

    Attributes:
        steps: int64 ``[n]``, the 1-based number of this step for each tensor; None if only the
            device has it.
        rows: int64 ``[n]``, which row of ``table`` each tensor uses.
        table: fp32 ``[rows, scalars of the rule]`` if the host computed them; a tensor, fp32
            ``[rows, scalars of the rule + 2]``, if the device did: the scalars, the number of the
            step, and 1 if it is skipped.
    """

    steps: np.ndarray | None
    rows: np.ndarray
    table: np.ndarray | Tensor


class KernelInputs(NamedTuple):
    """The inputs of one call of a kernel.

    Attributes:
        gradients: a contiguous gradient for each tensor of the bucket; None leaves the tensor as it
            is.
        scalars: the rule's scalars for the tensors.
        bases: uint32 ``[n, s, 2]``, in place of the bucket's ``bases``, if they change from call to
            call.
        given_addresses: :attr:`addresses`, if they are known already.
    """

    gradients: Sequence[Tensor | None]
    scalars: ScalarRows
    bases: np.ndarray | None = None
    given_addresses: np.ndarray | None = None

    @property
    def addresses(self) -> np.ndarray:
        """Addresses of the gradients, int64 ``[n]``; 0 makes kernels leave a tensor as it is.

        Raises:
            ValueError: a gradient has elements but no address.
        """
        if self.given_addresses is not None:
            return self.given_addresses
        addresses = [0 if each is None else each.data_ptr() for each in self.gradients]
        for each, address in zip(self.gradients, addresses, strict=True):
            if each is not None and not address and each.numel():
                raise ValueError(
                    f"a gradient is {with_article(each)} of shape {tuple(each.shape)}, which "
                    "has no memory of its own that a kernel could read. Replace it with a plain "
                    "tensor, or train with backend='eager'"
                )
        return np.array(addresses, np.int64)
