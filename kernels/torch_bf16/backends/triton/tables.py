"""Small tables on the device, written by the host without waiting for it."""

from __future__ import annotations

import contextlib
from collections import deque

import numpy as np
import torch
from torch import Tensor

from torch_bf16.backends import cuda_graphs

__all__ = ["Table", "on", "upload"]

# Captures allowed between two ordinary steps: each keeps its own pinned copy, allocated in advance.
_SPARE = 8
_NOTHING = contextlib.nullcontext()


def on(device: torch.device) -> contextlib.AbstractContextManager:
    """A context in which Triton launches on ``device``."""
    # Entering one takes longer than checking.
    is_current = device.type != "cuda" or device.index == torch.cuda.current_device()
    return _NOTHING if is_current else torch.cuda.device(device)


def upload(table: np.ndarray, device: torch.device) -> Tensor:
    """Copy a table to the device, without waiting for the copy."""
    return _stage(np.ascontiguousarray(table), device).to(device, non_blocking=True, copy=True)


def _stage(table: np.ndarray, device: torch.device) -> Tensor:
    # torch's allocator of pinned memory reuses it only once the copy to the device is done.
    host = torch.from_numpy(table)
    return host.pin_memory() if device.type == "cuda" else host


class Table:
    """An int64 table on the device, copied from the host when it has changed.

    A CUDA graph under capture gets its own copy, which later steps do not touch: each replay copies
    it from host memory that is kept here.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._devices = device, (device,)
        self._spares = _SPARE if device.type == "cuda" else 0
        self._host: np.ndarray | None = None
        self._bytes = b""
        self._copy: Tensor | None = None
        self._ring: deque[tuple[Tensor, torch.cuda.Event]] = deque()
        self._spare: list[Tensor] = []
        self._captured: list[Tensor] = []

    def of(self, table: np.ndarray) -> Tensor:
        """The device's copy of ``table``, whose shape never changes.

        Args:
            table: not to be written afterwards, because the same array is not compared again.

        Raises:
            RuntimeError: there were too many captures since the last ordinary step.
        """
        if cuda_graphs.capturing(self._devices):
            return self._capture(table)
        if self._copy is None or table is not self._host or len(self._spare) < self._spares:
            with on(self._device):
                self._copy = self._update(table)
            self._host = table
        return self._copy

    def _update(self, table: np.ndarray) -> Tensor:
        now, copy = table.tobytes(), self._copy
        if copy is None:
            copy = upload(table, self._device)
        elif now != self._bytes:
            self._write(copy, table)
        self._bytes = now
        if len(self._spare) < self._spares:
            shape = self._spares, *table.shape
            self._spare = [*torch.empty(shape, dtype=torch.int64, device="cpu").pin_memory()]
        return copy

    def _write(self, copy: Tensor, table: np.ndarray) -> None:
        """Copy the table to the device, from pinned memory that no unfinished copy still reads."""
        if self._device.type != "cuda":
            copy.copy_(torch.from_numpy(table))
            return
        if self._ring and self._ring[0][1].query():
            host, done = self._ring.popleft()
        else:
            # The ring has as many entries as the device lags behind, so nothing waits for it.
            host, done = (
                torch.empty_like(torch.from_numpy(table), pin_memory=True),
                torch.cuda.Event(),
            )
        host.numpy()[...] = table
        copy.copy_(host, non_blocking=True)
        done.record()
        self._ring.append((host, done))

    def _capture(self, table: np.ndarray) -> Tensor:
        host = torch.from_numpy(table)
        if self._device.type == "cuda":
            if not self._spare:
                raise RuntimeError(
                    f"this optimizer's step was captured in {_SPARE} CUDA graphs since its last "
                    "ordinary step, and cannot be captured again; take an ordinary step in between"
                )
            host = self._spare.pop().copy_(host)
        self._captured.append(host)
        return host.to(self._device, non_blocking=True, copy=True)
