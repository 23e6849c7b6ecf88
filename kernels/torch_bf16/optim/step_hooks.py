"""What torch wraps around every ``step()``: users' hooks, and a range in the profiler's trace."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.autograd import profiler
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from torch_bf16.model.unconverted import FOR_OTHERS

__all__ = ["hooked"]


def hooked(step: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a ``step()`` with hooks and a range in the trace, so that torch does not wrap it.

    torch opens the range even if nothing is profiled, which takes a tenth of the time that a step
    of 150 tensors takes on the host. This wrapper calls torch's only if that has something to do.
    Tools that record ranges without a profiler, such as ``ExecutionTraceObserver``, miss this one.

    Args:
        step: ``step`` method of an optimizer class, called with the optimizer and perhaps a
            closure.
    """
    by_torch = torch.optim.Optimizer.profile_hook_step(step)

    # By the method and not by its class, which would live on, and may get another method later.
    known: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()

    def is_called_by_another(own: Any) -> bool:
        """Whether a class has its own ``step()``, which torch has wrapped with the hooks."""
        if (answer := known.get(own)) is None:
            is_wrapped = getattr(own, "hooked", False)
            answer = known[own] = inspect.unwrap(own) is not step and is_wrapped
        return answer

    @wraps(step)
    def wrapper(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if is_called_by_another(type(self).step):
            return step(self, *args, **kwargs)
        # A closure may add hooks. The profiler's flag is private to torch; if it is missing,
        # torch's wrapper is always called.
        if (
            args
            or kwargs
            or getattr(profiler, "_is_profiler_enabled", True)
            or self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            # The warning about unconverted optimizers is such a hook.
            or (
                _global_optimizer_pre_hooks
                and not all(hasattr(h, FOR_OTHERS) for h in _global_optimizer_pre_hooks.values())
            )
            or _global_optimizer_post_hooks
        ):
            return by_torch(self, *args, **kwargs)
        return step(self, *args, **kwargs)

    # torch's mark on a step that it has wrapped.
    wrapper.hooked = True  # pyright: ignore[reportAttributeAccessIssue]
    return wrapper
