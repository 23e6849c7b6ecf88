"""What leaves a module reaches the user in fp32."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.nn import Module

from bf16_autoload import Patches

__all__ = ["Fp32Outputs", "map_tensors", "to_fp32"]


def map_tensors(function: Callable[[Tensor], Tensor], data: Any) -> Any:
    """``data`` with ``function`` applied to all tensors in it, in dataclasses too.

    Where that returns each tensor as it is, this is ``data`` itself.
    """
    changes: list[bool] = []

    def noted(tensor: Tensor) -> Tensor:
        result = function(tensor)
        changes.append(result is not tensor)
        return result

    mapped = apply_to_collection(data, dtype=Tensor, function=noted, allow_frozen=True)
    return mapped if any(changes) else data


def to_fp32(data: Any) -> Any:
    """``data`` with its bf16 tensors in fp32, other dtypes and other objects as they are.

    Example:
        >>> to_fp32({"loss": torch.ones((), dtype=torch.bfloat16), "n": 3})
        {'loss': tensor(1.), 'n': 3}
    """
    return map_tensors(_upcast, data)


def _in_place(data: Any) -> Any:
    """The same object, if it can be written, with its bf16 tensors in fp32."""
    converted = to_fp32(data)
    if dataclasses.is_dataclass(data) and not _is_frozen(data):
        for field in dataclasses.fields(data):
            value = getattr(converted, field.name)
            if value is not getattr(data, field.name):
                setattr(data, field.name, value)
    elif isinstance(data, MutableMapping):
        data.update(converted)
    elif isinstance(data, list):
        data[:] = converted
    else:
        return converted
    return data


def _is_frozen(data: Any) -> bool:
    return data.__dataclass_params__.frozen


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
                    outputs = method(*args, **kwargs)
                    # A step may write into its batch and return that; one callback writes into
                    # the outputs then, and another reads the batch, as anomalib's do.
                    given = any(outputs is each for each in (*args, *kwargs.values()))
                    return _in_place(outputs) if given else to_fp32(outputs)

            self._wrappers[method] = call
        return self._wrappers[method]
