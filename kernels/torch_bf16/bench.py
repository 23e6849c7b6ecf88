"""Speed and memory of optimizer steps beside torch's own, interleaved in one run."""

from __future__ import annotations

import multiprocessing
import re
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from .optim import AdamW
from .recipe import RECIPES

__all__ = ["BASELINE", "CONTENDERS", "Result", "measure", "peak_bytes", "random_shapes"]

BASELINE = "torch fused fp32"

CONTENDERS = (BASELINE, *(recipe.name for recipe in dict.fromkeys(RECIPES.values())))
"""What can be measured: torch's fused AdamW in fp32, and ours in each recipe."""


@dataclass(frozen=True)
class Result:
    """Times of one contender.

    Attributes:
        name: of :data:`CONTENDERS`.
        seconds: of each round, ``[rounds]``.
        ratios: to the baseline's time in the same round, ``[rounds]``.
        bytes_allocated: weights, gradients and states, from the tensors' storages.
    """

    name: str
    seconds: np.ndarray
    ratios: np.ndarray
    bytes_allocated: int


def random_shapes(parameters: int, tensors: int) -> list[tuple[int, ...]]:
    """Shapes like a transformer's: one tensor in three is a vector, the rest are matrices.

    Args:
        parameters: elements in all, met to within one row per matrix.
        tensors: how many.
    """
    width = 768
    matrices = tensors - tensors // 3
    rows = max(1, round((parameters - (tensors - matrices) * width) / matrices / width))
    return [(width,) if i % 3 == 2 else (rows, width) for i in range(tensors)]


def measure(
    names: tuple[str, ...], shapes: list[tuple[int, ...]], rounds: int, threads: int
) -> list[Result]:
    """Time ``rounds`` steps of each contender, one after the other within every round.

    Args:
        names: of :data:`CONTENDERS`; the baseline always runs, too.
        shapes: of the parameters.
        rounds: timed steps of each; three more go before, untimed.
        threads: for torch and for ours.
    """
    torch.set_num_threads(threads)
    names = (BASELINE, *(name for name in names if name != BASELINE))
    optimizers, sizes = {}, {}
    for name in names:
        optimizers[name] = _contender(name, shapes)
        optimizers[name].step()
        sizes[name] = _allocated(optimizers[name])
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 2):
        for name, optimizer in optimizers.items():
            start = time.perf_counter()
            optimizer.step()
            if number >= 2:
                seconds[name].append(time.perf_counter() - start)
    times = {name: np.array(values) for name, values in seconds.items()}
    return [Result(name, times[name], times[name] / times[BASELINE], sizes[name]) for name in names]


def peak_bytes(name: str, shapes: list[tuple[int, ...]], threads: int) -> int | None:
    """Growth of a fresh process's peak memory while a contender is made and takes three steps.

    Returns:
        Bytes, or None where the system does not tell.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_peak_bytes, name, shapes, threads).result(timeout=600)


def _contender(name: str, shapes: list[tuple[int, ...]]) -> torch.optim.Optimizer:
    generator = torch.Generator().manual_seed(0)
    dtype = torch.float32 if name == BASELINE else torch.bfloat16
    parameters: list[Tensor] = []
    for shape in shapes:
        # Drawn in place: a temporary of the largest tensor would be part of the measured peak.
        parameter = nn.Parameter(
            torch.empty(shape, dtype=dtype).normal_(0, 0.02, generator=generator)
        )
        parameter.grad = torch.empty_like(parameter).normal_(0, 1e-3, generator=generator)
        parameters.append(parameter)
    if name == BASELINE:
        return torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    return AdamW(parameters, lr=1e-4, recipe=name)


def _allocated(optimizer: torch.optim.Optimizer) -> int:
    parameters = optimizer.param_groups[0]["params"]
    tensors = [*parameters, *(p.grad for p in parameters if p.grad is not None)]
    tensors += [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    return sum({t.data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def _peak_bytes(name: str, shapes: list[tuple[int, ...]], threads: int) -> int | None:
    torch.set_num_threads(threads)
    # Compiling and thread pools come first, so that the growth seen is that of the tensors.
    _contender(name, [(8, 8), (8,)]).step()
    before = _status("VmRSS")
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    optimizer = _contender(name, shapes)
    for _ in range(3):
        optimizer.step()
    peak = _status("VmHWM")
    return None if before is None or peak is None else peak - before


def _status(field: str) -> int | None:
    try:
        found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None
