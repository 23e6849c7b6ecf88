"""The CPU kernels' arm64 machine code has the oracle's bits; ``proofs/arm64.py`` tries all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROOF = Path(__file__).parents[1] / "proofs" / "arm64.py"
# Of both modes, and one with int8 moments; each also over tensors in runs.
VARIANTS = (
    "adamw_bf16_stochastic_bf16_nearest_bf16_stochastic_bfloat16",
    "adamw_bf16_plus_16_fp32_fp32_bfloat16",
    "adamw_bf16_plus_8_int8_uint8_bfloat16",
)


def test_an_emulated_arm64_processor_has_the_bits_of_the_oracle():
    for package in ("numba", "unicorn", "elftools"):
        pytest.importorskip(package)
    arguments = ["--rules", "adamw", "--only", *VARIANTS, "--cpus", "neoverse-n1"]
    done = subprocess.run(
        [sys.executable, str(PROOF), *arguments], capture_output=True, text=True, timeout=250
    )
    assert done.stdout == "adamw: 7 trials, 0 wrong so far\n", done.stdout + done.stderr
