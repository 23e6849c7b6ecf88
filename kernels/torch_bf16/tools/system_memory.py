"""Memory as the system tells it: what is free, and how far a process's own grows."""

from __future__ import annotations

import ctypes
import multiprocessing
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from .redirection import quiet

__all__ = ["available_bytes", "peak_growth"]

_CGROUP = Path("/sys/fs/cgroup")


def available_bytes(device: torch.device) -> int | None:
    """Bytes that can be allocated on a device now; None if the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    found = _field("/proc/meminfo", "MemAvailable")
    with suppress(OSError, ValueError):
        limit, used, stat = (
            (_CGROUP / f"memory.{name}").read_text() for name in ("max", "current", "stat")
        )
        # What is cached of files counts as used, and is given up when memory is wanted.
        cached = re.search(r"^inactive_file (\d+)$", stat, re.MULTILINE)
        room = int(limit) - int(used) + (int(cached[1]) if cached else 0)
        found = room if found is None else min(found, room)
    return found


def peak_growth(
    work: Callable[..., None],
    first: tuple[Any, ...],
    arguments: tuple[Any, ...],
    threads: int,
    seconds: float,
) -> int | None:
    """Growth of a fresh process's peak memory during ``work(*arguments)``.

    Args:
        work: a function of a module, so that another process can import it.
        first: arguments of a first call, so that compiling, thread pools and code that is read from
            disk do not count.
        arguments: arguments of the call that is measured.
        threads: the number of torch's threads.
        seconds: how long to wait for the process.

    Returns:
        Bytes, or None if the system does not tell or the process does not finish.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_peak, args=(sender, work, first, arguments, threads))
    process.start()
    sender.close()
    try:
        return receiver.recv() if receiver.poll(seconds) else None
    except EOFError:
        return None
    finally:
        process.kill()
        process.join()


def _send_peak(sender: Any, work: Callable[..., None], *arguments: Any) -> None:
    with quiet():
        sender.send(_own_peak(work, *arguments))


def _own_peak(
    work: Callable[..., None], first: tuple[Any, ...], arguments: tuple[Any, ...], threads: int
) -> int | None:
    torch.set_num_threads(threads)
    _give_back_what_is_freed()
    work(*first)
    before = _field("/proc/self/status", "VmRSS")
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    work(*arguments)
    peak = _field("/proc/self/status", "VmHWM")
    return None if before is None or peak is None else peak - before


def _give_back_what_is_freed() -> None:
    """Have glibc map every tensor from 64 KiB on its own, so that none lies in another's gaps."""
    m_mmap_threshold = -3
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(m_mmap_threshold, 1 << 16)


def _field(file: str, name: str) -> int | None:
    """Bytes from a line ``name: 1234 kB``."""
    with suppress(OSError):
        if found := re.search(rf"^{name}:\s+(\d+) kB", Path(file).read_text(), re.MULTILINE):
            return int(found[1]) * 1024
    return None
