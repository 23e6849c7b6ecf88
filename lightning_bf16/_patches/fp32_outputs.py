"""What leaves a module reaches the user in fp32."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.nn import Module

from bf16_autoload import Patches

__all__ = ["Fp32Outputs", "map_tensors", "to_fp32"]


def map_tensors(function: Callable[[Tensor], Tensor], data: Any) -> Any:
    """``data`` with ``function`` applied to all tensors in it, in dataclasses too."""
    return apply_to_collection(data, dtype=Tensor, function=function, allow_frozen=True)


def to_fp32(data: Any) -> Any:
    """``data`` with its bf16 tensors in fp32, other dtypes and other objects as they are.

    Example:
        >>> to_fp32({"loss": torch.ones((), dtype=torch.bfloat16), "n": 3})
        {'loss': tensor(1.), 'n': 3}
    """
    return map_tensors(_upcast, data)


def _upcast(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor


class Fp32Outputs:
    """Lets methods of one module return fp32 where they would return bf16, for a while.

    Precision plugins have no say over what a step of a LightningModule returns, and a hook of the
    module sees ``forward`` alone. So the methods are shadowed by attributes of the instance, which
    the strategies, also those that redirect a step through DDP's forward, look up by name.

    Args:
        module: whose methods; mutated while :meth:`patch` lasts.
        context: around each call of one.
    """

    def __init__(self, module: Module, context: Callable[[], AbstractContextManager[Any]]) -> None:
        self.module, self._context = module, context
        # By method and kept: a new one at each step would make a compiled module compile again.
        self._wrappers: dict[Any, Callable[..., Any]] = {}

    @contextmanager
    def patch(self, *methods: str) -> Iterator[None]:
        """While it lasts, these methods return fp32."""
        with Patches() as patches:
            for name in methods:
                if method := getattr(self.module, name, None):
                    patches.set(self.module, name, self._wrapper(method))
            yield

    def _wrapper(self, method: Callable[..., Any]) -> Callable[..., Any]:
        if method not in self._wrappers:

            @functools.wraps(method)
            def call(*args: Any, **kwargs: Any) -> Any:
                with self._context():
                    return to_fp32(method(*args, **kwargs))

            self._wrappers[method] = call
        return self._wrappers[method]
