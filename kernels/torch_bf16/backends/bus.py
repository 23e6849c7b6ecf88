"""The bus between a device and host memory: copies that overlap with computation, and their order.

A thin layer over streams and events, so that the order can be tested on machines without them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["Bus", "bus_of", "in_host_memory"]


class Bus(Protocol):
    """One device's streams, and host memory that they can access.

    Attributes:
        up: the stream of copies to the device.
        down: the stream of copies from it.
        compute: the stream in which the device computes now.
    """

    up: Any
    down: Any

    @property
    def compute(self) -> Any: ...

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Zeros in host memory that the streams can access."""
        ...

    def to_host(self, tensor: Tensor) -> Tensor:
        """A contiguous copy in such memory, or the tensor itself if it already is one."""
        ...

    def run(self, stream: Any, work: Callable[[], Any]) -> None:
        """Queue what ``work`` launches in a stream."""
        ...

    def record(self, stream: Any) -> Any:
        """An event that completes once a stream has done everything that is queued in it now."""
        ...

    def wait(self, stream: Any, event: Any) -> None:
        """Let everything queued in a stream from now on wait for an event."""
        ...

    def finish(self, event: Any) -> None:
        """Let the host wait for an event."""
        ...


class CudaBus:
    """The bus of a CUDA or ROCm device, to pinned memory.

    Its two streams live as long as the process: torch caches memory separately for each stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.up, self.down = torch.cuda.Stream(device), torch.cuda.Stream(device)

    @property
    def compute(self) -> torch.cuda.Stream:
        """The current stream of the device."""
        return torch.cuda.current_stream(self._device)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Pinned zeros."""
        return _pin(shape, dtype).zero_()

    def to_host(self, tensor: Tensor) -> Tensor:
        """A pinned tensor; waits for the device if the tensor was there."""
        if tensor.is_cpu and tensor.is_contiguous() and tensor.is_pinned():
            return tensor
        return _pin(tensor.shape, tensor.dtype).copy_(tensor)

    def run(self, stream: torch.cuda.Stream, work: Callable[[], Any]) -> None:
        """Call ``work`` with ``stream`` as the current stream."""
        with torch.cuda.stream(stream):
            work()

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """A new event."""
        event = torch.cuda.Event()
        event.record(stream)
        return event

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        """Wait on the device, without blocking the host."""
        stream.wait_event(event)

    def finish(self, event: torch.cuda.Event) -> None:
        """Block the host until the event has completed."""
        event.synchronize()


def _pin(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    try:
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True, device="cpu")
    except RuntimeError as error:
        raise RuntimeError(
            f"offload='states' needs pinned host memory for a state of shape {tuple(shape)} in "
            f"{dtype}, but the system provided none ({error}). Free host memory, raise the limit "
            "of locked memory (ulimit -l, or the container's), or leave offload out"
        ) from error


_WITHOUT = ("cpu", "mps", "meta")


@functools.cache
def bus_of(device: torch.device) -> Bus | None:
    """The bus of a device; None if its memory is the host's.

    Raises:
        NotImplementedError: there is no bus for that kind of device.
    """
    if device.type in _WITHOUT:
        return None
    if device.type != "cuda":
        raise NotImplementedError(
            f"on {device} cannot keep its states in host memory: offload='states' is for CUDA and "
            "ROCm devices. Leave offload out"
        )
    return CudaBus(device)


def in_host_memory(tensor: Tensor, device: torch.device) -> bool:
    """Whether a tensor is in host memory, while ``device`` has memory of its own."""
    return tensor.is_cpu and device.type not in _WITHOUT
