"""What a step costs the host, beside torch's own AdamW.

    python tests/proofs/host_time.py --tensors 150 1000 5000

Tensors are so small that their kernel takes next to no time; the launches of the Triton backend are
left out by a driver that does nothing (``tests/support/launchless.py``), so no GPU is needed. With
``--device cuda`` everything is launched, and each step begins after the device has finished the one
before. The optimizers step in turn, in blocks; counted is the CPU time of this process within
``step()``.
Printed are the median and the quarters of all blocks, in microseconds per step, and the ratio to
torch's fused AdamW in the same block. Rows:

- ``same gradients``: at the same addresses in every step, as after ``zero_grad(set_to_none=False)``
- ``moved gradients``: at other addresses than in the step before
- ``alternating sets``: one half of the parameters has gradients in one step, the other in the next
- ``random sets``: nine of ten parameters have gradients, others in each step, as experts have
- ``planning``: the first step with a set of parameters that no plan knows, without compiling

``ours, graphed`` replays ``optimizer.graphed()``, the graph's own launch left out like the others;
``unchecked`` replays look at gradients and weights one time in 64.

With ``--alone`` each optimizer steps in a loop of its own, so that its tensors stay in the
processor's caches, and the fastest step is printed as well. That is the work of the host itself;
the ratios without it are nearer to what a training loop sees. Builds of torch for GPUs compare
addresses in one call, which the CPU build lacks.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import torch_bf16
from torch_bf16.backends import cuda_graphs
from torch_bf16.backends.triton import TritonBackend

ROWS = ("same gradients", "moved gradients", "alternating sets", "random sets", "planning")


def stub_triton() -> None:
    """Let the Triton backend run on CPU tensors, but for the launches."""
    from launchless import Driver  # pyright: ignore[reportMissingImports]
    from triton.runtime import driver

    driver._active = Driver(notes=False)
    TritonBackend.unavailable = lambda self, device: None
    cuda_graphs.record = lambda launch, device: lambda: None


def parameters_of(count: int, device: str) -> list[nn.Parameter]:
    """Two thirds matrices in bf16, which a cast model has, one third vectors: two batches."""
    shapes = [(4, 4), (4, 4), (4,)] * -(-count // 3)
    values = [torch.randn(shape, dtype=torch.bfloat16, device=device) for shape in shapes[:count]]
    return [*map(nn.Parameter, values)]


OPTIMIZERS = {
    "torch fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "torch foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
    "ours, triton": lambda p: torch_bf16.AdamW(p, lr=1e-3, backend="triton"),
    "ours, cpu": lambda p: torch_bf16.AdamW(p, lr=1e-3, backend="cpu"),
    "ours, graphed": lambda p: torch_bf16.AdamW(p, lr=1e-3, backend="triton"),
    "ours, graphed, unchecked": lambda p: torch_bf16.AdamW(p, lr=1e-3, backend="triton"),
}


class Run:
    """An optimizer over parameters of its own."""

    def __init__(self, name: str, count: int, device: str) -> None:
        self.parameters = parameters_of(count, device)
        self.optimizer = OPTIMIZERS[name](self.parameters)
        self.sets: list[list[torch.Tensor | None]] = [
            [torch.randn_like(p) for p in self.parameters] for _ in range(2)
        ]
        self.turn, self.random = 0, random.Random(0)
        self.give(self.sets[0])
        self.optimizer.step()
        self.step = self.optimizer.step
        if "graphed" in name:
            self.step = self.optimizer.graphed(check_every=64 if "unchecked" in name else 1)

    def give(self, gradients: Sequence[torch.Tensor | None]) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient

    def gradients(self, row: str) -> list[torch.Tensor | None]:
        """Those of the next step."""
        turn, first = self.turn % 2, self.sets[0]
        if row == "moved gradients":
            return self.sets[turn]
        if row == "alternating sets":
            return [each if number % 2 == turn else None for number, each in enumerate(first)]
        if row == "random sets":
            return [each if self.random.random() < 0.9 else None for each in first]
        return first

    def steps(self, row: str, count: int) -> float:
        """Seconds of CPU time for each of some steps."""
        total = 0.0
        for _ in range(count):
            self.turn += 1
            self.give(self.gradients(row))
            if row == "planning" and hasattr(self.optimizer, "_engine"):
                self.optimizer._engine.invalidate()
            start = time.process_time()
            self.step()
            total += time.process_time() - start
            if self.parameters[0].is_cuda:
                torch.cuda.synchronize()
        return total / count


def measure(
    row: str, count: int, blocks: int, names: list[str], device: str
) -> dict[str, list[float]]:
    """Microseconds per step of each block; the optimizers take turns."""
    # A graph reads the gradients of its capture.
    graphs = row == "same gradients"
    runs = {name: Run(name, count, device) for name in names if graphs or "graphed" not in name}
    steps = max(1, min(20, 3000 // count)) if row != "planning" else 1
    times: dict[str, list[float]] = {name: [] for name in runs}
    for block in range(blocks + 2):
        for name, run in runs.items():
            seconds = run.steps(row, steps)
            if block > 1:
                times[name].append(1e6 * seconds)
    return times


def measure_alone(
    row: str, count: int, blocks: int, names: list[str], device: str
) -> dict[str, list[float]]:
    """Microseconds of each step, one optimizer after the other; a block is 20 steps."""
    times: dict[str, list[float]] = {}
    for name in names:
        if row == "same gradients" or "graphed" not in name:
            run = Run(name, count, device)
            run.steps(row, 2)
            times[name] = [1e6 * run.steps(row, 1) for _ in range(20 * blocks)]
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description="what a step costs the host")
    parser.add_argument("--tensors", type=int, nargs="+", default=[150, 1000, 5000])
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=ROWS)
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument(
        "--alone", action="store_true", help="no turns; print the fastest step, too"
    )
    parser.add_argument("--only", nargs="+", default=list(OPTIMIZERS), choices=list(OPTIMIZERS))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    options = parser.parse_args()
    place, names = "no launches", options.only
    if options.device == "cuda":
        place, names = torch.cuda.get_device_name(), [each for each in names if "cpu" not in each]
    else:
        stub_triton()
    torch.set_num_threads(1)
    gc.disable()
    python = sys.version.split()[0]
    print(f"torch {torch.__version__}, Python {python}, {options.blocks} blocks, {place}")
    for count in options.tensors:
        for row in options.rows:
            way = measure_alone if options.alone else measure
            of_all = way(row, count, options.blocks, names, options.device)
            beside = of_all.get("torch fused", [])
            for name, times in of_all.items():
                low, middle, high = statistics.quantiles(times, n=4)
                ratios = [a / b for a, b in zip(times, beside, strict=False)]
                text = f"{statistics.median(ratios):6.2f} of torch fused" if ratios else ""
                best = f", fastest {min(times):.1f}" if options.alone else ""
                print(
                    f"{count:6} tensors, {row:17} {name:14} {middle:9.0f} µs "
                    f"({low:.0f} to {high:.0f}{best}) {text}",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
