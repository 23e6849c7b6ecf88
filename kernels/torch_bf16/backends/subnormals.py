"""Subnormal numbers count in every step, whatever ``torch.set_flush_denormal`` says."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch

__all__ = ["flushes_subnormals", "subnormals_kept", "subnormals_kept_inside"]

_SMALLEST = 5e-324
_END = object()
_P = ParamSpec("_P")
_T = TypeVar("_T")


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


def subnormals_kept_inside(generator: Callable[_P, Iterator[_T]]) -> Callable[_P, Iterator[_T]]:
    """Run a generator in :func:`subnormals_kept`, but not what is done with each item."""

    @functools.wraps(generator)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> Iterator[_T]:
        items = generator(*args, **kwargs)
        while True:
            with subnormals_kept():
                item: Any = next(items, _END)
            if item is _END:
                return
            yield item
            # It may be large, and is not to outlive its use.
            del item

    return run
