"""What happens in a backward pass: its end, its arrival at a module, and sharded gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["at_end_of_backward", "at_outputs_of", "own_parameters", "released", "sharded_modules"]

released: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""The parameters whose gradients die within the backward pass."""


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Call once the running backward pass is over, after what DDP and FSDP2 do at its end."""
    queue: Any = torch.autograd.Variable._execution_engine.queue_callback
    # They queue theirs in the middle of the pass: one that is queued at its end comes after them.
    queue(lambda: queue(call))


def sharded_modules(model: nn.Module, format: str) -> Iterator[nn.Module]:
    """The modules that ``fully_shard`` was applied to.

    Raises:
        ValueError: one of them reduces gradients in bf16, which undoes the format.
    """
    for name, module in model.named_modules():
        # What fully_shard adds to a module's class.
        state: Any = getattr(module, "_get_fsdp_state", None)
        if state is None:
            continue
        dtype = state()._mp_policy.reduce_dtype
        reduces_bf16 = any(p.dtype == torch.bfloat16 for p in own_parameters(module))
        if dtype != torch.float32 and reduces_bf16:
            raise ValueError(
                f"gradients cannot be accumulated in {format!r} for {name or 'the model'!r}: "
                f"fully_shard reduces its gradients in {dtype or 'bf16'}, and sums them so without "
                "gradient synchronisation. Use fully_shard(module, "
                "mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))"
            )
        yield module


def own_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Those that a sharded module gathers and reduces itself, not a sharded module in it."""
    found = list(module.parameters(recurse=False))
    for child in module.children():
        if not hasattr(child, "_get_fsdp_state"):
            found += own_parameters(child)
    return found


def at_outputs_of(module: nn.Module, call: Callable[[], None]) -> RemovableHandle:
    """Call each time that a backward pass arrives at what a module returned until then."""

    def hook_outputs(module: nn.Module, arguments: Any, outputs: Any) -> None:
        for each in _pytree.tree_leaves(outputs):
            if isinstance(each, Tensor) and each.requires_grad:
                each.register_hook(lambda _: call())

    return module.register_forward_hook(hook_outputs)
