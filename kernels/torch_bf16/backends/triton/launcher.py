"""What launches a kernel again and again, given its tables alone."""

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
        kernel: its arguments are tables, then ``constants``.
        tables: dtypes of what they hold.
        programs: how many a launch has, at least one.
        constants: what it is compiled for, in the order of its arguments.
        options: how.
        device: where.

    Returns:
        What is called with the tables, within :func:`on` the device.
    """
    # Triton's interpreter has nothing to compile.
    if not isinstance(kernel, triton.JITFunction):
        return lambda *given: kernel[(programs,)](*given, **constants, **options)
    with on(device):
        compiled = kernel.warmup(*tables, grid=(1,), **constants, **options)
        # Past the look-up by types of arguments, which takes as long as the launch itself.
        launch = compiled[(programs, 1, 1)]
    values = tuple(constants.values())
    return lambda *given: launch(*given, *values)
