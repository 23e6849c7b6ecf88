"""Numbers that random programs make up, and the ways in which they write them into weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["lower_bytes", "numbers", "write"]

BF16 = torch.bfloat16


def numbers(like: Tensor, seed: int) -> Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed))


def lower_bytes(weight: Tensor) -> Tensor:
    return weight.detach().view(torch.int16) & 0xFF


@torch.no_grad()
def write(net: nn.Module, name: str, way: str, seed: int) -> None:
    """Write new numbers into a parameter in one of the ways that a program has."""
    parameter = net.get_parameter(name)
    new = numbers(parameter, seed).to(BF16).to(parameter.dtype)
    if way == "copy_":
        parameter.copy_(new)
    elif way == "load":
        net.load_state_dict({name: new}, strict=False)
    elif way == "data.copy_":
        parameter.data.copy_(new)
    elif way == "data =":
        parameter.data = new
    elif way == "mul_":
        parameter.mul_(0.5)
    else:
        memory = parameter.data if way.startswith("data") else parameter
        memory.masked_fill_(torch.arange(parameter.numel()).view(parameter.shape) < 3, 0.25)
