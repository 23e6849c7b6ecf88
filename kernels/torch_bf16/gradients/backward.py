"""Hooks into a backward pass: at its end, at its arrival at a module, and on sharded modules."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.utils import _pytree
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

__all__ = [
    "Passes",
    "at_end_of_backward",
    "at_outputs_of",
    "own_parameters",
    "released",
    "sharded_modules",
]

_T = TypeVar("_T")

released: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""The parameters whose gradients are freed within the backward pass, each with a weak reference to
the object that takes its step."""


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Call once the running backward pass is over, after what DDP and FSDP2 do at its end."""
    queue: Any = torch.autograd.Variable._execution_engine.queue_callback
    # They queue theirs in the middle of the pass: one that is queued at its end comes after them.
    queue(lambda: queue(call))


class Passes(Generic[_T]):
    """One object per running backward pass, whatever its thread, and also for nested passes.

    Args:
        make: makes the object when a pass first asks for it.
        finish: called with it at the end of the pass. A pass that fails has no such end, and leaves
            nothing here.
    """

    def __init__(self, make: Callable[[], _T], finish: Callable[[_T], None]) -> None:
        self._make, self._finish = make, finish
        # Autograd alone holds them, in what it calls at the end.
        self._running: WeakValueDictionary[int, _T] = WeakValueDictionary()
        # Each device has a thread of its own in a pass.
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[_T]:
        return iter(list(self._running.values()))

    def current(self) -> _T | None:
        """That of the pass that is running here; None where none is."""
        task = torch._C._current_graph_task_id()
        found = self._running.get(task)
        if found is None and task >= 0:
            with self._lock:
                found = self._running.get(task)
                if found is None:
                    found = self._running[task] = self._make()
                    at_end_of_backward(functools.partial(self._finish, found))
        return found


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
