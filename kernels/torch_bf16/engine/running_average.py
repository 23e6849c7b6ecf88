"""Running averages of whole tensors, in any format: one call of a backend for many of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from torch_bf16.backends import Bucket, Variant, choose
from torch_bf16.formats import Format
from torch_bf16.numerics.counter_rng import stream_base, tensor_key
from torch_bf16.rules import AVERAGE

__all__ = ["move_averages"]


def move_averages(
    format_: Format,
    planes: Sequence[tuple[Tensor, ...]],
    values: Sequence[Tensor],
    names: Sequence[str],
    *,
    rate: float,
    step: int,
    seed: int,
    scale: float = 1.0,
    backend: str | None = None,
) -> None:
    """``average = average + (scale * value - average) * rate``, in place.

    Args:
        format_: how the averages are stored.
        planes: of each average, its planes, contiguous; mutated.
        values: one for each average, of as many elements, all bf16 or all fp32, on one device.
        names: one for each; they key the rounding noise, with ``seed`` and ``step``.
        rate: share of the value that enters.
        step: 1-based number of the update.
        seed: any integer.
        scale: multiplied into the values.
        backend: name of the backend; None for the best that works.
    """
    device = values[0].device
    variant = Variant(AVERAGE, format_, (), values[0].dtype, device)
    sizes = np.array([value.numel() for value in values], np.int64)
    keys = [tensor_key(name) for name in names]
    bases = [[stream_base(seed, key, draw.stream) for draw in variant.draws] for key in keys]
    bucket = Bucket(
        variant=variant,
        planes=[[each] for each in planes],
        numels=sizes,
        offsets=np.zeros(len(sizes), np.int64),
        widths=np.maximum(sizes, 1),
        pitches=np.maximum(sizes, 1),
        bases=np.array(bases, np.uint32),
        gradients=[value.detach().resolve_neg().contiguous() for value in values],
        steps=np.full(len(sizes), step, np.int64),
        rows=np.zeros(len(sizes), np.int64),
        scalars=np.array([[scale, rate]], np.float64).astype(np.float32),
    )
    # Kernels know blocks as states of a rule only, and here the average itself is in blocks.
    blocked = format_.block > 1
    choose(device, "eager" if blocked else backend).run(bucket)
