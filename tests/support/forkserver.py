"""Processes that are forked from one which has already imported what takes seconds to import."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext

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
