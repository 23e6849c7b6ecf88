"""Triton without a GPU: a driver that compiles for one, and notes launches instead of making them.

``triton.runtime.driver._active`` takes it; tensors on the CPU stand for the device's.
"""

from __future__ import annotations

import types

from triton.backends.compiler import GPUTarget


class Driver:
    """What Triton asks of a device, with a device that does nothing.

    Args:
        notes: whether launches are kept.
        architecture: what is compiled for; 90 for sm_90.

    Attributes:
        launches: the arguments of each launch so far; None notes nothing.
    """

    def __init__(self, notes: bool = True, architecture: int = 90) -> None:
        self.launches: list | None = [] if notes else None
        self._target = GPUTarget("cuda", architecture, 32)
        self.utils = types.SimpleNamespace(
            load_binary=lambda *_: (self, 0, 80, 0, 1024),
            unload_module=lambda _: None,
            get_device_properties=lambda _: {"max_shared_mem": 1 << 17},
        )

    def launcher_cls(self, source, metadata):
        return self._launch

    def _launch(self, *arguments):
        if self.launches is not None:
            self.launches.append(arguments)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return self._target

    def get_device_interface(self):
        return types.SimpleNamespace(current_device=lambda: 0)
