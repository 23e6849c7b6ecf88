"""Sends what is written to file descriptors elsewhere."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

__all__ = ["redirected"]


@contextmanager
def redirected(numbers: Sequence[int], target: int) -> Iterator[None]:
    """Lead standard output or error to another descriptor.

    The descriptors, and not only Python's streams, because child processes, compilers and compiled
    libraries write there.

    Args:
        numbers: 1 for standard output, 2 for standard error.
        target: the descriptor that takes their place within the context.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(number) for number in numbers]
    for number in numbers:
        os.dup2(target, number)
    try:
        yield
    finally:
        ctypes.CDLL(None).fflush(None)  # what C's printf still holds
        for number, copy in zip(numbers, kept, strict=True):
            os.dup2(copy, number)
            os.close(copy)
