"""What torch's CPU autocast leaves undone: fp32 activations that meet bf16 weights in a norm.

On CUDA autocast widens every argument of a norm to fp32, and brings both arguments of a product to
one dtype. On CPU it leaves norms and products with a vector alone, whose kernels refuse fp32
activations with bf16 weights ("mixed dtype (CPU): ..."): a norm on raw inputs, or behind a residual
connection with an fp32 input, would fail. The kernel for the matrix exponential of a bf16 weight
(``parametrizations.orthogonal``) returns garbage; for determinants there is none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import Library

__all__ = ["fill_gaps", "restore", "widened"]

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
        known = torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutocastCPU")
        if hasattr(torch.ops.aten, name) and not known:
            _library.impl(name, _widening(name), "AutocastCPU")


def restore() -> None:
    """Give CPU autocast back as torch has it, until the next :func:`cast_model`.

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


def _widening(name: str) -> Any:
    """An autocast kernel: bf16 arguments become fp32, where that is needed."""
    # The packet, not an overload: norms differ in what later versions of torch added.
    operator, always = getattr(torch.ops.aten, name), name in _FP32_ONLY
    # Of a norm the input decides, of a product any argument.
    deciding = 1 if name in _NORMS else None
    below_autocast = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

    def call(*args: Any, **kwargs: Any) -> Any:
        asked = args[:deciding]
        if always or any(isinstance(a, Tensor) and a.dtype == torch.float32 for a in asked):
            args = tuple(widened(a) for a in args)
            kwargs = {name: widened(a) for name, a in kwargs.items()}
        with torch._C._ExcludeDispatchKeyGuard(below_autocast):
            return operator(*args, **kwargs)

    return call


def widened(argument: Any) -> Any:
    """An argument in fp32 if it is a bf16 tensor, else as it is."""
    if isinstance(argument, Tensor) and argument.dtype == torch.bfloat16:
        return argument.float()
    return argument
