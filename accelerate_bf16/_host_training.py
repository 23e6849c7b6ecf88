"""The seam to what an ``Accelerator`` does between ``prepare`` and the end of training.

Each function takes a method of ``Accelerator`` and returns the one that replaces it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .modes import canonical

__all__ = [
    "autocast",
    "clip_grad_norm_",
    "clip_grad_value_",
    "init_trackers",
    "log",
    "mode_of",
]


def mode_of(accelerator: Any) -> str | None:
    """The mode that an ``Accelerator`` has, if it is one of ours."""
    return canonical(accelerator.state._mixed_precision)


def _refuse_released(accelerator: Any, parameters: Any) -> list[Any]:
    parameters = [parameters] if hasattr(parameters, "grad") else list(parameters)
    if mode_of(accelerator) is not None and all(p.grad is None for p in parameters):
        import torch_bf16

        # Raises where gradients are gone because they were released: nothing would be clipped.
        torch_bf16.total_norm(parameters)
    return parameters


def clip_grad_value_(original: Any) -> Any:
    def clip_grad_value_(self: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, _refuse_released(self, parameters), *args, **kwargs)

    return clip_grad_value_


def autocast(original: Any) -> Any:
    @contextmanager
    def autocast(self: Any, autocast_handler: Any = None) -> Iterator[None]:
        if mode_of(self) is None:
            context = original(self, autocast_handler)
        else:
            from .models import autocast as bf16_autocast

            context = bf16_autocast(self.device.type, autocast_handler or self.autocast_handler)
        with context:
            yield

    return autocast


def clip_grad_norm_(original: Any) -> Any:
    def clip_grad_norm_(
        self: Any, parameters: Any, max_norm: Any, norm_type: Any = 2, *args: Any, **kwargs: Any
    ) -> Any:
        if mode_of(self) is None or norm_type != 2:
            parameters = _refuse_released(self, parameters)
            return original(self, parameters, max_norm, norm_type, *args, **kwargs)
        from .clipping import clip_by_norm

        parameters = [parameters] if hasattr(parameters, "grad") else list(parameters)
        return clip_by_norm(parameters, max_norm, self._optimizers)

    return clip_grad_norm_


def init_trackers(original: Any) -> Any:
    def init_trackers(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if mode_of(self) is not None:
            from .monitoring import watch

            watch(self)
        return result

    return init_trackers


def log(original: Any) -> Any:
    def log(self: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
        if mode_of(self) is not None:
            from .monitoring import fresh_metrics

            # The script's own names win, and its step numbers are those of the monitor.
            values = {**fresh_metrics(self), **values}
        return original(self, values, *args, **kwargs)

    return log
