"""What torch puts around every ``step()``: users' hooks, and a range in the profiler's trace."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch.autograd import profiler
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

__all__ = ["FOR_OTHERS", "hooked"]

FOR_OTHERS = "_bf16_for_others"
"""An attribute of hooks on all optimizers that do nothing at the steps of ours."""


def hooked(step: Callable[..., Any]) -> Callable[..., Any]:
    """A ``step()`` with hooks and a range in the trace, which torch need not wrap any more.

    torch opens the range also where nothing is profiled, which takes a tenth of what a step of 150
    tensors takes on the host. Here its wrapper is called only where there is something for it to
    do. What records ranges without a profiler, as ``ExecutionTraceObserver`` does, lacks this one.

    Args:
        step: a method of an optimizer, called with itself and perhaps a closure.
    """
    by_torch = torch.optim.Optimizer.profile_hook_step(step)

    @cache
    def is_called_by_another(kind: type) -> bool:
        """Whether a subclass has a ``step()`` of its own, around which torch has put the hooks."""
        own: Any = kind.step
        return inspect.unwrap(own) is not step and getattr(own, "hooked", False)

    @wraps(step)
    def wrapper(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if is_called_by_another(type(self)):
            return step(self, *args, **kwargs)
        # A closure may add hooks. The flag is private to torch: without it, torch's wrapper is
        # always called.
        if (
            args
            or kwargs
            or getattr(profiler, "_is_profiler_enabled", True)
            or self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            # The hosts' warning of optimizers that were not converted is such a hook.
            or any(not hasattr(each, FOR_OTHERS) for each in _global_optimizer_pre_hooks.values())
            or _global_optimizer_post_hooks
        ):
            return by_torch(self, *args, **kwargs)
        return step(self, *args, **kwargs)

    # What torch leaves on a step that it has wrapped.
    wrapper.hooked = True  # pyright: ignore[reportAttributeAccessIssue]
    return wrapper
