"""Composite operations keep autocast while a ``TorchDispatchMode`` watches, as FLOP counters do.

In inference mode such a mode receives ``einsum`` or ``lstm`` as a whole and decomposes it where
autocast, which lies above, does not reach the products inside: fp32 inputs then meet bf16 weights.
The same holds, without gradients, for the fused layer of ``nn.TransformerEncoderLayer``. So from
the first mode on, autocast has kernels that decompose these operations before a mode gets them.
Without a mode they would cost microseconds for nothing.

Users need not ask for a mode: torch_uncertainty's routines count the FLOPs of each test, which
Lightning runs in inference mode.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import Library
from torch.utils._python_dispatch import TorchDispatchMode

from torch_bf16.torch_patches import Kernels, Replacement

from .autocast import computes_in_fp32, overloads

__all__ = ["decompose_under_autocast"]

# Composite, with matrix products inside, and without a rule of autocast on one kind of device.
_COMPOSITE = (
    *("einsum", "linalg_matmul", "cov", "conv1d", "conv2d", "conv3d"),
    *("lstm", "gru", "rnn_tanh", "rnn_relu"),
    *("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"),
)
_FUSED = ("_transformer_encoder_layer_fwd", "_native_multi_head_attention")
_KEYS = ("AutocastCPU", "AutocastCUDA")


def decompose_under_autocast() -> None:
    """Let composite operations keep autocast below every ``TorchDispatchMode``.

    For the whole process; :func:`cast_model` calls it. Only the first entry into a mode registers
    the kernels.

    Example:
        >>> from torch.utils.flop_counter import FlopCounterMode
        >>> decompose_under_autocast()
        >>> weight = torch.ones(2, 4, dtype=torch.bfloat16)
        >>> counter = FlopCounterMode(display=False)
        >>> with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), counter:
        ...     torch.einsum("bi,oi->bo", torch.ones(3, 4), weight).dtype
        torch.bfloat16
    """
    _ENTER.apply()


def _registering(original: Any) -> Any:
    def enter(self: Any) -> Any:
        # torch.compile's own modes trace programs, which are to stay what they are.
        if not self.is_infra_mode():
            _DECOMPOSING.apply()
        return original(self)

    return enter


def _register(library: Library) -> None:
    for key in _KEYS:
        for name in (*_COMPOSITE, *_FUSED):
            for operator in overloads(name):
                if torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), key):
                    continue
                if name in _FUSED:
                    library.impl(operator, _fused(operator, key), key, with_keyset=True)
                else:
                    library.impl(operator, operator.decompose, key)


_ENTER = Replacement("dispatch_mode_enter", TorchDispatchMode, "__enter__", _registering)
_DECOMPOSING = Kernels("dispatch_mode_enter", _register)


def _fused(operator: Any, key: str) -> Any:
    """A kernel that brings mixed arguments to one dtype, if a mode will call the operation."""
    dispatch_key = getattr(torch._C.DispatchKey, key)
    below_autocast = torch._C._dispatch_keyset_full_after(dispatch_key)
    device = key.removeprefix("Autocast").lower()

    def call(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if torch._C._len_torch_dispatch_stack():
            tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
            if {torch.float32, torch.bfloat16} <= {x.dtype for x in tensors}:
                dtype = torch.float32 if computes_in_fp32(device) else torch.bfloat16
                args = tuple(_in(dtype, each) for each in args)
                kwargs = {name: _in(dtype, each) for name, each in kwargs.items()}
        return operator.redispatch(keys & below_autocast, *args, **kwargs)

    return call


def _in(dtype: torch.dtype, argument: Any) -> Any:
    floating = isinstance(argument, Tensor) and argument.is_floating_point()
    return argument.to(dtype) if floating else argument
