"""Outputs of a module reach the user in fp32."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch.nn import Module

from bf16_autoload import Patches
from torch_bf16 import plugin_api

__all__ = ["Fp32Outputs"]


def _in_place(data: Any) -> Any:
    """Convert bf16 tensors to fp32 inside ``data``, or in a copy if it cannot be modified."""
    converted = plugin_api.widen_tensors(data)
    if converted is data:
        return data
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


class Fp32Outputs:
    """Temporarily makes methods of one module return fp32 instead of bf16.

    A precision plugin does not see what a step of a LightningModule returns, and a hook of the
    module sees only ``forward``. So the methods are shadowed by attributes of the instance, which
    the strategies, including those that redirect a step through DDP's forward, look up by name.

    Args:
        module: the module that has the methods; mutated while :meth:`patch` is active.
        context: returns the context around each call of a method.
    """

    def __init__(self, module: Module, context: Callable[[], AbstractContextManager[Any]]) -> None:
        self._module, self._context = module, context
        # Kept by method: a new wrapper at each step would recompile a compiled module.
        self._wrappers: dict[Any, Callable[..., Any]] = {}

    @contextmanager
    def patch(self, name: str) -> Iterator[None]:
        """A context in which the method of this name returns fp32."""
        with Patches() as patches:
            if method := getattr(self._module, name, None):
                patches.set(self._module, name, self._wrapper(method))
            yield

    def _wrapper(self, method: Callable[..., Any]) -> Callable[..., Any]:
        if method not in self._wrappers:

            @functools.wraps(method)
            def call(*args: Any, **kwargs: Any) -> Any:
                with self._context():
                    outputs = method(*args, **kwargs)
                    # A step may write into its batch and return it. Converted in place, because
                    # one callback may then write to the outputs and another read the batch, as
                    # anomalib's do.
                    is_argument = any(outputs is each for each in (*args, *kwargs.values()))
                    return _in_place(outputs) if is_argument else plugin_api.widen_tensors(outputs)

            self._wrappers[method] = call
        return self._wrappers[method]
