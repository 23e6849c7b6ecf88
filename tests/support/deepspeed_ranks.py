"""Ranks for tests of DeepSpeed, and the reason where they are skipped."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from forkserver import IMPORTS
from ranks import Ranks

# DeepSpeed has a function compiled when it is imported, and that takes each rank three seconds.
IMPORTS += ["torch._inductor.compile_fx"]

WITH_DEEPSPEED = [
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None,
        reason="DeepSpeed is not installed (DS_BUILD_OPS=0 pip install torch-bf16[deepspeed])",
    ),
    pytest.mark.timeout(600),
]


def on_fresh_ranks(folder: Any, world: int, function: Any, *arguments: Any) -> list[Any]:
    """What a function returns on each rank of processes that nobody had before.

    DeepSpeed keeps the first group that a process had.
    """
    pool = Ranks(folder)
    try:
        return pool(world, function, *arguments, seconds=400, timeout=120)
    finally:
        pool.close()
