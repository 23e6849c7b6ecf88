"""The root for devices without fp64, of all 2**32 numbers: python tests/proofs/roots.py."""

import argparse

import numpy as np
import torch

from torch_bf16.numerics.roots import sqrt_without_fp64

# What stays in a CPU's cache.
SLAB = 2**18


def main():
    argparse.ArgumentParser(description=__doc__).parse_args()
    wrong = 0
    for start in range(-(2**31), 2**31, SLAB):
        x = torch.arange(start, start + SLAB).to(torch.int32).view(torch.float32)
        found = sqrt_without_fp64(x).numpy()
        with np.errstate(invalid="ignore"):
            expected = np.sqrt(x.numpy())
        both = np.isnan(found) & np.isnan(expected)
        wrong += int((~both & (found.view(np.int32) != expected.view(np.int32))).sum())
    print(f"{wrong} of {2**32} roots differ from IEEE 754's")
    return wrong > 0


if __name__ == "__main__":
    raise SystemExit(main())
