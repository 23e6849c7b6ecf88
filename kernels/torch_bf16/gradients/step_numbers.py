"""The steps that parameters have taken, read from the device without waiting for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torch_bf16.backends import cuda_graphs
from torch_bf16.backends.host_copy import HostCopy
from torch_bf16.states.views import COUNTER

__all__ = ["StepNumbers"]


class StepNumbers:
    """How many steps the parameters of an optimizer have taken.

    Reading a counter on a GPU waits for all work queued there before. So counters are copied to the
    host when a step has been taken, and are there by the time that a sum needs them.
    """

    def __init__(self) -> None:
        self._known: dict[Tensor, int] | None = None
        # By id of a buffer of counters, which are kept with their copies.
        self._copies: dict[int, tuple[Tensor, HostCopy]] = {}

    def ask(self, states: dict[Any, Any]) -> None:
        """Start to read the counters again, without waiting."""
        self._known, self._copies = None, {}
        if not torch.cuda.is_initialized():
            return
        buffers = {id(b): b for b in map(_buffer, _counters(states).values()) if b is not None}
        if cuda_graphs.capturing(each.device for each in buffers.values()):
            return
        self._copies = {key: (buffer, HostCopy(buffer)) for key, buffer in buffers.items()}

    def read(self, states: dict[Any, Any]) -> Mapping[Tensor, int]:
        """Step numbers by parameter; parameters without a counter are left out."""
        if self._known is None:
            counters, left, copied = _counters(states), {}, {}
            for key, (_, copy) in self._copies.items():
                copied[key] = copy.read().reshape(-1).tolist()
            for parameter, each in counters.items():
                if (numbers := copied.get(id(_buffer(each)))) is not None:
                    counters[parameter] = numbers[each.storage_offset()]
                elif isinstance(each, Tensor) and not each.is_cpu:
                    left[parameter] = each
            if left:
                # All at once, because every read waits for the device.
                counters.update(zip(left, torch.stack([*left.values()]).tolist(), strict=True))
            self._known = {parameter: int(each) for parameter, each in counters.items()}
            self._copies = {}
        return self._known


def _buffer(counter: Any) -> Tensor | None:
    """The buffer that a counter on a GPU is an element of, or None."""
    if not isinstance(counter, Tensor) or not counter.is_cuda:
        return None
    buffer = counter if counter._base is None else counter._base
    return buffer if buffer.storage_offset() == 0 and buffer.is_contiguous() else None


def _counters(states: dict[Any, Any]) -> dict[Tensor, Any]:
    return {
        # A class without a fused rule may count in another way, or not at all.
        p: state.get(COUNTER, state.get("step"))
        for p, state in dict.items(states)
        if isinstance(p, Tensor) and (COUNTER in state or "step" in state)
    }
