"""What torch's CPU autocast leaves undone: fp32 activations that meet bf16 weights in a norm.

On CUDA autocast widens every argument of a norm to fp32. On CPU it leaves norms alone, and the
kernels take bf16 activations with fp32 weights but not fp32 activations with bf16 weights ("mixed
dtype (CPU): expect parameter to have scalar type of Float"): a norm on raw inputs, or behind a
residual connection with an fp32 input or positional buffer, would fail.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import Library

__all__ = ["fill_gaps"]

_OPS = ("layer_norm", "group_norm", "instance_norm", "rms_norm", "bilinear")

# The registrations last as long as this object.
_library: Library | None = None


def fill_gaps() -> None:
    """Let norms widen bf16 weights to fp32 where the input is fp32, under CPU autocast only.

    Once per process. Calls that worked before run as they did: only an fp32 input with a bf16
    weight is treated differently. An operator for which torch has an autocast rule of its own is
    left alone.

    Example:
        >>> fill_gaps()
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     y = torch.nn.LayerNorm(4, dtype=torch.bfloat16)(torch.randn(2, 4))
        >>> y.dtype
        torch.float32
    """
    global _library
    if _library is not None:
        return
    _library = Library("aten", "IMPL")
    for name in _OPS:
        operator = getattr(torch.ops.aten, name, None)
        known = torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutocastCPU")
        if operator is not None and not known:
            _library.impl(name, _widening(operator), "AutocastCPU")


def _widening(operator: Any) -> Any:
    # `operator` is the packet, so that one function serves every overload it has.
    below_autocast = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

    def call(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if x.dtype == torch.float32:
            args = tuple(_widened(a) for a in args)
            kwargs = {name: _widened(a) for name, a in kwargs.items()}
        with torch._C._ExcludeDispatchKeyGuard(below_autocast):
            return operator(x, *args, **kwargs)

    return call


def _widened(argument: Any) -> Any:
    if isinstance(argument, Tensor) and argument.dtype == torch.bfloat16:
        return argument.float()
    return argument
