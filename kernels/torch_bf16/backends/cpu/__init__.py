"""The CPU backend: Numba kernels on as many threads as torch uses.

Numba is imported when the first step is planned, never by ``import torch_bf16``.
"""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from torch_bf16.backends.backend import Kernel
from torch_bf16.backends.bucket import Bucket
from torch_bf16.backends.host_scalars import HostScalars

__all__ = ["CpuBackend"]


@functools.cache
def _missing() -> str | None:
    try:
        import numba
    except ImportError as error:
        return f"Numba cannot be imported ({error}); pip install numba"
    except Exception as error:
        # Programs that silence ranks replace builtins.print, which Numba needs as it was.
        return (
            f"Numba cannot be imported ({type(error).__name__}: {error}). If the program replaces "
            "functions such as print, import numba before it does"
        )
    if numba.config.DISABLE_JIT:  # pyright: ignore
        return "Numba's compiler is switched off; unset NUMBA_DISABLE_JIT"
    if sys.byteorder != "little":
        return (
            f"its kernels are for little-endian processors, and this one is {sys.byteorder}-endian"
        )
    return None


class CpuBackend:
    """Numba kernels, on CPUs."""

    name = "cpu"
    capturable = False
    by_address = True
    scalars = HostScalars

    def unavailable(self, device: torch.device) -> str | None:
        """Why this backend cannot run on ``device``, or None if it can."""
        if device.type != "cpu":
            return f"it updates tensors in the CPU's memory, not on {device.type}"
        return _missing()

    def fingerprint(self, device: torch.device) -> list[str]:
        """Version of the compiler, and the processor."""
        import llvmlite.binding
        import numba
        from numba.core.codegen import get_host_cpu_features

        config = numba.config  # pyright: ignore
        target = [config.CPU_NAME, config.CPU_FEATURES]  # pyright: ignore
        # Processors of one name differ in them, as a virtual machine is given them.
        features = hashlib.blake2b(get_host_cpu_features().encode(), digest_size=8).hexdigest()
        name = llvmlite.binding.get_host_cpu_name()
        return [numba.__version__, name, features, *map(str, target)]

    def load(self, bucket: Bucket) -> Kernel:
        """Make the kernel for a bucket, without compiling it or reading it from Numba's cache."""
        from .launch import CpuKernel

        return CpuKernel(bucket)

    def squares(self, tensors: Sequence[Tensor]) -> Tensor | None:
        """The sum of the squares of all elements, in fp64, on several threads."""
        from .launch import squares

        return squares(tensors)
