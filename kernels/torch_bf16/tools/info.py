"""``python -m torch_bf16 info``: versions, recipes, and which backend runs where, and why."""

from __future__ import annotations

import os

import torch

from torch_bf16.backends import choose, explain
from torch_bf16.backends.certificates import folder, kept, source_hash
from torch_bf16.foreign.convert import CONVERTIBLE
from torch_bf16.foreign.optimizer import BUCKET_BYTES
from torch_bf16.recipe import RECIPES

from .bench.record import describe, processor, versions

__all__ = ["info"]

# Processor time, medians over AdamW and SGD in both modes on one x86-64 thread with AVX-512.
_COST = (
    "That takes about 20 ms of a\nCPU's kernels and 45 ms of eager ones, beside compiling, and "
    "once: verdicts are kept."
)


def info() -> int:
    """Print what a bug report needs."""
    print(f"{describe(versions())}, {processor()}")
    print(f"threads: {torch.get_num_threads()} of {os.cpu_count()}")
    print("\nrecipes (formats; bytes per parameter without the gradient, AdamW):")
    for name, recipe in RECIPES.items():
        formats = f"{recipe.weights} / {recipe.exp_avg} / {recipe.exp_avg_sq}"
        alias = "" if name == recipe.name else f"  (alias of {recipe.name})"
        print(f"  {name:22} {formats:50} {recipe.bytes_per_parameter:3}{alias}")
    print(
        f"\noptimizers with a fused rule: {', '.join(sorted(c.__name__ for c in CONVERTIBLE))}; "
        f"any other: its own step on fp32 copies, {BUCKET_BYTES >> 20} MB at a time or one tensor"
    )
    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices.append(torch.device("cuda"))
    for device in devices:
        chosen = choose(device).name
        print(f"\nbackends for {device}:")
        for name, reason in explain(device).items():
            state = "works" if reason is None else f"not here: {reason}"
            print(f"  {name:8} {state}{'  <- used' if name == chosen else ''}")
    _print_proofs()
    return 0


def _print_proofs() -> None:
    place, verdicts = folder(), kept()
    print(
        "\nproofs: before its first use on a device, each variant of a kernel takes two steps over "
        "270,000 made-up\nelements, and its bits are compared with those that NumPy computed. "
        f"{_COST}\nA backend that was asked for by name is not tried."
    )
    if place is None:
        print("  no verdict can be kept: set TORCH_BF16_CACHE to a folder that can be written")
        return
    # Faults of other versions are history.
    now = [(key, fault) for key, fault in verdicts if source_hash() in key]
    failed = [(key, fault) for key, fault in now if fault is not None]
    print(f"  verdicts in {place}: {len(now)} of this version, {len(failed)} failed")
    for key, fault in failed:
        print(f"  {key[0]}: {key[1]} failed: {fault}")
