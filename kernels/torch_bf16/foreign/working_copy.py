"""fp32 copies of a parameter for an optimizer's own step, and encoding the result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from torch_bf16.engine.encoder import Encoder
from torch_bf16.engine.versions import Snapshot
from torch_bf16.formats import FP32, Format
from torch_bf16.sharding import Shard, as_real, local
from torch_bf16.states.views import COUNTER, MASTERS

__all__ = ["WorkingCopy", "is_like"]


def is_like(value: Any, parameter: Tensor) -> bool:
    """Whether a state has one number for each element of the parameter, and a format for them.

    The states of a complex parameter stay as its optimizer makes them: no recipe has formats for
    complex numbers.
    """
    if not isinstance(value, Tensor) or parameter.is_complex():
        return False
    return value.shape == parameter.shape and value.ndim > 0


def is_encoded(state: Mapping[str, Any], key: str, format_: Format) -> bool:
    """Whether a state has all planes of a number in a format."""
    planes = zip(format_.plane_names(key), format_.planes, strict=True)
    return all(getattr(state.get(name), "dtype", None) == plane.dtype for name, plane in planes)


@dataclass
class WorkingCopy:
    """Makes the fp32 copies of a parameter and its gradient, and encodes the results.

    Those of a complex parameter are complex64.

    Attributes:
        shard: this rank's part of the parameter.
        group: number of the parameter's group.
        state: ``optimizer.state[parameter]``, complete.
        snapshot: the optimizer's record of the parameter.
        weights: format of the weight.
        format_of: format of a state with one number for each element of the parameter, by the
            state's name; None leaves the state as it is. Codes that are no floating-point numbers
            are the class's own, and stay as they are, too.
        gathers: whether ranks hold parts of the parameter and the step must see the whole.
    """

    shard: Shard
    group: int
    state: dict[str, Any]
    snapshot: Snapshot
    weights: Format
    format_of: Callable[[str], Format | None]
    gathers: bool

    @property
    def parameter(self) -> Tensor:
        """The parameter itself."""
        return self.shard.parameter

    @property
    def step(self) -> int:
        """The number of the next draw of noise."""
        return self.state[COUNTER]

    @property
    def written(self) -> bool:
        """Whether something else has written the parameter since the last step."""
        return self.snapshot.version != self.shard.version()

    @property
    def is_idle(self) -> bool:
        """Whether the parameter has no gradient."""
        return self.parameter.grad is None

    @property
    def bytes(self) -> int:
        """Bytes of the fp32 copies: weight, gradient and states, at least two of them."""
        states = sum(is_like(each, self.parameter) for each in self.state.values())
        numel = self.shard.numel if self.gathers else self.shard.memory.numel()
        return 4 * (2 + max(2, states)) * numel

    def make(self, scale: float | None) -> nn.Parameter:
        """An fp32 copy of the weight, with the gradient times ``scale``, if it has one.

        None makes no gradient.
        """
        masters = (self.state[key] for key in self.weights.plane_names("")[1:])
        planes = [self.shard.memory, *(local(each).detach() for each in masters)]
        decoded = self._whole(self.weights.decode(planes))
        # Decoding what is fp32 copies nothing.
        weight = nn.Parameter(self._shown(decoded.clone() if decoded is planes[0] else decoded))
        if scale is None or self.is_idle:
            return weight
        gradient = self.shard.gradient().detach()
        # A copy, because steps may use the gradient's memory for their results.
        gradient = gradient.to(torch.float32, copy=True)
        weight.grad = self._shown(self._whole(gradient if scale == 1 else gradient.mul_(scale)))
        return weight

    def decode_states(self) -> dict[str, Any]:
        """The state for the step: encoded numbers in fp32, all else as it is."""
        decoded, planes = {}, {COUNTER, *MASTERS}
        for key, value in self.state.items():
            if key in planes:
                continue
            if not is_like(value, self.parameter):
                decoded[key] = value
                continue
            format_ = self.format_of(key)
            if format_ is None or not is_encoded(self.state, key, format_):
                decoded[key] = self._whole(local(value))
                continue
            keys = format_.plane_names(key)
            planes.update(keys)
            decoded[key] = self._whole(format_.decode([local(self.state[k]) for k in keys]))
        return decoded

    def encode(self, weight: Tensor, state: Mapping[str, Any], encoder: Encoder) -> None:
        """Pass the new weight and state to the encoder; :attr:`state` is complete afterwards."""
        masters = {key: self.state[key] for key in self.weights.plane_names("")[1:]}
        step, span = self.step + 1, self.shard.span
        planes = [self.shard.memory, *(local(each).detach() for each in masters.values())]
        encoder.add(self.weights, planes, self._own_part(as_real(weight)), span, step)
        encoded: dict[str, Any] = {}
        for key, value in state.items():
            if not is_like(value, weight):
                encoded[key] = value
                continue
            format_, value = self.format_of(key), self._own_part(value)
            if format_ in (None, FP32) or not value.is_floating_point():
                old = self.state.get(key)
                unchanged = isinstance(old, Tensor) and local(old) is value
                encoded[key] = old if unchanged else self.shard.place(value)
                continue
            names = format_.plane_names(key)
            for name, plane in zip(names, format_.planes, strict=True):
                encoded[name] = self.state.get(name)
                if encoded[name] is None:
                    shape = plane.shape(value.shape)
                    memory = torch.empty(shape, dtype=plane.dtype, device=value.device)
                    encoded[name] = self.shard.place(memory, plane.shape(self.shard.shape))
            named = replace(span, name=f"{span.name}/{key}")
            encoder.add(format_, [local(encoded[name]) for name in names], value, named, step)
        self.state = {**encoded, COUNTER: step, **masters}

    def _shown(self, memory: Tensor) -> Tensor:
        return torch.view_as_complex(memory) if self.parameter.is_complex() else memory

    def _whole(self, memory: Tensor) -> Tensor:
        return self.shard.gather(memory.contiguous()) if self.gathers else memory

    def _own_part(self, value: Tensor) -> Tensor:
        return self.shard.take(value) if self.gathers else value
