"""The Triton backend: one launch per bucket, on CUDA and ROCm devices.

Triton is imported when the first step is planned, never by ``import torch_bf16``. If
``TRITON_INTERPRET=1`` is in the environment before that, Triton's interpreter runs the same kernels
on CPU tensors, slowly, so that they can be tested without a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from torch_bf16.backends.backend import CapturableKernel, CapturableSource
from torch_bf16.backends.bucket import Bucket
from torch_bf16.errors import version_numbers
from torch_bf16.rules import Rule

__all__ = ["TritonBackend", "interprets"]

# Second moments become subnormal. Triton 3.5 flushes their roots on NVIDIA's GPUs (triton#8557), so
# `ieee` uses PTX there; 3.6 turns them into NaN on AMD's (triton#8697).
_NEEDED, _NEEDED_ON_ROCM = (3, 5), (3, 7)


@functools.cache
def _missing() -> str | None:
    # torch pins its Triton: installing another one would replace torch itself.
    advice = "it comes with torch 2.9 (ROCm: 2.12) or newer, in its builds for GPUs"
    try:
        import triton
    except ImportError as error:
        return f"Triton cannot be imported ({error}); {advice}"
    wanted = _NEEDED_ON_ROCM if torch.version.hip else _NEEDED
    if version_numbers(triton.__version__) < wanted:
        needed = ".".join(map(str, wanted))
        return f"Triton {triton.__version__} was found, but {needed} is needed; {advice}"
    return None


def interprets() -> bool:
    """Whether Triton's interpreter is on, as Triton itself reads the environment."""
    try:
        from triton import knobs
    except ImportError:
        return bool(os.environ.get("TRITON_INTERPRET"))
    return knobs.runtime.interpret


@functools.cache
def _driver() -> str:
    """Version of the GPU's driver, if it can be read without querying the device."""
    for path in ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version"):
        with contextlib.suppress(OSError):
            return Path(path).read_text().partition("\n")[0]
    return "unknown"


class TritonBackend:
    """Triton kernels, on GPUs."""

    name = "triton"
    capturable = True
    by_address = True

    def unavailable(self, device: torch.device) -> str | None:
        """Why this backend cannot run on ``device``, or None if it can."""
        if device.type == "cpu" and not interprets():
            return "it updates tensors on GPUs, and on a CPU only under TRITON_INTERPRET=1"
        if device.type not in ("cpu", "cuda"):
            return f"it updates tensors on CUDA and ROCm devices, not on {device.type}"
        missing = _missing()
        if missing is None and device.type != "cpu" and interprets():
            return (
                "Triton's interpreter is on, which cannot read the device's memory; unset "
                "TRITON_INTERPRET"
            )
        return missing

    def fingerprint(self, device: torch.device) -> list[str]:
        """Versions of the compiler and the driver, and the device."""
        import triton

        if device.type == "cpu":
            return [triton.__version__, "interpreter"]
        gpu = torch.cuda.get_device_properties(device)
        # Builds for CUDA have `gcnArchName`, too, but there it is the device's name.
        chip = gpu.gcnArchName if torch.version.hip else f"sm_{gpu.major}{gpu.minor}"
        return [triton.__version__, gpu.name, chip, _driver()]

    def load(self, bucket: Bucket) -> CapturableKernel:
        """Make the kernel for a bucket, and upload the bucket's tables to the device."""
        from .launch import TritonKernel

        return TritonKernel(bucket)

    def scalars(
        self,
        rule: Rule,
        device: torch.device,
        sizes: Sequence[int],
        groups: Sequence[int],
        steps: Sequence[Tensor],
    ) -> CapturableSource:
        """Make a source of scalars that are computed on the device."""
        from .scalars import DeviceScalars

        return DeviceScalars(rule, device, sizes, groups, steps)

    def squares(self, tensors: Sequence[Tensor]) -> Tensor | None:
        """The sum of the squares of all elements: one launch, and a reduction of its results."""
        from .squares import squares

        return squares(tensors)
