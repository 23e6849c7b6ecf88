"""Prints the lines that say in which precision a model really trains."""

from __future__ import annotations

import logging
import sys

__all__ = ["show"]

_logger = logging.getLogger("accelerate_bf16")
if _logger.level == logging.NOTSET:
    _logger.setLevel(logging.INFO)


def show(line: str) -> None:
    """Write one line where a user sees it.

    ``mixed_precision`` proves nothing: Accelerate accepts any name from the environment and trains
    in fp32 under it. So the line is visible by default, although Python's logging hides INFO by
    default: it goes to the handlers of a program that has configured logging, else to stderr. No
    handler is installed: a program that configures logging later would then see everything twice.
    ``logging.getLogger("accelerate_bf16").setLevel(logging.WARNING)`` silences it.
    """
    if _logger.hasHandlers():
        _logger.info(line)
    elif _logger.isEnabledFor(logging.INFO):
        print(line, file=sys.stderr)
