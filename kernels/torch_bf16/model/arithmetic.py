"""What the operations of a bf16 model compute in: bf16 by autocast, bf16 throughout, or fp32.

fp32 over bf16 weights is autocast to fp32. torch's rules support that as they are, but its class
refuses the dtype on CPUs. Two more things are needed. An operation saves the fp32 copy of its
weight for the backward pass, and copies of all weights would take more than bf16 saves: the bf16
weight is saved in its place and cast again. And activation checkpointing re-enters torch's class
with the dtype that it found.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_bf16.argument_checks import check_compute
from torch_bf16.torch_patches import Replacement

from .autocast import widen_under_fp32
from .mixed_dtypes import name_parts_in_errors

__all__ = ["arithmetic", "is_called_by_checkpoint", "is_in_backward"]

_autograd: Any = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]


def arithmetic(
    device_type: str, compute: str = "autocast", **autocast: Any
) -> AbstractContextManager[Any]:
    """The context in which the operations of a bf16 model compute.

    Args:
        device_type: where the tensors are, ``"cpu"`` or ``"cuda"``.
        compute: ``"autocast"`` for ``torch.autocast`` to bf16. ``"fp32"`` for autocast to fp32:
            each operation casts its weights, and the copy is freed after it. ``"bf16"`` for no
            autocast: every operation computes in the dtype of its arguments, and an error about
            two dtypes names the part of the model that they met in.
        **autocast: settings of ``torch.autocast`` other than device and dtype.

    Raises:
        ValueError: ``compute`` is unknown.

    Example:
        >>> net = torch_bf16.cast_model(torch.nn.Linear(4, 4))
        >>> with arithmetic("cpu", "fp32"):
        ...     y = net(torch.ones(2, 4))
        >>> y.sum().backward()
        >>> y.dtype, net.weight.dtype, net.weight.grad.dtype
        (torch.float32, torch.bfloat16, torch.bfloat16)
    """
    check_compute(compute)
    if compute == "bf16":
        return nullcontext() if torch.compiler.is_compiling() else name_parts_in_errors()
    # The weights are bf16 already: a cache of cast weights would only hold on to memory.
    settings = {"cache_enabled": False, **autocast}
    if compute == "fp32":
        return _to_fp32(device_type, settings)
    return torch.autocast(device_type, dtype=torch.bfloat16, **settings)


def is_in_backward() -> bool:
    """Whether a backward pass is under way, which may compute checkpointed forwards again."""
    # Up to torch 2.11 this query breaks the graph, and graphs are traced in forward passes only.
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def is_called_by_checkpoint() -> bool:
    """Whether torch's activation checkpointing is among the callers, in either pass."""
    if torch.compiler.is_compiling():  # the frames are those of the compiler, which warns
        return False
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != "torch.utils.checkpoint":
        frame = frame.f_back
    return frame is not None


# torch.compile cannot trace it: the calls inside become a graph of their own.
@torch._disable_dynamo  # pyright: ignore[reportPrivateImportUsage]
def _to_fp32(device_type: str, settings: dict[str, Any]) -> _ToFp32:
    return _ToFp32(device_type, **settings)


class _ToFp32(torch.autocast):
    def __init__(self, device_type: str, **settings: Any) -> None:
        # A dtype that torch accepts on every device.
        super().__init__(device_type, dtype=torch.float16, **settings)
        self.fast_dtype = torch.float32
        self._saving = torch.autograd.graph.saved_tensors_hooks(_pack, _unpack)
        _AUTOCAST_INIT.apply()
        widen_under_fp32()

    @torch._disable_dynamo  # pyright: ignore[reportPrivateImportUsage]
    def __enter__(self) -> Any:
        # A checkpoint has hooks of its own, which must see every saved tensor; the transforms of
        # torch.func that differentiate allow none.
        allowed = _autograd._saved_tensors_hooks_is_enabled()
        self._saves = self._enabled and allowed and not is_called_by_checkpoint()
        if self._saves:
            self._saving.__enter__()
        return super().__enter__()

    @torch._disable_dynamo  # pyright: ignore[reportPrivateImportUsage]
    def __exit__(self, kind: Any, error: Any, trace: Any) -> Any:
        try:
            return super().__exit__(kind, error, trace)
        finally:
            if self._saves:
                self._saving.__exit__(kind, error, trace)


class _Weight(NamedTuple):
    """A bf16 weight saved in place of (a view of) its fp32 copy, with the layout of the view."""

    weight: Tensor
    version: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


def _pack(saved: Tensor) -> Tensor | _Weight:
    copy = saved if saved._base is None else saved._base
    cast = copy.grad_fn
    if copy.dtype != torch.float32 or cast is None or cast.name() != "ToCopyBackward0":
        return saved
    weight: Any = getattr(cast.next_functions[0][0], "variable", None)
    plain = type(weight) in (Tensor, nn.Parameter) and weight.dtype == torch.bfloat16
    # Another cast gives the numbers of the copy only if nothing has written it.
    same = plain and weight.stride() == copy.stride() and copy._version == 0
    # A complex or negated view has the copy's memory, and other numbers.
    as_it_lies = saved.dtype == copy.dtype and not saved.is_neg()
    if not same or not as_it_lies or weight.device != copy.device:
        return saved
    layout = saved.size(), saved.stride(), saved.storage_offset()
    return _Weight(weight.detach(), weight._version, *layout)


def _unpack(saved: Tensor | _Weight) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    if saved.weight._version != saved.version:
        raise RuntimeError(
            f"a bfloat16 weight of shape {tuple(saved.weight.shape)} that the backward pass needs "
            f"was modified by an inplace operation: it is at version {saved.weight._version}, and "
            f"the forward pass saw version {saved.version}. Step, or load weights, after backward()"
        )
    return saved.weight.float().as_strided(saved.size, saved.stride, saved.offset)


def _letting_checkpoints_enter(original: Any) -> Any:
    @torch._disable_dynamo  # pyright: ignore[reportPrivateImportUsage]
    def init(
        self: Any,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        fp32 = enabled and dtype == torch.float32 and is_in_backward()
        original(self, device_type, torch.float16 if fp32 else dtype, enabled, cache_enabled)
        if fp32:
            self.fast_dtype = dtype

    return init


_AUTOCAST_INIT = Replacement(
    "autocast_init", torch.autocast, "__init__", _letting_checkpoints_enter
)
