"""Whether what Triton compiles for a GPU has the oracle's bits, without one.

    python tests/proofs/compiled_kernels.py --targets sm_90 --json record.json

Each variant that has digests passes the certificate that a GPU would ask of it, in tensors that are
aligned and in such that are not, with the scalars of its rule; so do sums of squares, and whole
optimizers take the steps of ``python -m torch_bf16 selftest``. The kernels' PTX runs in NumPy
(``tests/support/ptx``), so this is about what Triton makes of them, and not about NVIDIA's
assembler. A variant takes 2 to 10 s; ``--every 10`` takes one in ten.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import torch
import triton
from certificate_digests import variants
from every_rule import RULES

from torch_bf16.tools.selftest import steps

SQUARES = (torch.bfloat16, torch.float32)


def install(target: str) -> None:
    """Let this process run what is compiled for a GPU."""
    from ptx import machine

    torch.set_num_threads(1)
    os.environ["TORCH_BF16_BACKEND"] = "triton"
    machine.install(int(target.removeprefix("sm_")))


def fault(rule: str, number: int) -> str | None:
    """What is wrong with a variant of a rule, a sum of squares or an optimizer's steps."""
    from torch_bf16.backends import _BACKENDS
    from torch_bf16.backends.certificates import certificate

    backend, device = _BACKENDS["triton"], torch.device("cpu")
    if rule == "squares":
        return certificate.wrong_sum(backend, device, SQUARES[number])
    if rule == "optimizers":
        return steps.run("", [*steps.all_checks().values()][number], device).fault
    variant = variants(rule)[number]
    trial = certificate.Trial.of(variant)
    return (
        certificate._load_kernels(backend, trial)() or certificate._load_scalars(backend, variant)()
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="the oracle's bits, of kernels compiled for GPUs")
    parser.add_argument("--targets", nargs="+", default=["sm_80", "sm_90", "sm_100"])
    parser.add_argument("--every", type=int, default=1, metavar="N", help="one variant in N")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    items = [(rule, n) for rule in RULES for n in range(len(variants(rule)))]
    # Neighbours differ in one thing, such as the gradient's dtype: each N-th would all have one.
    random.Random(0).shuffle(items)
    items = items[:: options.every]
    items += [("squares", n) for n in range(len(SQUARES))]
    items += [("optimizers", n) for n in range(len(steps.all_checks()))]
    found: dict[str, dict] = {}
    for target in options.targets:
        start = time.monotonic()
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(options.processes, context, install, (target,)) as pool:
            futures = [pool.submit(fault, *item) for item in items]
            faults = {}
            for done, (item, future) in enumerate(zip(items, futures, strict=True), 1):
                if error := future.exception() or future.result():
                    faults[" ".join(map(str, item))] = str(error) or repr(error)
                    print(target, *item, repr(error), flush=True)
                if done % 50 == 0:
                    print(f"{target}: {done} of {len(items)}", flush=True)
        minutes = (time.monotonic() - start) / 60
        print(
            f"{target}: {len(items)} compared, {len(faults)} differ, {minutes:.0f} min", flush=True
        )
        found[target] = {"compared": len(items), "faults": faults, "minutes": round(minutes, 1)}
        if options.json:
            record = {
                "triton": triton.__version__,
                "torch": torch.__version__,
                "every": options.every,
                "targets": found,
            }
            options.json.write_text(json.dumps(record, indent=1) + "\n")
    return int(any(each["faults"] for each in found.values()))


if __name__ == "__main__":
    sys.exit(main())
