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

__all__ = ["Backend", "CapturableKernel", "CapturableSource", "Kernel", "ScalarSource"]


class Kernel(Protocol):
    """Updates the tensors of the bucket that it was loaded for, in place."""

    def __call__(self, inputs: KernelInputs, /) -> None:
        """Update every tensor once; on a GPU, return once this is queued in the current stream."""
        ...

    def measure(self, inputs: KernelInputs, /) -> None:
        """Add the statistic of each tensor that has a gradient to the bucket's sums.

        For rules that have a statistic; called before the update, with the same inputs. Nothing
        else changes.
        """
        ...

    def compile(self, n_scalars: int) -> None:
        """Compile now, for a rule with that many scalars, so that no call can fail to compile.

        Otherwise the first call compiles.
        """
        ...


class CapturableKernel(Kernel, Protocol):
    """A kernel of a capturable backend, whose launches a CUDA graph can hold alone."""

    def bring(self, inputs: KernelInputs, /) -> None:
        """Copy the inputs of the next launches, also those of replays, to the device."""
        ...

    def launch(self) -> None:
        """Update every tensor from the inputs that were brought last."""
        ...

    def launch_measure(self) -> None:
        """Run :meth:`measure` on the inputs that were brought last."""
        ...


class ScalarSource(Protocol):
    """The scalars of each step, for all buckets on a device that share a rule.

    Attributes:
        steps: the tensors that count the steps from now on, bucket after bucket.
        skipped: whether the step that was set last changes nothing; False if only the device can
            tell.
    """

    steps: list[Tensor]
    skipped: bool

    def set(
        self,
        groups: Sequence[Mapping[str, Any]],
        inputs: StepInputs,
        is_active: np.ndarray | None = None,
    ) -> list[ScalarRows]:
        """Compute the scalars of the next step, for each bucket.

        Args:
            groups: the optimizer's parameter groups; only hyperparameters are read.
            inputs: the other inputs of this step.
            is_active: bool, for each tensor, bucket after bucket, whether it takes the step. The
                step of other tensors is not counted, and their rows mean nothing. None for all
                tensors.

        Raises:
            ValueError: no step can be computed from a group's options; nothing has been updated.
        """
        ...

    def count(self, updated: np.ndarray | None = None) -> None:
        """Count the step, once its tensors are updated.

        Args:
            updated: if the step broke off, bool, for each tensor, whether it was updated by then:
                the step of other tensors does not count. None for all active ones.
        """
        ...


class CapturableSource(ScalarSource, Protocol):
    """A source of a capturable backend, whose launch a CUDA graph can hold alone."""

    def bring(
        self,
        groups: Sequence[Mapping[str, Any]],
        inputs: StepInputs,
        is_active: np.ndarray | None = None,
    ) -> list[ScalarRows]:
        """Copy the inputs of the next launches to the device; otherwise as :meth:`set`."""
        ...

    def launch(self) -> None:
        """Compute the scalars from the inputs that were brought last, and count the step."""
        ...


class Backend(Protocol):
    """Where and how kernels run.

    Attributes:
        name: the name that users pass.
        capturable: whether a CUDA graph can record a step; then kernels are
            :class:`CapturableKernel`, and sources :class:`CapturableSource`.
        by_address: whether kernels write through addresses, which autograd does not see.
    """

    name: str
    capturable: bool
    by_address: bool

    def unavailable(self, device: torch.device) -> str | None:
        """Why this backend cannot run on ``device``, or None if it can."""
        ...

    def fingerprint(self, device: torch.device) -> list[str]:
        """Everything its bits on ``device`` depend on besides this package and torch's version."""
        ...

    def load(self, bucket: Bucket) -> Kernel:
        """Make the kernel for a bucket, without compiling it."""
        ...

    def squares(self, tensors: Sequence[Tensor]) -> Tensor | None:
        """The sum of the squares of all elements, with the same bits in each run on a device.

        Its error is at most that of an fp32 sum. Kernels return infinity only if an element is;
        eager also if the norm of a tensor exceeds 2**64, because torch sums fp32 squares in fp32.

        Args:
            tensors: at least one, real and dense, of one dtype, on one device.

        Returns:
            0-d, fp64, on that device, or on the CPU if the device has no fp64; the host does not
            wait for it. None if this backend does not read such tensors.
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
        """Make the source of scalars for buckets that share a rule.

        Args:
            rule: the rule of all buckets.
            device: the device of all buckets.
            sizes: the number of tensors of each bucket.
            groups: number of the parameter group of each tensor, bucket after bucket.
            steps: the step counter of each tensor, in the same order: fp32, 0-d.
        """
        ...
