"""The bus between a device and host memory: copies that overlap with computation, and their order.

A thin layer over streams and events, so that the order can be tested on machines without them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Bus", "bus_of", "in_host_memory"]


class Bus:
    """A CUDA or ROCm device's streams, and pinned memory of the host, which they can access.

    They live as long as the process: torch caches memory separately for each stream.

    Args:
        device: the device.

    Attributes:
        up: the stream of copies to the device.
        down: the stream of copies from it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.up, self.down = torch.cuda.Stream(device), torch.cuda.Stream(device)

    @property
    def compute(self) -> torch.cuda.Stream:
        """The stream in which the device computes now."""
        return torch.cuda.current_stream(self._device)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Pinned zeros."""
        return _pin(shape, dtype).zero_()

    def to_host(self, tensor: Tensor) -> Tensor:
        """A contiguous copy in pinned memory, or the tensor itself if it already is one.

        Waits for the device if the tensor was there.
        """
        if tensor.is_cpu and tensor.is_contiguous() and tensor.is_pinned():
            return tensor
        return _pin(tensor.shape, tensor.dtype).copy_(tensor)

    def run(self, stream: torch.cuda.Stream, work: Callable[[], Any]) -> None:
        """Queue what ``work`` launches in a stream."""
        with torch.cuda.stream(stream):
            work()

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """An event that completes once a stream has done everything that is queued in it now."""
        event = torch.cuda.Event()
        event.record(stream)
        return event

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        """Let everything queued in a stream from now on wait for an event; the host does not."""
        stream.wait_event(event)

    def finish(self, event: torch.cuda.Event) -> None:
        """Let the host wait for an event."""
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
    return Bus(device)


def in_host_memory(tensor: Tensor, device: torch.device) -> bool:
    """Whether a tensor is in host memory, while ``device`` has memory of its own."""
    return tensor.is_cpu and device.type not in _WITHOUT
