"""Which byte keeps Adam's moments best: companded codes or fp8, at equal size.

``python examples/moment_formats.py`` (a minute) runs 300 steps of Adam's two averages over normal
gradients whose size varies from weight to weight (by a factor ``exp(spread * normal)``), stored
after each step as ``int8`` or as e4m3 with the same fp32 scale per 64: first moments to nearest,
second ones stochastically. It prints, against averages in fp32, the error of the update
``m / (sqrt(v) + 1e-8)`` and the bias and error of ``v``.
"""

import argparse

import torch
from torch import Tensor

from torch_bf16.formats import BLOCK, INT8, UINT8, Format

STEPS, NUMBERS, BETA1, BETA2 = 300, BLOCK * 8192, 0.9, 0.99
LARGEST_E4M3 = 448.0


def through(stored: Format, x: Tensor) -> Tensor:
    """Return ``x``, stored and read back."""
    planes = [torch.empty(x.numel() // p.block, dtype=p.dtype) for p in stored.planes]
    stored.encode(x, torch.randint(0, 2**16, x.shape, dtype=torch.int32), planes)
    return stored.decode(planes)


def through_fp8(x: Tensor, stochastic: bool) -> Tensor:
    """Return ``x`` stored in e4m3, each block scaled so that its maximum is e4m3's."""
    blocks = x.view(-1, BLOCK)
    scale = blocks.abs().amax(1, keepdim=True) / LARGEST_E4M3
    y = blocks / scale
    if not stochastic:
        return (y.to(torch.float8_e4m3fn).float() * scale).view(-1)
    noise = torch.randint(0, 2**20, y.shape, dtype=torch.int32)
    normal = (((y.view(torch.int32) + noise) >> 20) << 20).view(torch.float32)
    subnormal = torch.floor(y * 512 + torch.rand_like(y)) / 512
    rounded = torch.where(y < 2.0**-6, subnormal, normal.clamp(max=LARGEST_E4M3))
    return (rounded * scale).view(-1)


def study(spread: float) -> None:
    """Print one line for each format."""
    size = torch.exp(spread * torch.randn(NUMBERS))
    m, v = torch.zeros(NUMBERS), torch.zeros(NUMBERS)
    keep = {
        "int8": (lambda x: through(INT8, x), lambda x: through(UINT8, x)),
        "e4m3": (lambda x: through_fp8(x, False), lambda x: through_fp8(x, True)),
    }
    stored = dict.fromkeys(keep, (m, v))
    for _ in range(STEPS):
        g = torch.randn(NUMBERS) * size
        m, v = m * BETA1 + g * (1 - BETA1), v * BETA2 + g * g * (1 - BETA2)
        for name, (keep_m, keep_v) in keep.items():
            old_m, old_v = stored[name]
            new_m = old_m * BETA1 + g * (1 - BETA1)
            stored[name] = keep_m(new_m), keep_v(old_v * BETA2 + g * g * (1 - BETA2))
    update = m / (v.sqrt() + 1e-8)
    for name, (kept_m, kept_v) in stored.items():
        error = kept_m / (kept_v.sqrt() + 1e-8) - update
        relative = (error.square().mean() / update.square().mean()).sqrt()
        print(
            f"spread {spread:.0f}  {name}: update off by {relative:.3g} (rms), "
            f"v biased by {kept_v.sum() / v.sum() - 1:+.1e}, "
            f"off by {(kept_v / v - 1).abs().median():.3g} (median), "
            f"zero for {(kept_v == 0).float().mean():.2%}"
        )


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    torch.manual_seed(0)
    for spread in (0.0, 1.0, 2.0):
        study(spread)
