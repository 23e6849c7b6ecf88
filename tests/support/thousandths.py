"""A thousand gradients of a thousandth, whose sum stops at a half if it is rounded to nearest."""

import torch
from torch import nn

THOUSANDTHS = [torch.tensor([0.001])] * 1000
SUM = 1000 * torch.tensor(0.001).bfloat16().double().item()
# 4096 sums of 1000 roundings, each by at most half of 2^-8: six standard deviations.
DEVIATION = {"bf16_stochastic": 6 * 1000**0.5 * 2**-9 / 64, "fp32": 1000 * 2.0**-24}


class Summing(nn.Module):
    """Its gradient is what a micro-batch says."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(64, 64))

    def forward(self, x):
        return (self.w * x.mean()).sum()


def assert_summed(gradient, format):
    """Whether the gradient of a ``Summing`` module is the sum of all, as a format keeps it."""
    mean = gradient.double().mean().item()
    if format == "bf16_nearest":
        assert mean == 0.5  # the control: what torch does
    else:
        assert abs(mean - SUM) <= DEVIATION[format]
