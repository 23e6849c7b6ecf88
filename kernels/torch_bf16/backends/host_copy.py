"""Numbers that a device computes, and that the host reads later, without waiting for the device."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["HostCopy"]


class HostCopy:
    """A copy of a tensor on the host, which is made when the device comes to it.

    Args:
        tensor: may be written or freed afterwards.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if not tensor.is_cuda:
            self._host = tensor.detach().to("cpu", copy=True)
            return
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True, device="cpu")
        with torch.cuda.device(tensor.device):
            self._event = torch.cuda.Event()
            self._host.copy_(tensor, non_blocking=True)
            self._event.record()

    @property
    def is_there(self) -> bool:
        """Whether :meth:`read` does not wait."""
        return self._event is None or self._event.query()

    def read(self) -> Tensor:
        """The numbers."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
