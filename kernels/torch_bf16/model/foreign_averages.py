"""Averages of a cast model that torch or another library keeps.

One that was made before the cast is fp32, and torch's functions take one dtype only: without a cast
it could not follow bf16 weights. One that was made after the cast is bf16 and rounds away most
updates; a warning names the first. torch's ``AveragedModel`` has a method for all of its tensors,
timm's ``ModelEmaV3`` and ultralytics' ``ModelEMA`` call ``torch._foreach_lerp_`` on copies of the
weights, and ema-pytorch's ``EMA`` calls ``Tensor.lerp_`` on one after the other. LitEma, of which
programs have copies, is in a file of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from torch_bf16.errors import warn
from torch_bf16.parameters import parameters_in
from torch_bf16.sharding import local
from torch_bf16.torch_patches import Replacement

from .averaging import rounds_stochastically
from .blended_weights import exempt, named_elsewhere
from .cast_modules import bf16_weights, is_of_cast_model
from .lit_ema import replace_lit_emas
from .watched_weight import has_address

__all__ = ["watch_averages"]

# A bf16 tensor that lerp_ moves may be anything, such as a moment of AdamW. After so many lookups,
# which go through all weights of cast models, none is looked up any more.
_LOOKUPS = 100
_lookups = _LOOKUPS
_warned = False


def watch_averages() -> None:
    """Compute averages in their own dtype, and warn of the first one in bf16 from now on.

    For the whole process; :func:`cast_model` calls it.
    """
    global _lookups, _warned
    _lookups, _warned = _LOOKUPS, False
    for each in _REPLACEMENTS:
        each.apply()
    replace_lit_emas(_warn)


def _updating(original: Any) -> Any:
    def update_parameters(self: AveragedModel, model: Any) -> None:
        if isinstance(model, nn.Module):
            # It is not known which models are copies of a cast one: the dtypes of all are checked.
            if is_of_cast_model(model):
                exempt(self.module)
                if not _warned and not rounds_stochastically(self.multi_avg_fn):
                    _warn(_followed_by(self.module, model), type(self).__name__)
            model = _InDtypesOf(self.module, model)
        original(self, model)

    return update_parameters


def _moving_many(original: Any) -> Any:
    def foreach_lerp_(self: Any, tensors1: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or len(self) != len(tensors1):
            return original(self, tensors1, *args, **kwargs)
        # Stock optimizers come here, too, with a thousand fp32 tensors.
        if any(each.dtype == torch.bfloat16 for each in tensors1):
            pairs = list(zip(self, tensors1, strict=True))
            if _is_average(*args, **kwargs):
                _warn(_look_up(pairs), "torch._foreach_lerp_")
            tensors1 = [_in_dtype_of(average, value) for average, value in pairs]
        return original(self, tensors1, *args, **kwargs)

    return foreach_lerp_


def _moving_one(original: Any) -> Any:
    def lerp_(self: Any, end: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not isinstance(end, Tensor):
            return original(self, end, *args, **kwargs)
        end = _in_dtype_of(self, end)
        if _is_average(*args, **kwargs):
            _warn(_look_up([(self, end)]), "Tensor.lerp_")
        return original(self, end, *args, **kwargs)

    return lerp_


_REPLACEMENTS = (
    Replacement("averaged_model", AveragedModel, "update_parameters", _updating),
    Replacement("foreach_lerp", torch, "_foreach_lerp_", _moving_many),
    Replacement("tensor_lerp", Tensor, "lerp_", _moving_one),
)


_NARROWING = torch.float32, torch.bfloat16


def _in_dtype_of(average: Tensor, value: Tensor) -> Tensor:
    """A bf16 value in fp32 if its average is; torch refuses other pairs, with or without us."""
    return value.float() if (average.dtype, value.dtype) == _NARROWING else value


def _is_average(weight: Any = None, **_: Any) -> bool:
    """Whether a weight of ``lerp_`` may be that of an average that is to be looked up."""
    return _lookups > 0 and isinstance(weight, float) and 0 < weight < 1


def _look_up(pairs: Iterable[tuple[Tensor, Tensor]]) -> str | None:
    """The name of the first trained weight that an average in bf16 is moved towards."""
    global _lookups
    narrow = [
        tuple(local(each).data_ptr() for each in pair)
        for pair in pairs
        if all(each.dtype == torch.bfloat16 and has_address(local(each)) for each in pair)
    ]
    if not narrow:
        return None
    _lookups -= 1
    # By address, because values from a state dict are views of the weights.
    weights = {local(p).data_ptr(): (name, p) for name, _, _, p in bf16_weights()}
    for average, value in narrow:
        name, weight = weights.get(value, ("", None))
        # A target network inside the model is watched by blended_weights, which knows what helps.
        if weight is not None and weight.requires_grad and average not in weights:
            return name
    return None


def _followed_by(average: nn.Module, model: nn.Module) -> str | None:
    """The name of the first trained weight of a model whose average is bf16, as it is."""
    pairs = zip(average.named_parameters(), parameters_in(model), strict=False)
    for (name, averaged), weight in pairs:
        if weight.requires_grad and averaged.dtype == weight.dtype == torch.bfloat16:
            return name
    return None


def _warn(name: str | None, mover: str) -> None:
    global _lookups, _warned
    if name is None or _warned:
        return
    _lookups, _warned = 0, True
    named_elsewhere()
    warn(
        f"an average of {name!r} is bfloat16, as in the cast model that it copied, and {mover} "
        "rounds it to nearest: an update that moves it by less than half a bf16 spacing (0.2 to "
        "0.4 %) is lost, at decays above 0.99 most of them. What works: torch_bf16.EMA(model, "
        "decay), which is fp32; to make the average before the model is cast, or to call float() "
        "on its module once it is made, as it then follows the bf16 weights in fp32; or, in 2 "
        "bytes per parameter, AveragedModel with multi_avg_fn=torch_bf16.ema_multi_avg_fn(decay)",
    )


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
