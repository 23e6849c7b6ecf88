"""Fast repeated launches of a compiled kernel, whose only arguments are its tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import triton

from .tables import on

__all__ = ["launcher"]


def launcher(
    kernel: Any,
    tables: Sequence[torch.dtype],
    programs: int,
    constants: Mapping[str, Any],
    options: Mapping[str, Any],
    device: torch.device,
) -> Callable[..., None]:
    """Compile a kernel, or read it from Triton's cache, and load it onto a device.

    Args:
        kernel: a Triton kernel whose arguments are tables, then ``constants``.
        tables: the dtype of each table.
        programs: number of programs of a launch, at least one.
        constants: the compile-time arguments, in the order of the kernel's signature.
        options: compiler options.
        device: the device that it runs on.

    Returns:
        A function that launches the kernel on the tables; to be called within :func:`on`.
    """
    # Triton's interpreter has nothing to compile.
    if not isinstance(kernel, triton.JITFunction):
        return lambda *tensors: kernel[(programs,)](*tensors, **constants, **options)
    with on(device):
        compiled = kernel.warmup(*tables, grid=(1,), **constants, **options)
        # Skips the look-up by types of arguments, which takes as long as the launch itself.
        launch = compiled[(programs, 1, 1)]
    values = tuple(constants.values())
    return lambda *tensors: launch(*tensors, *values)
