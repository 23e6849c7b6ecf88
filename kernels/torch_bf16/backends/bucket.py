"""What a kernel is bound to: many tensors that one call updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from torch_bf16 import rules
from torch_bf16.formats import BF16_NEAREST, FP32, Format
from torch_bf16.numerics import counter_rng
from torch_bf16.numerics.counter_rng import Draw, stream_base, tensor_key
from torch_bf16.rules import Rule

from .totals import Totals

__all__ = ["Bucket", "Indices", "Run", "Variant"]

Indices = Literal["consecutive", "strided", "transposed"]
"""How the global indices of a tensor's elements follow from each other; see :class:`Bucket`."""

Run = tuple[int, int, int, int]
"""Number of elements, offset, width and pitch of a tensor; see :class:`Bucket`."""

_DRAWS = {
    rules.WEIGHTS: counter_rng.WEIGHT,
    rules.GRADIENT: counter_rng.GRADIENT,
    rules.FIRST_MOMENT: counter_rng.FIRST_MOMENT,
    rules.SECOND_MOMENT: counter_rng.SECOND_MOMENT,
    # Only in rules without a first moment.
    rules.ITERATE: counter_rng.FIRST_MOMENT,
    # Never used: its format is fp32.
    rules.EXACT: counter_rng.FIRST_MOMENT,
}


@dataclass(frozen=True)
class Variant:
    """What a compiled kernel depends on.

    Attributes:
        rule: the update rule.
        formats: the format of the number that the rule updates, mostly a weight, and then of each
            of its states.
        gradient_dtype: bfloat16 or float32.
        device: the device of all tensors.
        indices: how global indices follow from each other.
    """

    rule: Rule
    formats: tuple[Format, ...]
    gradient_dtype: torch.dtype
    device: torch.device
    indices: Indices = "consecutive"

    @property
    def read_formats(self) -> tuple[Format, ...]:
        """The formats of what a kernel reads: the gradient's, and then ``formats``."""
        gradient = FP32 if self.gradient_dtype == torch.float32 else BF16_NEAREST
        return gradient, *self.formats

    @property
    def draws(self) -> tuple[Draw, ...]:
        """The random bits for each number, in the order of ``formats``."""
        return (_DRAWS[self.rule.role], *(_DRAWS[state.role] for state in self.rule.states))

    @property
    def streams(self) -> tuple[int, ...]:
        """The noise streams in use; numbers that share a stream share its words."""
        pairs = zip(self.formats, self.draws, strict=True)
        return tuple(dict.fromkeys(draw.stream for each, draw in pairs if each.stochastic))

    @property
    def name(self) -> str:
        """A readable part of an identifier, such as ``adamw_bf16_plus_16_fp32_fp32_bfloat16``."""
        dtype = str(self.gradient_dtype).removeprefix("torch.")
        words = [self.rule.identifier, *(each.name for each in self.formats), dtype]
        words += [self.indices] if self.indices != "consecutive" else []
        return "_".join(words).replace("+", "_plus_")


@dataclass(frozen=True)
class Bucket:
    """Tensors that share a variant. All are contiguous.

    ``n`` is the number of tensors, ``s`` the number of the variant's streams. An element's global
    index, its place in the whole tensor in row-major order, keys its noise. That of element ``e``
    of a tensor is

    - ``offset + e`` if the variant's indices are consecutive;
    - ``offset + (e // width) * pitch + e % width`` if they are strided: the elements are runs of
      the whole tensor, at equal distances;
    - ``m // size * size + m % width * pitch + m // width % pitch``, with ``m = offset + e`` and
      ``size = pitch * width``, if they are transposed: the whole tensor lies in memory as matrices
      of ``pitch`` rows and ``width`` columns, see :class:`torch_bf16.memory.TransposedOrder`.

    Attributes:
        variant: what the kernel is compiled for.
        planes: for each tensor, for each format, its plane tensors; updated in place.
        numels: int64 ``[n]``.
        offsets: int64 ``[n]``, global index of each tensor's first element; if they are transposed,
            its place in the memory of the whole tensor.
        widths: int64 ``[n]``, at least 1; all elements if indices are consecutive.
        pitches: int64 ``[n]``.
        bases: uint32 ``[n, s, 2]``, the two words that each tensor's noise in each stream starts
            from.
        totals: where the rule's statistic is summed; None if it has none.
    """

    variant: Variant
    planes: Sequence[Sequence[tuple[Tensor, ...]]]
    numels: np.ndarray
    offsets: np.ndarray
    widths: np.ndarray
    pitches: np.ndarray
    bases: np.ndarray
    totals: Totals | None = None

    @property
    def addresses(self) -> np.ndarray:
        """The addresses of the planes, number after number: int64, a row for each tensor."""
        rows = [[plane.data_ptr() for planes in each for plane in planes] for each in self.planes]
        return np.array(rows, np.int64)

    @classmethod
    def of(
        cls,
        variant: Variant,
        planes: Sequence[Sequence[tuple[Tensor, ...]]],
        runs: Sequence[Run],
        names: Sequence[str],
        seed: int,
        totals: Totals | None = None,
    ) -> Bucket:
        """Make a bucket whose noise is keyed by names.

        Args:
            variant: the variant of all tensors.
            planes: as the attribute.
            runs: number of elements, offset, width and pitch of each tensor.
            names: one for each tensor; with ``seed`` they key the noise.
            seed: the seed of the noise.
            totals: as the attribute; None if all tensors are whole.
        """
        streams, keys = variant.streams, [*map(tensor_key, names)]
        bases = np.array([stream_base(seed, k, each) for k in keys for each in streams], np.uint32)
        bases = bases.reshape(len(keys), len(streams), 2)
        numels, offsets, widths, pitches = np.array(runs, np.int64).T.copy()
        if totals is None and variant.rule.statistic is not None:
            totals = Totals.of_whole(numels, variant.device)
        return cls(variant, planes, numels, offsets, widths, pitches, bases, totals)
