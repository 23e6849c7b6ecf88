"""What torch's CPU autocast leaves undone: fp32 activations that meet bf16 weights in a norm.

On CUDA autocast widens every argument of a norm to fp32, and brings both arguments of a product to
one dtype. On CPU it leaves norms and products with a vector alone. Their kernels take bf16
activations with fp32 weights, for norms, but never fp32 activations with bf16 weights ("mixed dtype
(CPU): expect parameter to have scalar type of Float"): a norm on raw inputs, or behind a residual
connection with an fp32 input or positional buffer, would fail. And for the matrix exponential of
a bf16 weight (``parametrizations.orthogonal``), which its autocast leaves in bf16 too, its kernel
returns garbage and says nothing; for determinants it has no bf16 kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import Library

__all__ = ["fill_gaps", "restore"]

_NORMS = ("layer_norm", "group_norm", "instance_norm", "rms_norm")
_PRODUCTS = ("bilinear", "mv", "addmv", "dot", "vdot")
_FP32_ONLY = ("linalg_matrix_exp", "_linalg_slogdet", "_linalg_det", "logdet")

# The registrations last as long as this object.
_library: Library | None = None


def fill_gaps() -> None:
    """Let these operators widen bf16 arguments under CPU autocast: where they must, or meet fp32.

    For the whole process and all models in it, until :func:`restore`; :func:`cast_model` calls it.
    Calls that worked before run as they did: for norms, only an fp32 input with a bf16 weight is
    treated differently. An operator for which torch has an autocast rule of its own is left alone.

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
    for name in (*_NORMS, *_PRODUCTS, *_FP32_ONLY):
        operator = getattr(torch.ops.aten, name, None)
        known = torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutocastCPU")
        if operator is not None and not known:
            deciding = 1 if name in _NORMS else None
            kernel = _widening(operator, deciding, always=name in _FP32_ONLY)
            _library.impl(name, kernel, "AutocastCPU")


def restore() -> None:
    """Give CPU autocast back as torch has it, until the next :func:`cast_model`.

    Norms in bf16 then fail on fp32 inputs again, as they do in stock torch.

    Example:
        >>> restore()
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     torch.nn.LayerNorm(4, dtype=torch.bfloat16)(torch.randn(2, 4))
        Traceback (most recent call last):
        ...
        RuntimeError: mixed dtype (CPU): ...
    """
    global _library
    if _library is not None:
        _library._destroy()
        _library = None


def _widening(operator: Any, deciding: int | None, always: bool) -> Any:
    """An autocast kernel: bf16 arguments become fp32 if one of the first ``deciding`` is fp32.

    Args:
        operator: computes.
        deciding: how many of the arguments are asked; None for all.
        always: nothing is asked.
    """
    below_autocast = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

    def call(*args: Any, **kwargs: Any) -> Any:
        asked = args[:deciding]
        if always or any(isinstance(a, Tensor) and a.dtype == torch.float32 for a in asked):
            args = tuple(_widened(a) for a in args)
            kwargs = {name: _widened(a) for name, a in kwargs.items()}
        with torch._C._ExcludeDispatchKeyGuard(below_autocast):
            # The packet, not an overload: norms differ in what later versions of torch added.
            return operator(*args, **kwargs)

    return call


def _widened(argument: Any) -> Any:
    if isinstance(argument, Tensor) and argument.dtype == torch.bfloat16:
        return argument.float()
    return argument
