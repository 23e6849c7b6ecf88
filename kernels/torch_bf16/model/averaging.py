"""Exponential moving averages of weights, in fp32 or in bf16 with stochastic rounding.

At a decay of 0.9999 an average in bf16, rounded to nearest, never moves at all: a step of bf16 is
0.4 % of it. Rounded stochastically it is right on average.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from torch_bf16.argument_checks import check_module
from torch_bf16.engine.batch import Batch, Task, alike
from torch_bf16.engine.wrappers import optimizer_for, owners
from torch_bf16.errors import with_article
from torch_bf16.formats import BF16_STOCHASTIC, FP32
from torch_bf16.rules import AVERAGE
from torch_bf16.sharding import Span, any_flattened, local, missing_memory, shard_of

from .blended_weights import exempt

__all__ = ["EMA", "ema_multi_avg_fn", "rounds_stochastically"]

_FORMATS = {each.planes[0].dtype: each for each in (FP32, BF16_STOCHASTIC)}
_DTYPES = {each.name: dtype for dtype, each in _FORMATS.items()}


class _Averages:
    """Moves averages towards values, with one kernel call for all tensors of a kind.

    Its batches are reused as long as the averages stay where they are, and are not copied with it.
    """

    def __init__(self, seed: int, backend: str | None) -> None:
        self._seed, self._backend = seed, backend
        self._made_for: list[Any] = []
        self._batches: list[tuple[Batch, Sequence[str]]] = []

    def __reduce__(self) -> Any:
        return _Averages, (self._seed, self._backend)

    def move(
        self, averages: Mapping[str, Tensor], values: Mapping[str, Tensor], rate: float, step: int
    ) -> None:
        """``average = average + (value - average) * rate``, in place.

        Args:
            averages: tensors by name; mutated. Names and ``step`` key the noise. Integer tensors,
                such as a counter, are set to the value.
            values: tensors of the same shapes, by the same names.
            rate: share of the value in the new average.
            step: number of the update, from 1.
        """
        copies = {}
        for name, average in averages.items():
            if {average.dtype, values[name].dtype} <= _FORMATS.keys():
                # Kernels write through addresses, in row-major order.
                copies[name] = average.detach().contiguous()
            elif not (average.is_floating_point() or average.is_complex()):
                average.copy_(values[name])
            else:
                average.lerp_(values[name].to(average.dtype), rate)
        made_for = [(n, each.data_ptr(), each.dtype, values[n].dtype) for n, each in copies.items()]
        if made_for != self._made_for:
            self._make(copies, values)
            self._made_for = made_for
        for batch, names in self._batches:
            device = batch.variant.device
            inputs = [values[n].detach().to(device).resolve_neg().contiguous() for n in names]
            batch.run_alike(inputs, step, (rate,))
        for name, copy in copies.items():
            if copy.data_ptr() != averages[name].data_ptr():
                averages[name].copy_(copy)

    def _make(self, copies: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
        spans = [Span.of_whole(f"average of {name}", each.shape) for name, each in copies.items()]
        tasks = [
            Task(span, AVERAGE, (_FORMATS[copy.dtype],), ((copy,),), values[name].dtype)
            for span, (name, copy) in zip(spans, copies.items(), strict=True)
        ]
        self._batches = []
        for pairs in alike(zip(copies, tasks, strict=True), lambda pair: pair[1].variant):
            names, batched = zip(*pairs, strict=True)
            self._batches.append((Batch(batched, self._seed, self._backend), names))


def _check_decay(decay: float, seed: int) -> None:
    number = isinstance(decay, Real) and not isinstance(decay, bool)
    if not (number and 0.0 <= float(decay) <= 1.0):
        raise ValueError(f"decay={decay!r} must be a number between 0 and 1")
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise ValueError(f"seed={seed!r} must be an int")


def _refuse(tensors: Iterable[Tensor]) -> None:
    sharded = False
    for each in tensors:
        if shard_of(each).sharded:
            sharded = True
        elif local(each) is not each or missing_memory(each):
            kind = type(each)
            raise NotImplementedError(
                f"an average of a {kind.__module__}.{kind.__qualname__}, which wraps the memory of "
                "a weight, cannot be kept. Make the EMA before the model is converted, and update "
                "it with a plain copy that load_state_dict() gave these weights. Nothing was "
                "averaged"
            )
    if sharded:
        raise NotImplementedError(
            "an average of sharded parameters cannot be kept: each rank has a part of them. Make "
            "an EMA of a whole copy before sharding, and call update_parameters() with another "
            "one, into which torch.distributed.checkpoint.state_dict.get_model_state_dict(model, "
            "options=StateDictOptions(full_state_dict=True)) was loaded. Nothing was averaged"
        )


def ema_multi_avg_fn(
    decay: float = 0.999, *, seed: int = 0, backend: str | None = None
) -> Callable[[Sequence[Tensor], Sequence[Tensor], Any], None]:
    """A ``multi_avg_fn`` for ``torch.optim.swa_utils.AveragedModel``.

    Like ``get_ema_multi_avg_fn`` of torch, ``average + (value - average) * (1 - decay)``, with
    averages in bf16 rounded stochastically. The noise depends on seed, number of the update,
    position and element: the same on every replica.

    Raises:
        ValueError: ``decay`` is not between 0 and 1.

    Example:
        >>> average = torch.optim.swa_utils.AveragedModel(
        ...     model, multi_avg_fn=torch_bf16.ema_multi_avg_fn(0.9999))
        >>> average.update_parameters(model)
    """
    _check_decay(decay, seed)
    return functools.partial(_move_all, _Averages(seed, backend), decay)


def rounds_stochastically(function: Any) -> bool:
    """Whether a function was made by :func:`ema_multi_avg_fn`."""
    return isinstance(function, functools.partial) and function.func is _move_all


def _move_all(
    kept: _Averages,
    decay: float,
    averages: Sequence[Tensor],
    values: Sequence[Tensor],
    n_averaged: Any,
) -> None:
    _refuse([*averages, *values])
    ours = {f"#{n}": each for n, each in enumerate(averages)}
    theirs = {f"#{n}": each for n, each in enumerate(values)}
    kept.move(ours, theirs, 1.0 - decay, int(n_averaged))


def _exact(model: nn.Module, optimizers: Iterable[Any]) -> dict[str, Tensor]:
    """The fp32 weights of a model that have an exact master in one of the optimizers, by name."""
    of_parameters, found = owners(optimizers), {}
    for name, parameter in model.named_parameters():
        owner = of_parameters.get(parameter)
        if owner is not None and parameter.dtype == torch.bfloat16:
            format_ = owner.recipe.format_of("weights", parameter.shape, parameter.dtype)
            if len(format_.planes) > 1:
                found[name] = owner.exact_weight(parameter)
    return found


class EMA(AveragedModel):
    """An exponential moving average of a module's weights, as a module of its own.

    A ``torch.optim.swa_utils.AveragedModel``: ``update_parameters(model)`` after each step,
    ``ema(x)`` to compute with the average, ``state_dict()`` to save it. The first update copies.
    Where weights have exact masters, ``update_parameters(model, optimizer)`` averages those: bf16
    weights follow steps that are smaller than their spacing with a delay.

    Args:
        model: the module to average; copied, not changed.
        decay: share of the average that an update keeps.
        format: format of the averages: ``"fp32"`` (4 bytes per element), ``"bf16_stochastic"`` (2),
            or None for the one that fits each parameter's dtype.
        use_buffers: average floating-point buffers too; else they are copied at each update.
        device: where the average is kept; None for the model's.
        seed: seed of the rounding noise, which parameters' names key; the same on every replica.
        backend: name of the backend; None for the best that works.

    Raises:
        ValueError: ``model`` is not a module, or ``decay``, ``format`` or ``seed`` cannot be used.
        NotImplementedError: ``model`` is sharded, or FSDP1 has flattened it.

    Example:
        >>> ema = torch_bf16.EMA(model, decay=0.9999)
        >>> ema.update_parameters(model)
        >>> with ema.swapped(model):
        ...     prediction = model(torch.ones(1, 4))
    """

    def __init__(
        self,
        model: nn.Module,
        decay: float = 0.999,
        *,
        format: str | None = "fp32",
        use_buffers: bool = False,
        device: torch.device | str | None = None,
        seed: int = 0,
        backend: str | None = None,
    ) -> None:
        check_module("EMA", model)
        _check_decay(decay, seed)
        if format not in (None, *_DTYPES):
            raise ValueError(f"format={format!r} must be one of {', '.join(_DTYPES)}, or None")
        if any_flattened(model.parameters()):
            raise NotImplementedError(
                f"EMA was given {with_article(model)} inside FullyShardedDataParallel (FSDP1), "
                "which cannot be copied. Shard with torch.distributed.fsdp.fully_shard (FSDP2)"
            )
        _refuse(model.parameters())
        super().__init__(model, device, use_buffers=use_buffers)  # pyright: ignore[reportArgumentType]
        self.decay, self.seed, self.backend = decay, seed, backend
        self._averages = _Averages(seed, backend)
        if format is not None:
            for parameter in self.module.parameters():
                if parameter.is_floating_point():
                    parameter.data = parameter.data.to(_DTYPES[format])

    @torch.no_grad()
    def update_parameters(self, model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
        """Move the average towards the weights that ``model`` has now.

        Args:
            model: the module that is averaged.
            optimizers: the optimizers that have its exact masters, also in a host's wrapper: the
                average is then one of fp32 weights, which takes a temporary fp32 copy of them. A
                weight without a master is averaged as it is, without bias if it is rounded
                stochastically.

        Raises:
            ValueError: ``model`` is another one, or an optimizer is not one of this package.
            NotImplementedError: ``model`` is sharded.
        """
        check_module("update_parameters", model)
        holders = [optimizer_for("update_parameters", each) for each in optimizers]
        exempt(self.module)
        _refuse(model.parameters())
        ours, theirs = self._pairs("update_parameters", model)
        theirs |= _exact(model, holders)
        buffers, others = dict(self.module.named_buffers()), dict(model.named_buffers())
        if self.n_averaged == 0:
            for name, average in ours.items():
                average.copy_(theirs[name])
        else:
            self._averages.move(ours, theirs, 1.0 - self.decay, int(self.n_averaged) + 1)
        if not self.use_buffers:
            for name, buffer in buffers.items():
                buffer.copy_(others[name])
        self.n_averaged += 1

    @contextmanager
    def swapped(self, model: nn.Module) -> Iterator[None]:
        """Within the context ``model`` computes with the average, in its own dtypes.

        Its weights, and with ``use_buffers`` its buffers, are put aside, not overwritten, so that
        exact masters stay valid. Take no optimizer step inside.

        Raises:
            ValueError: ``model`` is not the one that is averaged, or is wrapped or sharded.
        """
        _refuse(model.parameters())
        averages, own = self._pairs("swapped", model)
        aside = [(tensor, tensor.data) for tensor in own.values()]
        buffers = dict(model.named_buffers())
        try:
            for name, tensor in own.items():
                # A forward pass may write a buffer.
                average, copies = averages[name].data, name in buffers
                tensor.data = average.to(tensor.device, tensor.dtype, copy=copies)
            yield
        finally:
            for tensor, data in aside:
                tensor.data = data

    def _pairs(self, method: str, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The averages, and the tensors of ``model`` that they follow, each by name."""
        ours: dict[str, Tensor] = dict(self.module.named_parameters())
        theirs: dict[str, Tensor] = dict(model.named_parameters())
        if self.use_buffers:
            ours.update(self.module.named_buffers())
            theirs.update(model.named_buffers())
        buffers = {name for name, _ in model.named_buffers()}
        lacking = {name for name, _ in self.module.named_buffers()} - buffers
        if missing := sorted(ours.keys() ^ theirs.keys() | lacking):
            raise ValueError(
                f"{method}: this model and the averaged one differ in {missing[:4]}; pass the "
                "module that EMA was made from, not a wrapper around it"
            )
        return ours, theirs
