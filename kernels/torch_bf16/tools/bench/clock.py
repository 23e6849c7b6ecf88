"""Clocks: how long steps take on a device, how long they occupy the host, and what they launch."""

from __future__ import annotations

import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

__all__ = ["Clock", "CpuClock", "CudaClock", "clock_for"]

# Consecutive steps over which a device is timed. In training the host runs ahead of the device; a
# single step on an idle device would be charged for the launch latency.
_IN_A_ROW = 5
# Rows of a matrix whose square takes a CPU some milliseconds.
_PRODUCT = 1024


class Clock:
    """Time and memory of one device.

    Attributes:
        counts_launches: whether :meth:`launches` can count.
    """

    counts_launches = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def time(self, step: Callable[[], object]) -> tuple[float, float]:
        """Seconds per step, and seconds until the call of a step returns to the host."""
        raise NotImplementedError

    def time_after_product(self, step: Callable[[], object]) -> float | None:
        """Seconds of a step right after a matrix product; None if that makes no difference."""
        return None

    def wait(self) -> None:
        """Wait until the device has nothing left to do."""

    def allocated(self) -> int | None:
        """Bytes held on the device; None if only the system knows."""
        return None

    def start_peak(self) -> None:
        """Forget the peak so far."""

    def peak(self) -> int | None:
        """Most bytes held since :meth:`start_peak`."""
        return None

    def peak_beside(self, before: int | None) -> int | None:
        """:meth:`peak` less what was :meth:`allocated` before; None if only the system knows."""
        peak = self.peak()
        return None if peak is None or before is None else peak - before

    def launches(self, step: Callable[[], object]) -> dict[str, int] | None:
        """Kernels, copies and fills that one step launches; None if they cannot be counted."""
        return None

    def release(self) -> None:
        """Return freed memory to the device, so that others can use it."""

    def cache_bytes(self) -> int | None:
        """Size of the last-level cache."""
        raise NotImplementedError


class CpuClock(Clock):
    """Times each step by itself: the call returns when the step is done."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._factor = torch.ones(_PRODUCT, _PRODUCT)
        self._product = torch.empty_like(self._factor)

    def time_after_product(self, step: Callable[[], object]) -> float:
        # torch's threads spin for a while after an operation; any other threads wait for them.
        torch.mm(self._factor, self._factor, out=self._product)
        return self.time(step)[0]

    def time(self, step: Callable[[], object]) -> tuple[float, float]:
        start = time.perf_counter()
        step()
        seconds = time.perf_counter() - start
        return seconds, seconds

    def cache_bytes(self) -> int | None:
        try:
            text = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text().strip()
            return int(text[:-1]) * {"K": 1 << 10, "M": 1 << 20}[text[-1]]
        except (OSError, ValueError, KeyError, IndexError):
            return None


class CudaClock(Clock):
    """Times the device by events on its stream, and the host by a step on an idle device."""

    counts_launches = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        torch.cuda.set_device(device)
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def time(self, step: Callable[[], object]) -> tuple[float, float]:
        self.wait()
        start = time.perf_counter()
        step()
        host = time.perf_counter() - start
        self._begin.record()
        for _ in range(_IN_A_ROW):
            step()
        self._end.record()
        self.wait()
        return self._begin.elapsed_time(self._end) / 1e3 / _IN_A_ROW, host

    def wait(self) -> None:
        torch.cuda.synchronize(self.device)

    def allocated(self) -> int | None:
        return torch.cuda.memory_allocated(self.device)

    def start_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak(self) -> int | None:
        return torch.cuda.max_memory_allocated(self.device)

    def launches(self, step: Callable[[], object]) -> dict[str, int] | None:
        self.wait()
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        # torch 2.11 warns without acc_events.
        with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
            step()
            self.wait()
        # Counted in the trace, because profiler.events() also lists annotations as device events.
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder, "trace.json")
            profiler.export_chrome_trace(str(trace))
            events = json.loads(trace.read_text(errors="replace"))["traceEvents"]
        counts = Counter(event.get("cat") for event in events)
        kinds = {"kernels": "kernel", "copies": "gpu_memcpy", "fills": "gpu_memset"}
        found = {name: counts[category] for name, category in kinds.items()}
        # A driver that hides its counters shows no kernel at all.
        return found if found["kernels"] else None

    def release(self) -> None:
        torch.cuda.empty_cache()

    def cache_bytes(self) -> int | None:
        return getattr(torch.cuda.get_device_properties(self.device), "L2_cache_size", None)


def clock_for(device: torch.device) -> Clock:
    """The clock of a CPU or of a CUDA or ROCm device."""
    return CudaClock(device) if device.type == "cuda" else CpuClock(device)
