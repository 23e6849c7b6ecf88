"""Run the CPU kernels' arm64 machine code in an emulator, and compare its bits with the oracle's.

    python tests/proofs/arm64.py --rules adamw     kernels of these rules, three seconds each
    python tests/proofs/arm64.py                   of all rules, over an hour
    python tests/proofs/arm64.py --cpus apple-m1   compiled for one processor

Each variant steps the trial of its certificate, as it would before its first use on such a
processor; sums of squares are tried as well. Exits with 1 where a bit differs. Needs ``pip install
unicorn pyelftools``.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

# Before Numba is imported: its IR is to be taken before it is optimised for this processor.
os.environ["NUMBA_OPT"] = "0"
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import torch
from arm64 import on_arm64
from certificate_digests import variants
from every_rule import RULES

from torch_bf16.backends.certificates.digests import expected
from torch_bf16.backends.certificates.sums import wrong_sum
from torch_bf16.backends.certificates.trial import Trial, digests_of, names_of
from torch_bf16.backends.cpu import CpuBackend

# The emulator lacks SVE, which others have.
CPUS = ("neoverse-n1", "apple-m1")
_HOST = torch.device("cpu")


def main() -> int:
    parser = argparse.ArgumentParser(
        description="the CPU kernels' arm64 machine code beside the oracle"
    )
    parser.add_argument("--rules", nargs="+", default=[*RULES], choices=[*RULES])
    parser.add_argument("--only", nargs="+", help="variants whose name has one of these in it")
    parser.add_argument("--cpus", nargs="+", default=CPUS, choices=CPUS)
    options = parser.parse_args()
    backend, wrong = CpuBackend(), 0
    for cpu in options.cpus:
        with on_arm64(cpu):
            for dtype in (torch.bfloat16, torch.float32):
                if fault := wrong_sum(backend, _HOST, dtype):
                    wrong += 1
                    print(f"{cpu}, squares of {dtype}: {fault}", flush=True)
    for rule in options.rules:
        tried = 0
        for variant in variants(rule):
            if options.only and not any(each in variant.name for each in options.only):
                continue
            trial = Trial.of(variant)
            for cpu in options.cpus:
                with on_arm64(cpu):
                    digests = digests_of(trial.run(backend, _HOST))
                tried += 1
                pairs = zip(names_of(variant), digests, expected(variant) or (), strict=True)
                if differs := [name for name, found, right in pairs if found != right]:
                    wrong += 1
                    print(f"{cpu}, {variant.name}: {', '.join(differs)} differ", flush=True)
        print(f"{rule}: {tried} trials, {wrong} wrong so far", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
