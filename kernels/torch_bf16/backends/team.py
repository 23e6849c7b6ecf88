"""Torch's own team of threads, which runs a C function as it runs torch's operations.

``GOMP_parallel`` is what GCC compiles ``#pragma omp parallel`` to, and LLVM's and Intel's libraries
have it, too.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["torchs_team"]

# A process with another id was forked from the one that imported this package.
_PROCESS = os.getpid()


def torchs_team() -> Callable[..., None] | None:
    """``GOMP_parallel(function, argument, threads, flags)`` of the library that torch runs on.

    None if there is none, and in a forked child, where GNU's library waits forever for the threads
    of its parent.
    """
    return _parallel() if os.getpid() == _PROCESS else None


@functools.cache
def _parallel() -> Callable[..., None] | None:
    # Tested on Linux only.
    if sys.platform != "linux" or not torch.backends.openmp.is_available():
        return None
    # The order in which torch itself finds it: preloaded libraries, then those it is linked to.
    for library in (None, torch._C.__file__):
        try:
            parallel: Any = ctypes.CDLL(library).GOMP_parallel
        except (AttributeError, OSError, TypeError):
            continue
        parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        parallel.restype = None
        return parallel
    return None
