"""What gradients cost the host before the step: their sums, their release, their norm.

    python tests/proofs/gradient_host_time.py --tensors 150 1000 5000
    python tests/proofs/gradient_host_time.py --against <another checkout>

As in ``host_time.py``: tensors so small that their kernels take next to no time, launches of the
Triton backend left out, CPU time of the process. Printed are the median and the quarters of all
blocks, in microseconds. With ``--against``, both checkouts run in turn, each in processes of its
own. Rows:

- ``backward``: a pass that brings each parameter its gradient, by torch alone
- ``first``: the same where gradients are summed in ``bf16_stochastic``, first micro-batch of a step
- ``second``: and second one, the first that adds to sums, which lie where no sum was before
- ``third``: and third one
- ``released``: a pass that takes each parameter's step, and the step that counts it
- ``norm``: ``total_norm``
- ``clip and step``: ``clip_next_step``, then ``step``
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import torch
from host_time import parameters_of, stub_triton

import torch_bf16

BACKENDS = ("triton", "cpu")


class Rows:
    """Models of one size on one backend, and the seconds of each row."""

    def __init__(self, backend: str, count: int) -> None:
        self.seconds: dict[str, float] = {}
        summing = torch_bf16.get_recipe("bf16-stochastic", accumulate="bf16_stochastic")
        self.plain, self.summed, self.freed, self.clipped = (
            parameters_of(count, "cpu") for _ in range(4)
        )
        self.sums = torch_bf16.AdamW(self.summed, recipe=summing, backend=backend)
        self.release = torch_bf16.AdamW(self.freed, backend=backend)
        torch_bf16.release_gradients(torch.nn.ParameterList(self.freed), self.release)
        self.clip = torch_bf16.AdamW(self.clipped, backend=backend)

    def time(self, row: str, call) -> None:
        start = time.process_time()
        call()
        self.seconds[row] = time.process_time() - start

    def block(self) -> dict[str, float]:
        """Microseconds of each row, once."""
        self.time("backward", lambda: backward(self.plain))
        for parameter in self.plain:
            parameter.grad = None
        # Kept, so that the next sums lie elsewhere.
        kept = [parameter.grad for parameter in self.summed]
        self.sums.zero_grad()
        for row in ("first", "second", "third"):
            self.time(row, lambda: backward(self.summed))
        self.sums.step()
        del kept

        def released() -> None:
            backward(self.freed)
            self.release.step()

        self.time("released", released)
        backward(self.clipped)
        self.time("norm", lambda: torch_bf16.total_norm(self.clipped))

        def clip() -> None:
            torch_bf16.clip_next_step(self.clip, 1.0)
            self.clip.step()

        self.time("clip and step", clip)
        self.clip.zero_grad()
        return {row: 1e6 * seconds for row, seconds in self.seconds.items()}


def backward(parameters) -> None:
    """A backward pass of nothing but the leaves."""
    gradients = [torch.full_like(parameter, 0.01) for parameter in parameters]
    torch.autograd.backward(parameters, gradients)


def measure(backend: str, count: int, blocks: int) -> list[dict[str, float]]:
    rows = Rows(backend, count)
    return [rows.block() for _ in range(blocks + 2)][2:]


def elsewhere(checkout: Path, backend: str, count: int, blocks: int) -> list[dict[str, float]]:
    """The same in a process of its own, with another checkout's package."""
    command = [sys.executable, __file__, "--json", "--tensors", str(count)]
    command += ["--blocks", str(blocks), "--backends", backend]
    environment = {**os.environ, "PYTHONPATH": str(checkout / "kernels")}
    environment["TORCH_BF16_BACKEND"] = backend
    return json.loads(subprocess.check_output(command, env=environment))


def main() -> int:
    parser = argparse.ArgumentParser(description="what gradients cost the host")
    parser.add_argument("--tensors", type=int, nargs="+", default=[150, 1000, 5000])
    parser.add_argument("--backends", nargs="+", default=BACKENDS, choices=BACKENDS)
    parser.add_argument("--blocks", type=int, default=15)
    parser.add_argument("--turns", type=int, default=3, help="processes of each checkout")
    parser.add_argument("--against", type=Path)
    parser.add_argument("--json", action="store_true", help="of one size and backend")
    options = parser.parse_args()
    here = Path(__file__).parents[2]
    if options.json:
        stub_triton()
        torch.set_num_threads(1)
        gc.disable()
        print(json.dumps(measure(options.backends[0], options.tensors[0], options.blocks)))
        return 0
    checkouts = {"here": here} | ({"there": options.against} if options.against else {})
    print(f"torch {torch.__version__}, Python {sys.version.split()[0]}")
    for backend in options.backends:
        for count in options.tensors:
            found = defaultdict(list)
            for _ in range(options.turns):
                for name, checkout in checkouts.items():
                    for block in elsewhere(checkout, backend, count, options.blocks):
                        for row, value in block.items():
                            found[row, name].append(value)
            for (row, name), values in sorted(found.items(), key=lambda each: each[0]):
                low, middle, high = statistics.quantiles(values, n=4)
                print(
                    f"{backend:6} {count:5} tensors, {row:14} {name:6} {middle:9.0f} µs "
                    f"({low:.0f} to {high:.0f})",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
