"""Exponential moving averages of weights, in fp32 or in bf16 with stochastic rounding.

At a decay of 0.9999 an average in bf16, rounded to nearest, never moves at all: a step of bf16 is
0.4 % of it. Rounded stochastically it is right on average.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from torch_bf16.argument_checks import check_module
from torch_bf16.engine.wrappers import optimizers_for, owners, warn_of_left_out
from torch_bf16.errors import with_article
from torch_bf16.memory import place_and_version
from torch_bf16.parameters import parameters_in
from torch_bf16.sharding import any_flattened, is_dtensor, local, reshard, units

from .blended_weights import exempt
from .moving_averages import (
    FORMAT_BY_DTYPE,
    MovingAverages,
    by_name,
    check_place,
    refuse_unaveraged,
)
from .sharded_average import ShardedAverage, lying_in_place

__all__ = ["EMA", "ema_multi_avg_fn", "rounds_stochastically"]

_DTYPES = {each.name: dtype for dtype, each in FORMAT_BY_DTYPE.items()}


def _check_arguments(decay: float, seed: int) -> None:
    number = isinstance(decay, Real) and not isinstance(decay, bool)
    if not (number and 0.0 <= float(decay) <= 1.0):
        raise ValueError(f"decay={decay!r} must be a number between 0 and 1")
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise ValueError(f"seed={seed!r} must be an int")


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
    _check_arguments(decay, seed)
    return functools.partial(_move_all, MovingAverages(seed, backend), decay)


def rounds_stochastically(function: Any) -> bool:
    """Whether a function was made by :func:`ema_multi_avg_fn`."""
    return isinstance(function, functools.partial) and function.func is _move_all


def _move_all(
    kept: MovingAverages,
    decay: float,
    averages: Sequence[Tensor],
    values: Sequence[Tensor],
    n_averaged: Any,
) -> None:
    refuse_unaveraged([*averages, *values])
    ours = {f"#{n}": each for n, each in enumerate(averages)}
    theirs = {f"#{n}": each for n, each in enumerate(values)}
    for name, average in ours.items():
        check_place("ema_multi_avg_fn", name, theirs[name], average)
    kept.move(ours, theirs, 1.0 - decay, int(n_averaged))


def _exact(model: nn.Module, optimizers: Iterable[Any]) -> dict[str, Tensor]:
    """The fp32 weights of a model that have an exact master in one of the optimizers, by name."""
    of_parameters, found = owners(optimizers), {}
    for name, parameter in by_name(model.named_parameters()).items():
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

    The average of a model that FSDP2 or tensor parallelism has sharded is sharded in the same way,
    with the bits that it has in one process. It has no forward pass: compute by the model, within
    :meth:`swapped`.

    Args:
        model: the module to average; copied, not changed. Shard it first.
        decay: share of the average that an update keeps.
        format: format of the averages: ``"fp32"`` (4 bytes per element), ``"bf16_stochastic"`` (2),
            or None for the one that fits each parameter's dtype.
        use_buffers: average floating-point buffers too; else they are copied at each update.
        device: where the average is kept; None for the model's. Not for a sharded model.
        seed: seed of the rounding noise, which parameters' names key; the same on every replica.
        backend: name of the backend; None for the best that works.

    Raises:
        ValueError: ``model`` is not a module, or ``decay``, ``format`` or ``seed`` cannot be used.
        NotImplementedError: FSDP1 or ZeRO-3 has sharded ``model``, a parameter wraps the memory of
            a weight, or ``device`` is passed with a sharded model.

    Example:
        >>> ema = torch_bf16.EMA(model, decay=0.9999)
        >>> ema.update_parameters(model)
        >>> with ema.swapped(model):
        ...     prediction = model(torch.ones(1, 4))
    """

    # The count's tensor after the last update, its address and version then, and what it was.
    _counted: tuple[Tensor | None, tuple[int, int], int] = (None, (0, 0), 0)

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
        _check_arguments(decay, seed)
        if format not in (None, *_DTYPES):
            raise ValueError(f"format={format!r} must be one of {', '.join(_DTYPES)}, or None")
        if any_flattened(parameters_in(model)):
            raise NotImplementedError(
                f"EMA was given {with_article(model)} inside FullyShardedDataParallel (FSDP1), "
                "which cannot be copied. Shard with torch.distributed.fsdp.fully_shard (FSDP2)"
            )
        # A parameter that FSDP2 has gathered is not a DTensor.
        reshard(each for unit in units(model) for each in unit.parameters)
        sharded = any(map(is_dtensor, parameters_in(model)))
        refuse_unaveraged(parameters_in(model))
        if sharded and device is not None:
            raise NotImplementedError(
                f"EMA was given device={str(device)!r} for a sharded {type(model).__name__}: each "
                "rank keeps the average of its part beside that part. Leave device out; "
                "format='bf16_stochastic' takes 2 bytes per element instead of 4"
            )
        if sharded and any(parameter.is_meta for parameter in parameters_in(model)):
            raise ValueError(
                f"EMA was given a sharded {type(model).__name__} with parameters on the meta "
                "device, which have no numbers to average: give it memory and weights first, by "
                "model.to_empty(device=...) and what initializes or loads it"
            )
        copied = nn.Module() if sharded else model
        super().__init__(copied, device, use_buffers=use_buffers)  # pyright: ignore[reportArgumentType]
        self.decay, self.seed, self.backend = decay, seed, backend
        self._averages = MovingAverages(seed, backend)
        if sharded:
            self.module = ShardedAverage(model, None if format is None else _DTYPES[format])
        elif format is not None:
            for parameter in parameters_in(self.module):
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
            ValueError: ``model`` is another one, or was sharded since, or an optimizer is not one
                of this package.
            NotImplementedError: as for the constructor.
        """
        check_module("update_parameters", model)
        holders = optimizers_for("update_parameters", optimizers)
        exempt(self.module)
        ours, theirs = self._pairs("update_parameters", model)
        warn_of_left_out("update_parameters", model, holders)
        theirs |= _exact(model, holders)
        buffers, others = by_name(self.module.named_buffers()), by_name(model.named_buffers())
        count = self._count()
        if count == 0:
            for name, average in ours.items():
                local(average).copy_(local(theirs[name]))
        else:
            self._averages.move(ours, theirs, 1.0 - self.decay, count + 1)
        if not self.use_buffers:
            for name, buffer in buffers.items():
                # A cache may grow.
                if buffer.shape != others[name].shape:
                    buffer.data = buffer.new_empty(others[name].shape)
                buffer.copy_(others[name])
        self.n_averaged += 1
        if not (self.n_averaged.is_cpu or self.n_averaged.is_inference()):
            self._counted = self.n_averaged, place_and_version(self.n_averaged), count + 1

    def _count(self) -> int:
        """The number of updates; read from a GPU, which waits for it, only if others wrote it."""
        there, place, count = self._counted
        # A copy of both may have any version, but lies elsewhere.
        known = there is self.n_averaged and place_and_version(self.n_averaged) == place
        return count if known else int(self.n_averaged)

    @contextmanager
    def swapped(self, model: nn.Module) -> Iterator[None]:
        """Within the context ``model`` computes with the average, in its own dtypes.

        Its weights, and with ``use_buffers`` its buffers, are put aside, and exact masters stay
        valid. Take no optimizer step inside, and read no exact weights. Where the model is sharded,
        the average lies in the memory of its weights: what ``model.state_dict()`` returns inside
        has the trained weights again afterwards, so save it, or copy it, inside.

        Raises:
            ValueError: ``model`` is not the one that is averaged, is wrapped, or was sharded since.
            NotImplementedError: as for the constructor.
        """
        check_module("swapped", model)
        averages, own = self._pairs("swapped", model)
        sharded = [(own[name], averages[name]) for name in own if is_dtensor(own[name])]
        plain = {name: tensor for name, tensor in own.items() if not is_dtensor(tensor)}
        aside = [(tensor, tensor.data) for tensor in plain.values()]
        with lying_in_place(sharded):
            try:
                for name, tensor in plain.items():
                    # A copy: a forward pass may write a buffer, or a weight (max_norm).
                    average = averages[name].data
                    tensor.data = average.to(tensor.device, tensor.dtype, copy=True)
                # An autocast context around it keeps what it has cast.
                torch.clear_autocast_cache()
                yield
            finally:
                for tensor, data in aside:
                    tensor.data = data
                torch.clear_autocast_cache()

    def _pairs(self, method: str, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The averages, and the tensors of ``model`` that they follow, each by name."""
        # Weights that FSDP2 has gathered are not those that are trained.
        reshard(parameters_in(self.module))
        refuse_unaveraged(parameters_in(model))
        ours, theirs = by_name(self.module.named_parameters()), by_name(model.named_parameters())
        own_buffers, buffers = by_name(self.module.named_buffers()), by_name(model.named_buffers())
        if self.use_buffers:
            ours |= own_buffers
            theirs |= buffers
        lacking = own_buffers.keys() - buffers.keys()
        if missing := sorted(ours.keys() ^ theirs.keys() | lacking):
            raise ValueError(
                f"{method}: this model and the averaged one differ in {missing[:4]}; pass the "
                "module that EMA was made from, not a wrapper around it"
            )
        for name, average in ours.items():
            check_place(method, name, theirs[name], average)
        return ours, theirs
