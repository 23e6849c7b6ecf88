"""What a backend is: it binds kernels to buckets and computes the scalars that they take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from torch_bf16.rules import Rule

from .bucket import Bucket
from .inputs import KernelInputs, ScalarRows, StepInputs

__all__ = ["Backend", "Kernel", "ScalarSource"]


class Kernel(Protocol):
    """Updates the tensors of the bucket that it was loaded for, in place."""

    def __call__(self, inputs: KernelInputs, /) -> None:
        """Update every tensor once; on a GPU, return when that is in the current stream's queue."""
        ...

    def measure(self, inputs: KernelInputs, /) -> None:
        """Add the statistic of each tensor that has a gradient to the bucket's sums.

        For rules that have one, before the call of the same inputs, which changes nothing else.
        """
        ...

    def compile(self, n_scalars: int) -> None:
        """Compile now, for rules with so many scalars, so that no call can fail to compile.

        Without it the first call compiles.
        """
        ...


class ScalarSource(Protocol):
    """The scalars of each step, for all buckets on a device that share a rule.

    Attributes:
        steps: the tensors that count the steps from now on, bucket after bucket.
        skipped: whether the step that was set leaves everything as it is; False where only the
            device can tell.
    """

    steps: list[Tensor]
    skipped: bool

    def set(
        self,
        groups: Sequence[Mapping[str, Any]],
        inputs: StepInputs,
        taking_part: np.ndarray | None = None,
    ) -> list[ScalarRows]:
        """The scalars of the next step, for each bucket.

        Args:
            groups: the optimizer's parameter groups; only hyperparameters are read.
            inputs: what else this step was told.
            taking_part: bool, for each tensor, bucket after bucket, whether it takes the step: the
                others are not counted, and get rows without meaning. None for all.

        Raises:
            ValueError: no step can be computed from a group's options; nothing has been updated.
        """
        ...

    def count(self, updated: np.ndarray | None = None) -> None:
        """Count the step, once its tensors are updated.

        Args:
            updated: where the step broke off, bool for each tensor, whether it was updated by then:
                the others' step does not count. None for all that take part.
        """
        ...


class Backend(Protocol):
    """Where and how kernels run.

    Attributes:
        name: as users ask for it.
        capturable: whether a CUDA graph can record a step.
        by_address: whether kernels write through addresses, which autograd does not see.
    """

    name: str
    capturable: bool
    by_address: bool

    def unavailable(self, device: torch.device) -> str | None:
        """Why this backend cannot run on ``device``, or None where it can."""
        ...

    def fingerprint(self, device: torch.device) -> list[str]:
        """What its bits on ``device`` follow from beside this package and torch's version."""
        ...

    def load(self, bucket: Bucket) -> Kernel:
        """The kernel for a bucket, not compiled yet."""
        ...

    def squares(self, tensors: Sequence[Tensor]) -> Tensor | None:
        """The sum of the squares of all elements, whose bits are the same at each run on a device.

        It is off by what fp32 sums are, at most, and infinite only where a number is.

        Args:
            tensors: at least one, real and dense, of one dtype, on one device.

        Returns:
            0-d, fp64, on that device, or on the CPU where that has no fp64; not waited for. None
            where this backend does not read such tensors.
        """
        ...

    def scalars(
        self,
        rule: Rule,
        device: torch.device,
        sizes: Sequence[int],
        groups: Sequence[int],
        steps: Sequence[Tensor],
    ) -> ScalarSource:
        """What computes the scalars of buckets that share a rule.

        Args:
            rule: the rule of all of them.
            device: where they all are.
            sizes: the number of tensors of each bucket.
            groups: number of the parameter group of each tensor, bucket after bucket.
            steps: the tensors that count its steps, likewise: fp32, 0-d.
        """
        ...
