"""LitEma, the average of CompVis' latent-diffusion, of which many programs have a copy.

It keeps its averages in buffers, which a cast leaves in fp32, and converts each to the dtype of its
weight before it moves it. Beside a bf16 weight that makes a copy, and only the copy is moved: the
average would stay as it was made, without an error. It belongs to no library, so a class is known
by the attribute that tells which buffer follows which weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torch_bf16.torch_patches import Replacement

from .cast_modules import is_of_cast_model

__all__ = ["replace_lit_emas"]

_NAMES = "m_name2s_name"


def replace_lit_emas(warn: Callable[[str | None, str], None]) -> None:
    """Let those fp32 averages follow bf16 weights, of every class that exists by now.

    Args:
        warn: called with the name of the first trained weight whose average is bf16, or None, and
            the name of the average's class.
    """
    for each in _classes():
        _replacement(each, warn).apply()


def _classes() -> Iterator[type[nn.Module]]:
    """The modules whose ``forward`` moves such averages."""
    known, waiting = {nn.Module}, [nn.Module]
    while waiting:
        found = {*type.__subclasses__(waiting.pop())} - known
        known |= found
        waiting += found
    for each in known:
        forward = vars(each).get("forward")
        code = getattr(getattr(forward, "__wrapped__", forward), "__code__", None)
        if _NAMES in getattr(code, "co_names", ()):
            yield each


# What a replacement puts into its class keeps it, and a strong reference would keep the class.
_replacements: WeakKeyDictionary[type, ref[Replacement]] = WeakKeyDictionary()


def _replacement(kind: type[nn.Module], warn: Callable[[str | None, str], None]) -> Replacement:
    known = _replacements.get(kind)
    if known is not None and (found := known()) is not None:
        return found

    def moving(original: Any) -> Any:
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            # Copies name the model as they like, and some take more than it.
            model = next((m for m in (*args, *kwargs.values()) if isinstance(m, nn.Module)), None)
            if torch.compiler.is_compiling() or model is None or not is_of_cast_model(model):
                return original(self, *args, **kwargs)
            warn(_first_bf16(self, model), kind.__name__)
            with _InOwnDtype():
                return original(self, *args, **kwargs)

        return forward

    made = Replacement("lit_ema", kind, "forward", moving)
    _replacements[kind] = ref(made)
    return made


class _InOwnDtype(TorchFunctionMode):
    """``type_as`` returns the tensor itself, as it does where weights are fp32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is Tensor.type_as else func(*args, **(kwargs or {}))


def _first_bf16(ema: nn.Module, model: nn.Module) -> str | None:
    buffers, buffer_of = dict(ema.named_buffers(recurse=False)), getattr(ema, _NAMES, {})
    for name, weight in model.named_parameters():
        average = buffers.get(buffer_of.get(name, ""))
        if average is not None and average.dtype == weight.dtype == torch.bfloat16:
            return name
    return None
