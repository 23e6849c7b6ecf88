"""Silence for libraries that print, and that warn at every step."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout

__all__ = ["quiet"]


@contextmanager
def quiet() -> Iterator[None]:
    """Drop warnings, log messages, and what is printed by this process and by its children."""
    sys.stdout.flush()
    sys.stderr.flush()
    # The descriptors, too, because compilers and autotuners write from C++ and child processes.
    kept = [os.dup(number) for number in (1, 2)]
    disabled = logging.root.manager.disable
    with (
        tempfile.TemporaryFile("w", errors="replace") as sink,
        redirect_stdout(sink),
        redirect_stderr(sink),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        for number in (1, 2):
            os.dup2(sink.fileno(), number)
        try:
            yield
        finally:
            sink.flush()
            for number, copy in zip((1, 2), kept, strict=True):
                os.dup2(copy, number)
                os.close(copy)
            logging.disable(disabled)
