"""Norms of gradients; one kernel call reads all gradients of a device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_bf16.backends import squares
from torch_bf16.numerics.roots import has_fp64
from torch_bf16.sharding import all_whole, as_real, gradients_of, shard_of

__all__ = ["clip_coefficient", "norm_over_ranks", "norms_of"]

_KIND = attrgetter("device", "dtype", "layout")


def norms_of(parameters: Iterable[Any]) -> dict[tuple[Any, ...], list[Tensor]]:
    """The norms of this rank's parts of gradients, by the groups of ranks that hold other parts.

    Returns:
        The argument of :func:`norm_over_ranks`; empty if all parameters are whole and none has a
        gradient.

    Raises:
        ValueError: a gradient is sparse.
    """
    parameters = [*parameters]
    alike: dict[Any, list[Tensor]] = defaultdict(list)
    norms: dict[Any, list[Tensor]] = defaultdict(list)
    if all_whole(parameters):
        present = [each for each in gradients_of(parameters) if each is not None]
        alike.update((((), kind), of_kind) for kind, of_kind in _by_kind(present).items())
        parameters = []
    for parameter in parameters:
        shard, gradient = shard_of(parameter), parameter.grad
        groups = tuple(shard.groups())
        if gradient is not None:
            _check(parameter, gradient.layout, gradient.dtype)
            # All ranks must go through the groups in one order, with and without gradients.
            norms.setdefault(groups, [])
            gradient = as_real(shard.gradient())
            alike[groups, _KIND(gradient)].append(gradient)
        elif shard.in_row:
            norms[groups].append(torch.zeros((), device=parameter.device))
    for (groups, (device, dtype, layout)), gradients in alike.items():
        _check(gradients[0], layout, dtype)
        norm = squares(gradients).sqrt()
        # It comes from the host if the device has no fp64.
        norms[groups].append(norm if norm.device == device else norm.float().to(device))
    return norms


def _by_kind(gradients: list[Tensor]) -> dict[Any, list[Tensor]]:
    """Gradients by device, dtype and layout; complex ones as pairs of real numbers."""
    kinds = [*map(_KIND, gradients)]
    if any(dtype.is_complex for _, dtype, _ in {*kinds}):
        gradients = [as_real(each) if each.layout == torch.strided else each for each in gradients]
        kinds = [*map(_KIND, gradients)]
    if len({*kinds}) == 1:
        return {kinds[0]: gradients}
    alike: dict[Any, list[Tensor]] = defaultdict(list)
    for kind, gradient in zip(kinds, gradients, strict=True):
        alike[kind].append(gradient)
    return alike


def norm_over_ranks(norms: Mapping[tuple[Any, ...], list[Tensor]]) -> Tensor:
    """The norm of whole tensors, 0-d fp32, from the norms of the parts that this rank holds.

    Args:
        norms: 0-d fp32 or fp64 tensors, by the groups of ranks that hold other parts; the key is
            empty if each rank holds all. Replicas of a part do not count.
    """
    totals = []
    for groups, parts in norms.items():
        # In fp64, where squares of fp32 numbers cannot overflow; a GPU may lack it.
        place = parts[0].device if has_fp64(parts[0].device) else "cpu"
        total = _together([each.to(place, torch.float64) for each in parts])
        if groups:
            total = total.square()
            for each in groups:
                dist.all_reduce(total, group=each)
            total = total.sqrt()
        totals.append(total)
    norm = _together([each.to(totals[0].device) for each in totals]).float()
    return norm.to(next(iter(norms.values()))[0].device)


def _together(norms: list[Tensor]) -> Tensor:
    """The common norm of tensors from their norms, on one device."""
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def _check(tensor: Tensor, layout: torch.layout, dtype: torch.dtype) -> None:
    if layout != torch.strided:
        raise ValueError(
            f"total_norm: a parameter of shape {tuple(tensor.shape)} has a gradient of {layout} "
            f"and {dtype}; dense gradients can be clipped. Leave this parameter out"
        )


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """The factor, at most 1, by which torch clips gradients of ``norm``; 0-d, on its device."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)
