"""Subnormal numbers count in every step, whatever ``torch.set_flush_denormal`` says."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

__all__ = ["flushes_subnormals", "subnormals_kept"]

_SMALLEST = 5e-324


def flushes_subnormals() -> bool:
    """Whether this thread flushes subnormal numbers to zero.

    Not only torch can switch this on: a library that was built with ``-ffast-math`` does, too.
    """
    return _SMALLEST * 1.0 == 0.0


@contextlib.contextmanager
def subnormals_kept() -> Iterator[None]:
    """Let torch compute with subnormal numbers, even if this thread was to flush them.

    It would flush them in this thread's part of a tensor, and perhaps not in other threads' parts.
    """
    flushes, threads = flushes_subnormals(), torch.get_num_threads()
    if flushes:
        torch.set_flush_denormal(False)
        # This switches one thread: others may have been started while it flushed.
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if flushes:
            torch.set_num_threads(threads)
            torch.set_flush_denormal(True)
