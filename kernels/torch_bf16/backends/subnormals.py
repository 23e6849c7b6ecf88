"""Subnormal numbers count in every step, whatever ``torch.set_flush_denormal`` says."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch

from .team import torchs_team

__all__ = [
    "flushes_subnormals",
    "subnormals_kept",
    "subnormals_kept_here",
    "subnormals_kept_inside",
]

_SMALLEST = 5e-324
_END = object()
_FUNCTION: Any = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
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
    if not flushes_subnormals():
        yield
        return
    torch.set_flush_denormal(False)
    try:
        with _kept_by_team():
            yield
    finally:
        torch.set_flush_denormal(True)


@contextlib.contextmanager
def _kept_by_team() -> Iterator[None]:
    """The same in the threads that torch shares an operation with.

    Each flushes if the thread that started it did so then.
    """
    threads, parallel = torch.get_num_threads(), torchs_team()
    if threads == 1:
        yield
        return
    if parallel is None:
        # Threads that Python starts meanwhile take this number for their own.
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
        return
    flushed: set[int] = set()

    def keep(_: object) -> None:
        if flushes_subnormals():
            torch.set_flush_denormal(False)
            flushed.add(threading.get_ident())

    def flush(_: object) -> None:
        if threading.get_ident() in flushed:
            torch.set_flush_denormal(True)

    parallel(_FUNCTION(keep), None, threads, 0)
    try:
        yield
    finally:
        parallel(_FUNCTION(flush), None, threads, 0)


def subnormals_kept_here(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Run a function of Python's and NumPy's numbers with subnormal ones, in this thread alone.

    Nothing within may use torch's other threads: they are not switched.
    """

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if not flushes_subnormals():
            return function(*args, **kwargs)
        torch.set_flush_denormal(False)
        try:
            return function(*args, **kwargs)
        finally:
            torch.set_flush_denormal(True)

    return run


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
