"""A bf16 module works wherever it is called, not in the steps of its host alone.

Callbacks, loaders, loggers and whoever has a fitted module call it or a part of it, often with fp32
inputs, where no host has entered the plugin's context. So ``forward`` of a module and of each of
its parts brings that context along, as an attribute of the instance.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import MethodType
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from .fp32_outputs import to_fp32

__all__ = ["CarriedForward", "carry", "within"]


class _Calls(threading.local):
    depth = 0


_calls = _Calls()


@contextmanager
def within() -> Iterator[None]:
    """While it lasts, this thread is in a step or in a forward: what is around a part counts."""
    _calls.depth += 1
    try:
        yield
    finally:
        _calls.depth -= 1


def carry(module: nn.Module, lean: bool) -> None:
    """Let a module and its parts bring their context along, once.

    Args:
        module: cast already; mutated.
        lean: without autocast, inputs are cast instead.
    """
    for each in module.modules():
        carried = each.__dict__.get("forward")
        if isinstance(carried, CarriedForward):
            carried.lean = lean
        elif _is_called(each) and _is_bf16(each):
            each.__dict__["forward"] = CarriedForward(each, each is module, lean)


def _is_called(module: nn.Module) -> bool:
    # What is compiled calls the module in it, which is a part, too.
    if isinstance(module, torch.jit.ScriptModule) or "_orig_mod" in module._modules:
        return False
    return type(module).forward is not nn.Module.forward


def _is_bf16(module: nn.Module) -> bool:
    return any(p.dtype == torch.bfloat16 for p in module.parameters())


class CarriedForward:
    """``forward`` of one instance. To others it looks like the method that it stands for.

    Called from outside, it enters autocast (``lean``: casts the inputs) and returns fp32; within a
    step or a forward it is the method, the whole module's with results in fp32. It goes by itself
    once no parameter is bf16, after ``module.float()``. Copies and pickles of the module keep it.
    """

    def __init__(self, module: nn.Module, whole: bool, lean: bool) -> None:
        self.lean = lean
        self._whole = whole
        self._own = module.__dict__.get("forward")  # compiled, or another library's
        self._module = weakref.ref(module)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        module: Any = self._module()
        return self._own or type(module).forward.__get__(module)

    def __getattr__(self, name: str) -> Any:
        if name in ("_own", "_module"):  # it is being unpickled
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)

    @property
    def __class__(self) -> type:
        return MethodType  # to TorchScript and inspect, which read the method's source

    def __reduce__(self) -> tuple[Any, ...]:
        return _blank, (), {**self.__dict__, "_module": self._module()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _module=weakref.ref(state["_module"]))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward, fp32 = self.__wrapped__, self._whole and not self.lean
        if torch.compiler.is_compiling():
            if not fp32:
                return forward(*args, **kwargs)
            with self._autocast():
                return to_fp32(forward(*args, **kwargs))
        if _calls.depth or torch.is_autocast_enabled(self._device()):
            outputs = forward(*args, **kwargs)
            return to_fp32(outputs) if fp32 else outputs
        if not _is_bf16(module := self._module()):  # pyright: ignore[reportArgumentType]
            _take_off(module)
            return forward(*args, **kwargs)
        if self.lean:
            args, kwargs = apply_to_collection((args, kwargs), Tensor, _to_bf16)
        with within(), nullcontext() if self.lean else self._autocast():
            return to_fp32(forward(*args, **kwargs))

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self._device(), dtype=torch.bfloat16, cache_enabled=False)

    def _device(self) -> str:
        return next(self._module().parameters()).device.type  # pyright: ignore


def _blank() -> CarriedForward:
    return CarriedForward.__new__(CarriedForward)


def _take_off(module: Any) -> None:
    for each in module.modules():
        carried = each.__dict__.get("forward")
        if isinstance(carried, CarriedForward):
            del each.__dict__["forward"]
            if carried._own is not None:
                each.__dict__["forward"] = carried._own


def _to_bf16(tensor: Tensor) -> Tensor:
    return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
