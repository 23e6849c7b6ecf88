"""Outputs of a module reach the user in fp32."""

from __future__ import annotations

import copy
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

__all__ = ["Fp32Outputs", "to_fp32"]


def to_fp32(data: Any) -> Any:
    """``data`` with its bf16 tensors in fp32, also those in dataclasses.

    If there is none, this is ``data`` itself. As in Lightning, fields with ``init=False`` stay as
    they are, unless the dataclass is frozen.

    Example:
        >>> to_fp32({"loss": torch.ones((), dtype=torch.bfloat16), "n": 3})
        {'loss': tensor(1.), 'n': 3}
    """
    changes: list[bool] = []

    def upcast(part: Any) -> Any:
        if isinstance(part, _Frozen):
            thawed = _with_fp32_fields(part)
            changes.append(thawed is not part)
            return thawed
        changes.append(part.dtype == torch.bfloat16)
        return part.float() if changes[-1] else part

    converted = apply_to_collection(data, dtype=(Tensor, _Frozen), function=upcast)
    return converted if any(changes) else data


class _FrozenKind(type):
    def __instancecheck__(cls, data: Any) -> bool:
        is_instance = dataclasses.is_dataclass(data) and not isinstance(data, type)
        return is_instance and _is_frozen(data)


class _Frozen(metaclass=_FrozenKind):
    """Any frozen dataclass; ``apply_to_collection`` refuses those, or leaves them as they are."""


def _with_fp32_fields(data: Any) -> Any:
    """A frozen dataclass with bf16 tensors in fp32; itself if there is none."""
    values = {each.name: getattr(data, each.name) for each in dataclasses.fields(data)}
    converted = {name: to_fp32(value) for name, value in values.items()}
    if all(converted[name] is value for name, value in values.items()):
        return data
    made = copy.copy(data)
    for name, value in converted.items():
        object.__setattr__(made, name, value)
    return made


def _in_place(data: Any) -> Any:
    """Convert bf16 tensors to fp32 inside ``data``, or in a copy if it cannot be modified."""
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
                    return _in_place(outputs) if is_argument else to_fp32(outputs)

            self._wrappers[method] = call
        return self._wrappers[method]
