"""A parameter on its way to an optimizer's own step and back: fp32 copies, encoded again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torch_bf16.backends import Bucket, Variant, choose
from torch_bf16.formats import FP32, Format
from torch_bf16.numerics.counter_rng import WEIGHT, stream_base, tensor_key
from torch_bf16.optim.validation import Snapshot
from torch_bf16.rules import STORE
from torch_bf16.sharding.dtensor import (
    Span,
    box_of,
    gather,
    is_dtensor,
    local,
    local_gradient,
    place_like,
    version_of,
)
from torch_bf16.sharding.fsdp1 import is_part, spans_of
from torch_bf16.states.views import MASTERS

__all__ = ["COUNTER", "Store", "WorkingCopy", "is_like"]

COUNTER = "noise_step"
"""The state that says which draw comes next, an int."""


def is_like(value: Any, parameter: Tensor) -> bool:
    """Whether a state has a number for each of the parameter's."""
    return isinstance(value, Tensor) and value.shape == parameter.shape and value.ndim > 0


@dataclass
class WorkingCopy:
    """What takes a parameter's place in the step.

    Attributes:
        parameter: bf16 or fp32, with a gradient; plain, a DTensor or what FSDP1 has made of one.
        group: number of its parameter group.
        name: what keys its noise.
        state: ``optimizer.state[parameter]``, complete.
        seen: what the optimizer keeps about it.
        weights: format of the weight.
        format_of: that of a state that has a number for each of the parameter's, by its name; None
            leaves it as it is.
        whole: whether the step must see the whole tensor, which a DTensor is gathered to.
    """

    parameter: Any
    group: int
    name: str
    state: dict[str, Any]
    seen: Snapshot
    weights: Format
    format_of: Callable[[str], Format | None]
    whole: bool

    def __post_init__(self) -> None:
        self._spans = spans_of(self.parameter, self.name)
        self._gathers = self.whole and is_dtensor(self.parameter)

    def version(self) -> int:
        """A number that a write to the parameter raises."""
        return version_of(self.parameter)

    @property
    def is_sharded(self) -> bool:
        """Whether ranks hold parts of it."""
        return is_dtensor(self.parameter) or is_part(self.parameter)

    @property
    def step(self) -> int:
        """Which draw of noise comes next."""
        return self.state[COUNTER]

    @property
    def bytes(self) -> int:
        """Memory of its fp32 copies: weight, gradient, and two states if none are there yet."""
        states = sum(is_like(each, self.parameter) for each in self.state.values())
        each = self.parameter if self._gathers else local(self.parameter)
        return 4 * (2 + max(2, states)) * each.numel()

    def make(self, scale: float) -> nn.Parameter:
        """An fp32 copy of the weight, with one of the gradient times ``scale``."""
        masters = (self.state[key] for key in self.weights.plane_names("")[1:])
        planes = [local(each).detach() for each in (self.parameter, *masters)]
        made = nn.Parameter(self._given(self.weights.decode(planes)).clone())
        gradient = self.parameter.grad.detach()
        if is_dtensor(self.parameter):
            gradient = local_gradient(self.parameter, gradient)
        # A copy, because steps may use the gradient's memory for what they compute.
        made.grad = self._given(gradient.to(torch.float32, copy=True).mul_(scale))
        return made

    def decoded(self) -> dict[str, Any]:
        """The state as the step wants it, in fp32 where it is encoded."""
        decoded, planes = {}, {COUNTER, *MASTERS}
        for key, value in self.state.items():
            if key in planes:
                continue
            if not is_like(value, self.parameter):
                decoded[key] = value
                continue
            format_ = self.format_of(key) or FP32
            keys = format_.plane_names(key)
            planes.update(keys)
            decoded[key] = self._given(format_.decode([local(self.state[k]) for k in keys]))
        return decoded

    def encode(self, weight: Tensor, state: Mapping[str, Any], store: Store) -> None:
        """Hand over what the step made of :meth:`make` and :meth:`decoded`.

        Args:
            weight: the new weight; its shape is that of new states.
            state: the new state.
            store: writes it when it runs; :attr:`state` is complete now.
        """
        masters = {key: self.state[key] for key in self.weights.plane_names("")[1:]}
        step = self.step + 1
        planes = [local(each).detach() for each in (self.parameter, *masters.values())]
        store.add(self.weights, planes, self._taken(weight), self._spans, "", step)
        kept: dict[str, Any] = {}
        for key, value in state.items():
            if not is_like(value, weight):
                kept[key] = value
                continue
            format_, value = self.format_of(key), self._taken(value)
            if format_ is None or format_ is FP32:
                kept[key] = self._kept(key, value)
                continue
            planes = []
            for name, plane in zip(format_.plane_names(key), format_.planes, strict=True):
                old = self.state.get(name)
                if old is None:
                    shape = plane.shape(value.shape)
                    memory = torch.empty(shape, dtype=plane.dtype, device=value.device)
                    whole = torch.Size(plane.shape(self.parameter.shape))
                    old = place_like(self.parameter, memory, whole)
                kept[name] = old
                planes.append(local(old))
            store.add(format_, planes, value, self._spans, f"/{key}", step)
        self.state = {**kept, COUNTER: step, **masters}

    def _kept(self, key: str, value: Tensor) -> Tensor:
        old = self.state.get(key)
        if isinstance(old, Tensor) and local(old) is value:
            return old
        return place_like(self.parameter, value)

    def _given(self, memory: Tensor) -> Tensor:
        return gather(self.parameter, memory.contiguous()) if self._gathers else memory

    def _taken(self, value: Tensor) -> Tensor:
        if not self._gathers:
            return value
        # A copy, because a view would keep the whole tensor.
        return value[box_of(self.parameter)].clone(memory_format=torch.contiguous_format)


