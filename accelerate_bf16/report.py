"""Prints the lines that say in which precision a model really trains."""

from __future__ import annotations

import logging
import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from typing import Any
from weakref import WeakSet

__all__ = ["Report", "show"]

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


class Report:
    """Shows each line as often as it is true at one time.

    Two equal models are two lines. A script that frees what it has prepared, and prepares the same
    again for each batch size that it tries, is told once. A pickled copy shows all lines again.
    """

    def __init__(self) -> None:
        self._shown: Counter[str] = Counter()
        self._subjects: defaultdict[str, WeakSet[Any]] = defaultdict(WeakSet)

    def show(self, lines: Iterable[tuple[Any, str]], held: Collection[Any]) -> None:
        """Show new lines, each given with the object that it is about.

        Args:
            lines: pairs of object and line.
            held: all objects that are still in use.
        """
        held = {*map(id, held)}
        for subject, line in lines:
            subjects = self._subjects[line]
            subjects.add(subject)
            if sum(id(each) in held for each in subjects) > self._shown[line]:
                self._shown[line] += 1
                show(line)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()
