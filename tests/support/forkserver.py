"""Processes that are forked from one which has already imported what takes seconds to import."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

# A conftest.py whose tests need more adds that, so that other folders need not wait for it.
IMPORTS = [
    "pytest",
    "numba",
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch_bf16",
    "torch_bf16.backends.cpu.launch",
]


def forkserver() -> ForkServerContext:
    """The context of such processes; the first that starts decides which imports they have."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTS)
    return context


@contextmanager
def forked(function: Callable[..., None], *arguments: Any) -> Iterator[ForkServerProcess]:
    """A started process that calls a function, importable by its name, in our environment.

    At the end it is killed if it has not ended: Python's own end would wait for it.
    """
    process = forkserver().Process(target=_call, args=({**os.environ}, function, arguments))
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def _call(
    environment: dict[str, str], function: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    # That of the server is from when it started.
    os.environ.clear()
    os.environ.update(environment)
    function(*arguments)
