"""What leaves a module reaches the user in fp32."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.nn import Module

__all__ = ["Fp32Results", "to_fp32"]

_ABSENT = object()


def to_fp32(data: Any) -> Any:
    """``data`` with its bf16 tensors in fp32, other dtypes and other objects as they are.

    Example:
        >>> to_fp32({"loss": torch.ones((), dtype=torch.bfloat16), "n": 3})
        {'loss': tensor(1.), 'n': 3}
    """
    if isinstance(data, Tensor):
        return _widened(data)
    return apply_to_collection(data, dtype=Tensor, function=_widened, allow_frozen=True)


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor


class Fp32Results:
    """Lets methods of one module return fp32 where they would return bf16, for a while.

    Precision plugins have no say over what a step of a LightningModule returns, and a hook of the
    module sees ``forward`` alone. So the methods are shadowed by instance attributes, which the
    strategies, also those that redirect a step through DDP's forward, look up by name while the
    context lasts; what was there before is put back at its end.

    Args:
        module: whose methods return fp32 inside :meth:`of`.

    Example:
        >>> layer = torch.nn.Linear(2, 2, dtype=torch.bfloat16)
        >>> with Fp32Results(layer).of("forward"):
        ...     layer(torch.ones(2, dtype=torch.bfloat16)).dtype
        torch.float32
    """

    def __init__(self, module: Module) -> None:
        self.module = module
        # One wrapper per method for good: a new one at each step would make a compiled module
        # compile again.
        self._wrappers: dict[str, tuple[Any, Callable[..., Any]]] = {}

    @contextmanager
    def of(self, *methods: str) -> Iterator[None]:
        """While it lasts, these methods return fp32."""
        attributes = self.module.__dict__
        methods = tuple(name for name in methods if hasattr(self.module, name))
        before = {name: attributes.get(name, _ABSENT) for name in methods}
        attributes.update({name: self._wrapper(name) for name in methods})
        try:
            yield
        finally:
            for name, attribute in before.items():
                if attribute is _ABSENT:
                    attributes.pop(name, None)
                else:
                    attributes[name] = attribute

    def _wrapper(self, name: str) -> Callable[..., Any]:
        method = getattr(self.module, name)
        known = self._wrappers.get(name)
        if known is None or known[0] != method:
            known = self._wrappers[name] = (method, _returning_fp32(method))
        return known[1]


def _returning_fp32(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return to_fp32(method(*args, **kwargs))

    return call
