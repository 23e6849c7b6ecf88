"""torch's ``AveragedModel`` beside a cast model.

An average made before the cast is fp32 and follows bf16 weights; torch's functions for many tensors
at once take one dtype only. An average made after the cast is bf16, and rounds away most updates.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.weak import WeakIdKeyDictionary

from torch_bf16.torch_patches import Replacement

from .averaging import rounds_stochastically
from .blended_weights import exempt
from .cast_modules import is_of_cast_model
from .lerped_averages import forget_warning

__all__ = ["watch_averages"]

_warned: WeakIdKeyDictionary = WeakIdKeyDictionary()


def watch_averages() -> None:
    """Compute averages in their own dtype, and warn about bf16 averages of a cast model.

    For the whole process.
    """
    _UPDATE.apply()


def _updating(original: Any) -> Any:
    def update_parameters(self: AveragedModel, model: Any) -> None:
        if isinstance(model, nn.Module):
            # It is not known which models are copies of a cast one: the dtypes of all are checked.
            if is_of_cast_model(model):
                exempt(self.module)
                _warn_of_bf16(self, model)
            model = _InDtypesOf(self.module, model)
        original(self, model)

    return update_parameters


_UPDATE = Replacement("averaged_model", AveragedModel, "update_parameters", _updating)


def _warn_of_bf16(average: AveragedModel, model: nn.Module) -> None:
    if average in _warned or rounds_stochastically(average.multi_avg_fn):
        return
    pairs = zip(average.module.named_parameters(), model.parameters(), strict=False)
    for (name, averaged), weight in pairs:
        if weight.requires_grad and averaged.dtype == weight.dtype == torch.bfloat16:
            _warned[average] = True
            forget_warning(averaged)
            warnings.warn(
                f"{type(average).__name__} keeps its average of {name!r} in bfloat16, as in the "
                "cast model that it copied, and rounds it to nearest: an update that moves it by "
                "less than half a bf16 spacing (0.2 to 0.4 %) is lost, at decays above 0.99 most "
                "of them. What works: torch_bf16.EMA(model, decay), which is fp32; an "
                "AveragedModel made before the model is cast, or average.module.float() once it is "
                "made; or, in 2 bytes per parameter, "
                "multi_avg_fn=torch_bf16.ema_multi_avg_fn(decay)",
                stacklevel=4,
            )
            return


class _InDtypesOf:
    """Parameters and buffers of a model, read in the dtypes of its average."""

    def __init__(self, average: nn.Module, model: nn.Module) -> None:
        self._average, self._model = average, model

    def parameters(self) -> Iterator[Tensor]:
        return _in_dtypes(self._model.parameters(), self._average.parameters())

    def buffers(self) -> Iterator[Tensor]:
        return _in_dtypes(self._model.buffers(), self._average.buffers())


def _in_dtypes(current: Iterable[Tensor], averages: Iterable[Tensor]) -> Iterator[Tensor]:
    averages = iter(averages)
    for tensor in current:
        dtype = next(averages, tensor).dtype
        yield tensor if tensor.dtype == dtype else tensor.detach().to(dtype)
