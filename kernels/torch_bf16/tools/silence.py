"""Silence for libraries that print, and that warn at every step."""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout

from .redirection import redirected

__all__ = ["quiet"]


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
