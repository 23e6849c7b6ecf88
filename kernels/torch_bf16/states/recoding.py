"""Converts numbers from one format to another, and counts those that change.

A checkpoint may have been saved with another recipe. Its numbers are decoded exactly and rounded
once, to the nearest that the new format can hold; those that change are counted.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torch_bf16.formats import BF16_NEAREST, BF16_STOCHASTIC, FORMATS, FP32, ROLES, Format

__all__ = [
    "BESIDE_WEIGHTS",
    "Changes",
    "recode",
    "recode_weight",
    "restored_remainders",
    "stored_format",
    "without_stale_remainders",
]

BESIDE_WEIGHTS = [(each, plane) for each in ROLES["weights"].values() for plane in each.planes[1:]]
"""The planes that formats keep of a weight beside the parameter, each with its format."""


@dataclass
class Changes:
    """Counts of numbers that were converted from one format to another.

    Attributes:
        counts: ``(name, old format, new format) -> [numbers, numbers that changed]``.
    """

    counts: dict[tuple[str, str, str], list[int]] = field(default_factory=dict)

    def add(self, name: str, old: str, new: str, numbers: int, lost: int) -> None:
        """Count the numbers of one tensor, which had one format, or dtype, and has another."""
        count = self.counts.setdefault((name, old, new), [0, 0])
        count[0] += numbers
        count[1] += lost

    @property
    def lost(self) -> int:
        """How many numbers have changed."""
        return sum(lost for _, lost in self.counts.values())

    def __str__(self) -> str:
        return "; ".join(
            f"{name} {old} -> {new}: "
            + (f"{lost:,} of {n:,} numbers rounded" if lost else f"{n:,} numbers, exact")
            for (name, old, new), (n, lost) in self.counts.items()
        )


def stored_format(state: Mapping[str, Any], name: str) -> Format | None:
    """The format that a number is stored in, by the names and dtypes of its planes.

    Args:
        state: the state of one parameter.
        name: name of the number; ``""`` for the weight, a bf16 parameter that is not in ``state``.

    Returns:
        The format, or None if no format has such planes.
    """
    dtypes = {key: getattr(value, "dtype", None) for key, value in state.items()}
    if not name:
        dtypes[""] = torch.bfloat16
    for format_, planes in _planes_of_formats(name):
        if all(dtypes.get(key) == dtype for key, dtype in planes):
            return format_
    return None


@functools.cache
def _planes_of_formats(name: str) -> list[tuple[Format, list[tuple[str, torch.dtype]]]]:
    """Every format with its planes' keys and dtypes, those with most planes first."""
    found = [
        (each, [*zip(each.plane_names(name), (p.dtype for p in each.planes), strict=True)])
        for each in FORMATS.values()
    ]
    return sorted(found, key=lambda pair: len(pair[1]), reverse=True)


def without_stale_remainders(
    state: Mapping[str, Any], moments: Collection[Format], changes: Changes
) -> dict[str, Any]:
    """A state saved by ``torch.optim``, without the stale parts of an exact master in it.

    When ``torch.optim`` loaded a state dict of ours, it cast those parts, or at least the moments,
    to the dtype of its weights, and it has updated the weights since.

    Args:
        state: the state of one parameter; not changed.
        moments: the formats that the recipe has for the parameter's moments.
        changes: counts the weights that continue from their bf16 numbers.
    """
    kept = dict(state)
    suffixes = {plane.suffix for _, plane in BESIDE_WEIGHTS}
    others = [each for key, each in state.items() if key not in {*suffixes, "step"}]
    dtypes = {getattr(each, "dtype", None) for each in others}
    # torch casts every state: if one is fp32, the optimizer itself keeps the others in bf16.
    narrow = {*moments} == {FP32} and torch.bfloat16 in dtypes and torch.float32 not in dtypes
    for format_, plane in BESIDE_WEIGHTS:
        value = state.get(plane.suffix)
        # State dicts show 16 bits as bf16.
        shown = torch.bfloat16 if plane.dtype == torch.int16 else plane.dtype
        if not isinstance(value, Tensor):
            continue
        if narrow or (value.is_floating_point() and value.dtype != shown):
            kept.pop(plane.suffix, None)
            changes.add("weights", format_.name, BF16_NEAREST.name, value.numel(), value.numel())
    return kept


def restored_remainders(state: Mapping[str, Any]) -> dict[str, Any]:
    """Planes of a weight in a state that ``torch.optim`` or a program has cast to fp32.

    From int8 and from bf16, as which state dicts show 16 bits, that cast loses no bit.

    Args:
        state: the state of one parameter.
    """
    restored = {}
    for _, plane in BESIDE_WEIGHTS:
        value = state.get(plane.suffix)
        if type(value) is not Tensor or value.dtype != torch.float32:
            continue
        if plane.dtype == torch.int16:
            bits = value.contiguous().view(torch.int32)
            number, fits = (bits >> 16).to(torch.int16), not (bits & 0xFFFF).any()
        else:
            number = value.to(plane.dtype)
            fits = torch.equal(number.float(), value)
        if fits:
            restored[plane.suffix] = number
    return restored


def recode(x: Tensor, new: Format) -> tuple[Tensor, ...]:
    """Encode fp32 numbers, rounded to nearest; bf16+8 and uint8 use the middle draw for that.

    Args:
        x: fp32, contiguous.
        new: the format to encode to.

    Returns:
        New planes.
    """
    if new is BF16_STOCHASTIC:
        new = BF16_NEAREST
    planes = tuple(
        torch.empty(plane.shape(x.shape), dtype=plane.dtype, device=x.device)
        for plane in new.planes
    )
    middle = torch.full_like(x, 0x8000, dtype=torch.int32) if new.stochastic else None
    new.encode(x, middle, planes)
    return planes


def recode_weight(x: Tensor, parameter: Tensor, new: Format) -> tuple[Tensor, ...]:
    """The planes that, beside the parameter, come as near as possible to the exact weight ``x``.

    The parameter does not change. Formats differ in how they round ties, and a format with fewer
    bits may round across a tie; then the weight is moved to the parameter's side of the tie, by as
    little as possible.

    Args:
        x: fp32, contiguous.
        parameter: ``x`` rounded to bf16 as some format does it; contiguous.
        new: the new format of the weight.
    """
    visible = parameter.detach().view(torch.int16)
    target = visible.to(torch.int32) << 16
    # Move by a unit in fp32's last place, by one in a 24-bit float's, at last to the parameter.
    for units in (1, 1 << 8, 1 << 16):
        planes = recode(x, new)
        off = planes[0].view(torch.int16) != visible
        if not off.any():
            return planes[1:]
        bits = x.view(torch.int32)
        moved = bits + (target - bits).clamp_(-units, units)
        x = torch.where(off, moved, bits).view(torch.float32)
    return recode(x, new)[1:]
