"""The Triton backend: one launch per bucket, on CUDA and ROCm devices.

Triton is imported when the first step is planned, never by ``import torch_bf16``. With
``TRITON_INTERPRET=1`` in the environment before that, Triton's interpreter runs the same kernels on
CPU tensors, slowly: so they can be tested without a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_bf16.backends.backend import Kernel, ScalarSource
from torch_bf16.backends.bucket import Bucket
from torch_bf16.errors import version_numbers

__all__ = ["TritonBackend"]

# Second moments become subnormal. 3.5 flushes their roots on NVIDIA's GPUs (triton#8557), where
# `ieee` has PTX instead; 3.6 makes NaN of them on AMD's (triton#8697).
_NEEDED, _NEEDED_ON_ROCM = (3, 5), (3, 7)


@functools.cache
def _missing() -> str | None:
    # torch pins its Triton: to install another one would replace torch itself.
    advice = "it comes with torch 2.9 (ROCm: 2.12) or newer, in its builds for GPUs"
    try:
        import triton
    except ImportError as error:
        return f"Triton cannot be imported ({error}); {advice}"
    wanted = _NEEDED_ON_ROCM if torch.version.hip else _NEEDED
    if version_numbers(triton.__version__) < wanted:
        needed = ".".join(map(str, wanted))
        return f"Triton {triton.__version__} was found and {needed} is needed; {advice}"
    return None


@functools.cache
def _driver() -> str:
    """Version of the GPU's driver, as far as it is said without asking the device."""
    for place in ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version"):
        with contextlib.suppress(OSError):
            return Path(place).read_text().partition("\n")[0]
    return "unknown"


class TritonBackend:
    """Triton kernels, on GPUs."""

    name = "triton"
    capturable = True
    by_address = True

    def unavailable(self, device: torch.device) -> str | None:
        """Why this backend cannot run on ``device``, or None where it can."""
        if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            return "it updates tensors on GPUs, and on a CPU only under TRITON_INTERPRET=1"
        if device.type not in ("cpu", "cuda"):
            return f"it updates tensors on CUDA and ROCm devices, not on {device.type}"
        return _missing()

    def fingerprint(self, device: torch.device) -> list[str]:
        """Compiler, driver and device."""
        import triton

        if device.type == "cpu":
            return [triton.__version__, "interpreter"]
        found = torch.cuda.get_device_properties(device)
        # Builds for CUDA have the first attribute, too: it is the name.
        chip = found.gcnArchName if torch.version.hip else f"sm_{found.major}{found.minor}"
        return [triton.__version__, found.name, chip, _driver()]

    def load(self, bucket: Bucket) -> Kernel:
        """The kernel for a bucket, whose tables go up to the device now."""
        from .launch import TritonKernel

        return TritonKernel(bucket)

    def scalars(self, *arguments: Any, **named: Any) -> ScalarSource:
        """Scalars computed on the device; arguments as for :class:`.scalars.DeviceScalars`."""
        from .scalars import DeviceScalars

        return DeviceScalars(*arguments, **named)

    def squares(self, tensors: Sequence[Tensor]) -> Tensor | None:
        """The sum of the squares of all elements: one launch, and one reduction of what it made."""
        from .squares import squares

        return squares(tensors)
