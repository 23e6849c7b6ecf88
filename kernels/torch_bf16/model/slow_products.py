"""A warning on CPUs that multiply bf16 matrices much slower than fp32 ones.

Without AVX512-BF16, AMX or the like, oneDNN widens bf16 as it goes: bf16 products then take 1.5
times as long on AVX-512 and, depending on the layout, 2 to 40 times as long on AVX2. The
processor's list of features does not decide it, because torch's build and ``ONEDNN_MAX_CPU_ISA``
matter, too; so three small products of each kind are timed.
"""

from __future__ import annotations

import functools
import time

import torch
from torch import Tensor

from torch_bf16.errors import warn_once

__all__ = ["SLOW", "bf16_product_ratio", "warn_slow_products"]

_ROWS, _TIMES = 256, 3
SLOW = 2.0
"""The ratio above which a whole step is slower, too."""


@functools.cache
def bf16_product_ratio() -> float:
    """Time of bf16 matrix products on this CPU over that of fp32 ones, measured once (200 ms).

    The three products of a linear layer: its output, and the gradients of input and weight.
    """
    return _seconds(torch.bfloat16) / _seconds(torch.float32)


def warn_slow_products() -> None:
    """Warn once in a process where bf16 products are slow, and say what to do."""
    ratio = bf16_product_ratio()
    if ratio > SLOW:
        warn_once(
            f"this CPU takes {ratio:.1f} times as long for a bf16 matrix product as for an fp32 "
            "one (bf16 needs AVX512-BF16, AMX or their like), so that forward and backward passes "
            "of a bf16 model are slow. compute='fp32' computes in fp32 over the same bf16 weights, "
            "and keeps the bytes of weights and optimizer: get_recipe(..., compute='fp32') for "
            "torch_bf16.prepare, BF16Precision(compute='fp32') or BF16_COMPUTE=fp32",
        )


def _seconds(dtype: torch.dtype) -> float:
    threads = torch.get_num_threads()
    # After using several threads a process cannot be forked: torch's operations hang in the child.
    torch.set_num_threads(1)
    try:
        # Filling it would use several threads, too.
        a = torch.ones(_ROWS, _ROWS, dtype=dtype, device="cpu")
        return sum(_best(*pair) for pair in ((a, a.t()), (a, a), (a.t(), a)))
    finally:
        torch.set_num_threads(threads)


def _best(a: Tensor, b: Tensor) -> float:
    best = float("inf")
    # The first product makes the kernel.
    for _ in range(_TIMES + 1):
        start = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - start)
    return best