class Store:
    """fp32 numbers on their way into planes, encoded in as few kernel calls as can be."""

    def __init__(self, seed: int, backend: str | None) -> None:
        self._seed, self._backend = seed, backend
        self._rows: dict[Any, list[Any]] = defaultdict(list)
        self._copies: list[tuple[Tensor, Tensor]] = []

    def add(
        self,
        format_: Format,
        planes: Sequence[Tensor],
        x: Tensor,
        spans: Sequence[Span],
        suffix: str,
        step: int,
    ) -> None:
        """Have a tensor encoded.

        Args:
            format_: of the numbers.
            planes: this rank's, written by :meth:`run`.
            x: the numbers; any floating-point dtype.
            spans: what whole tensors they are elements of.
            suffix: goes behind the spans' names, to key the noise.
            step: the number of the draw.
        """
        memory = [each.contiguous() for each in planes]
        self._copies += [
            (old, new)
            for old, new in zip(planes, memory, strict=True)
            if old.data_ptr() != new.data_ptr()
        ]
        x = x.float().contiguous()
        for span in (short for each in spans for short in each.short() if short.numel):
            row = tuple(
                _part(each, span, plane.block)
                for each, plane in zip(memory, format_.planes, strict=True)
            )
            base = stream_base(self._seed, tensor_key(span.name + suffix), WEIGHT.stream)
            part = _part(x, span)
            self._rows[format_, x.device, span.strided].append((row, part, base, step, span))

    def run(self) -> None:
        """Encode all that was added."""
        for (format_, device, strided), rows in self._rows.items():
            its_planes, xs, bases, steps, spans = zip(*rows, strict=True)
            bucket = Bucket(
                variant=Variant(STORE, format_, (), torch.float32, device, strided),
                planes=[[each] for each in its_planes],
                numels=np.array([each.numel for each in spans], np.int64),
                offsets=np.array([each.offset for each in spans], np.int64),
                widths=np.array([each.width for each in spans], np.int64),
                pitches=np.array([each.pitch for each in spans], np.int64),
                bases=np.array([[base] for base in bases], np.uint32),
                gradients=xs,
                steps=np.array(steps, np.int64),
                rows=np.zeros(len(rows), np.int64),
                scalars=np.ones((1, 1), np.float32),
            )
            # Kernels know blocks of a rule's states, not of what is in a weight's place.
            choose(device, "eager" if format_.block > 1 else self._backend).run(bucket)
        for old, new in self._copies:
            old.copy_(new)


def _part(memory: Tensor, span: Span, block: int = 1) -> Tensor:
    start, numel = span.start // block, span.numel // block
    return memory if memory.numel() == numel else memory.view(-1)[start : start + numel]
