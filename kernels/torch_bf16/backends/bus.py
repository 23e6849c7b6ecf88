"""The bus between a device and host memory: copies that overlap with computation, and their order.

A thin layer over streams and events, so that the order can be tested where there are none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["Bus", "bus_of", "in_host_memory"]


class Bus(Protocol):
    """One device's streams, and host memory that they reach.

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
        """Zeros in host memory that the streams reach."""
        ...

    def to_host(self, tensor: Tensor) -> Tensor:
        """A contiguous tensor there with the same bits: itself if it is one already."""
        ...

    def run(self, stream: Any, work: Callable[[], Any]) -> None:
        """Queue what ``work`` launches in a stream."""
        ...

    def record(self, stream: Any) -> Any:
        """An event that happens when a stream has done all that is queued in it now."""
        ...

    def wait(self, stream: Any, event: Any) -> None:
        """Let everything queued in a stream from now on wait for an event."""
        ...

    def finish(self, event: Any) -> None:
        """Let the host wait for an event."""
        ...


class CudaBus:
    """That of a CUDA or ROCm device, to pinned memory.

    Its two streams last as long as the process: torch caches memory for each stream apart.
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
        """A pinned tensor; waits for the device where it was there."""
        if tensor.is_cpu and tensor.is_contiguous() and tensor.is_pinned():
            return tensor
        return _pin(tensor.shape, tensor.dtype).copy_(tensor)

    def run(self, stream: torch.cuda.Stream, work: Callable[[], Any]) -> None:
        """Call it with that stream as the current one."""
        with torch.cuda.stream(stream):
            work()

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """A new event."""
        event = torch.cuda.Event()
        event.record(stream)
        return event

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        """Without the host."""
        stream.wait_event(event)

    def finish(self, event: torch.cuda.Event) -> None:
        """Until it has happened."""
        event.synchronize()


def _pin(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    try:
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True, device="cpu")
    except RuntimeError as error:
        raise RuntimeError(
            f"offload='states' needs pinned host memory for a state of shape {tuple(shape)} in "
            f"{dtype}, and the system gave none ({error}). Free host memory, raise the limit of "
            "locked memory (ulimit -l, or the container's), or leave offload out"
        ) from error


_WITHOUT = ("cpu", "mps", "meta")


@functools.cache
def bus_of(device: torch.device) -> Bus | None:
    """The bus of a device; None where its memory is the host's.

    Raises:
        NotImplementedError: copies beside what it computes are unknown for that kind of device.
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
