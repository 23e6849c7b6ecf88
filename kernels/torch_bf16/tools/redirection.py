"""Leads what this process and its children print elsewhere, or nowhere."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout

__all__ = ["quiet", "redirected"]


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


@contextmanager
def quiet() -> Iterator[None]:
    """Drop warnings, log messages, and what is printed by this process and by its children."""
    disabled = logging.root.manager.disable
    with (
        tempfile.TemporaryFile("w", errors="replace") as sink,
        redirected([1, 2], sink.fileno()),
        redirect_stdout(sink),
        redirect_stderr(sink),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            sink.flush()
            logging.disable(disabled)
