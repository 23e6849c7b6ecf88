"""Samples of weights: some elements, the update that a rule intends for them, and their names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_bf16.backends.eager import lift_rule
from torch_bf16.backends.host_scalars import evaluate
from torch_bf16.engine.member import Member
from torch_bf16.formats import Format
from torch_bf16.numerics.roots import has_fp64
from torch_bf16.sharding import as_real, local

__all__ = ["STALLING", "Sample", "is_foreseen", "kind_of", "layer_of", "places", "sample_of"]

STALLING = 0.5
"""Where less of a layer's updates survives, training stalls."""

# Whole blocks of blocked formats, spread over a tensor.
_BLOCK = 64
_RUN = 4 * _BLOCK


@dataclass
class Sample:
    """Some elements of one parameter, kept from before an update until after it.

    Attributes:
        member: the parameter.
        where: the elements' indices.
        lr: its learning rate.
        before: the elements, decoded, before the update.
        intended: what the rule adds to them, in fp32, before anything is rounded.
        noise: the variance that stochastic rounding adds to their sum; None without such rounding.
    """

    member: Member
    where: Tensor
    lr: float
    before: Tensor
    intended: Tensor
    noise: Tensor | None

    def now(self) -> Tensor:
        """The elements as they are now, decoded."""
        return _decode(self.member, 0, self.where)


def kind_of(name: str) -> str:
    """A name with ``*`` for the number of a block, as ``blocks.*.qkv.weight``."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def layer_of(name: str) -> str:
    """The module of a parameter, by the parameter's name."""
    return name.rpartition(".")[0] or name


def is_foreseen(member: Any) -> bool:
    """Whether an update is known in advance; those of Muon and of a class's own step are not."""
    return isinstance(member, Member) and member.direction is None


def sample_of(member: Member, group: Mapping[str, Any], scale: float, size: int) -> Sample:
    """Sample a parameter, and the update that its rule intends before anything is rounded.

    Raises:
        ValueError: no step can be computed from the group's options.
    """
    rule, memory = member.rule, member.shard.memory
    where = places(memory.numel(), size, memory.device)
    weight, *states = (_decode(member, number, where) for number in range(len(member.formats)))
    gradient = _with_fp64(member.shard.gradient().reshape(-1)[where].float())
    step = int(member.state["step"]) + 1
    # With the errors of the step that follows, which may fail for the same reason.
    scalars = evaluate(rule, group, member.group, step, scale)
    inputs = weight, gradient, tuple(states)
    if rule.factor is not None:
        # The mean over the sample stands for that over the whole tensor.
        mean = lift_rule(rule.statistic)(*inputs, scalars).double().mean()
        scalars = (*scalars, float(torch.tensor(rule.factor(float(mean)), dtype=torch.float32)))
    intended, _ = lift_rule(rule.update)(*inputs, scalars)
    stored = member.formats[0]
    noise = _variance(stored, intended) if stored.stochastic else None
    return Sample(member, where, float(group["lr"]), weight, intended - weight, noise)


def _variance(stored: Format, x: Tensor) -> Tensor:
    """Variance of the sum of ``x`` rounded stochastically: each goes to one of two neighbours."""
    planes = [torch.empty_like(x, dtype=plane.dtype) for plane in stored.planes]
    neighbours = []
    for draw in (0, 0xFFFF):
        stored.encode(x, torch.full_like(x, draw, dtype=torch.int32), planes)
        neighbours.append(stored.decode(planes).double())
    below, above = neighbours
    return ((x - below) * (above - x)).sum()


def _decode(member: Member, number: int, where: Tensor) -> Tensor:
    """Some elements of the weight, if ``number`` is 0, or of one of the rule's states."""
    stored = member.formats[number]
    name = ("", *(each.name for each in member.rule.states))[number]
    tensors = {**member.state, "": member.shard.memory}
    planes = []
    for key, plane in zip(stored.plane_names(name), stored.planes, strict=True):
        # The sample consists of whole blocks.
        at = where if plane.block == 1 else where[:: plane.block] // plane.block
        memory = as_real(local(tensors[key]))
        # Of a state in host memory, only the sample is copied to the device.
        planes.append(memory.reshape(-1)[at.to(memory.device)].to(where.device))
    return _with_fp64(stored.decode(planes))


def _with_fp64(sample: Tensor) -> Tensor:
    """Move a sample to where it can be summed in fp64."""
    return sample if has_fp64(sample.device) else sample.cpu()


def places(numel: int, size: int, device: torch.device) -> Tensor:
    """Indices of at most ``size`` elements: runs of whole blocks, evenly spread."""
    if numel <= max(size, _RUN):
        return torch.arange(numel, device=device)
    runs = max(1, size // _RUN)
    last = numel // _BLOCK - _RUN // _BLOCK
    starts = torch.arange(runs, device=device) * last // max(runs - 1, 1)
    return (starts[:, None] * _BLOCK + torch.arange(_RUN, device=device)).reshape(-1)
