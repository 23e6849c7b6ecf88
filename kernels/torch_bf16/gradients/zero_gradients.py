"""Lets torch make states before the first step, where sums of gradients are fp32.

``get_state_dict`` of an optimizer without states steps along zeros in the parameter's dtype, which
a parameter with fp32 sums refuses. A resumed run does that, because DCP loads in place.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist

from torch_bf16.parameters import parameters_of
from torch_bf16.torch_patches import Replacement

__all__ = ["let_torch_set_zeros"]


def let_torch_set_zeros() -> None:
    """Let distributed state dicts set gradients of zeros in any dtype."""
    if dist.is_available() and (replacement := _replacement()) is not None:
        replacement.apply()


@functools.cache
def _replacement() -> Replacement | None:
    # Here, because it takes half a second, and most programs have no fp32 sums.
    from torch.distributed.checkpoint import state_dict

    if not hasattr(state_dict, "_init_optim_state"):  # a private function of torch
        return None
    return Replacement("optimizer_init", state_dict, "_init_optim_state", _in_any_dtype)


def _in_any_dtype(original: Any) -> Any:
    def init_optim_state(optim: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        parameters: list[Any] = parameters_of(optim)
        summed = [p for p in parameters if p.grad is None and p.grad_dtype not in (None, p.dtype)]
        dtypes = [each.grad_dtype for each in summed]
        for each in summed:
            each.grad_dtype = None
        try:
            original(optim, *args, **kwargs)
        finally:
            for each, dtype in zip(summed, dtypes, strict=True):
                each.grad = None
                each.grad_dtype = dtype

    return init_optim_state
