"""torch's ``AveragedModel`` beside a cast model.

An average made before the cast is fp32 and follows bf16 weights; torch's functions for many tensors
at once take one dtype only. One made after it is bf16, and rounds away most of what moves it.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from torch_bf16.torch_patches import is_enabled

from .averaging import rounds_stochastically

__all__ = ["restore", "watch_averages"]

_cast: WeakSet[nn.Module] = WeakSet()
"""The models that were given to ``cast_model``."""

_warned: WeakSet[nn.Module] = WeakSet()

_original: Any = None


def watch_averages(model: nn.Module) -> None:
    """Let averages of a cast model be computed in their own dtype, and say which are bf16.

    For the whole process, until :func:`restore`.
    """
    global _original
    _cast.add(model)
    if _original is None and is_enabled("averaged_model"):
        _original = AveragedModel.update_parameters
        AveragedModel.update_parameters = functools.wraps(_original)(_update_parameters)


def restore() -> None:
    """Give ``AveragedModel`` back as it was, until the next :func:`cast_model`."""
    global _original
    if _original is not None:
        AveragedModel.update_parameters = _original
        _original = None


def _update_parameters(self: AveragedModel, model: Any) -> None:
    seen = model
    if isinstance(model, nn.Module) and not _cast.isdisjoint(model.modules()):
        pairs = [*zip(self.module.named_parameters(), model.parameters(), strict=False)]
        if any(average.dtype != p.dtype for (_, average), p in pairs):
            seen = _InDtypesOf(self.module, model)
        rounded = next(
            (
                name
                for (name, average), p in pairs
                if p.requires_grad and average.dtype == p.dtype == torch.bfloat16
            ),
            None,
        )
        if rounded and self not in _warned and not rounds_stochastically(self.multi_avg_fn):
            _warned.add(self)
            warnings.warn(
                f"{type(self).__name__} keeps its average of {rounded!r} in bfloat16, as in the "
                "cast model that it copied, and rounds it to nearest: an update that moves it by "
                "less than half a bf16 unit (0.2 to 0.4 %) is lost, at decays above 0.99 most of "
                "them. What works: torch_bf16.EMA(model, decay), which is fp32; an AveragedModel "
                "made before the model is cast; or, in 2 bytes per parameter, "
                "multi_avg_fn=torch_bf16.ema_multi_avg_fn(decay)",
                stacklevel=2,
            )
    assert _original is not None
    _original(self, seen)


class _InDtypesOf:
    """What is read of a model to average it, in the dtypes of the average."""

    def __init__(self, average: nn.Module, model: nn.Module) -> None:
        self.average, self.model = average, model

    def parameters(self) -> Iterator[Tensor]:
        return self._in_dtypes(self.model.parameters(), self.average.parameters())

    def buffers(self) -> Iterator[Tensor]:
        return self._in_dtypes(self.model.buffers(), self.average.buffers())

    def _in_dtypes(self, current: Iterable[Tensor], averages: Iterable[Tensor]) -> Iterator[Tensor]:
        for each, average in zip(current, averages, strict=True):
            yield each.detach().to(average.dtype)
