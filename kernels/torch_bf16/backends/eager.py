"""The reference backend: plain torch operations, on any device, a slice of a tensor at a time.

Slow, because every operation passes through memory, but with the bits of every other backend.
"""

from __future__ import annotations

import functools
import operator

import torch
from torch import Tensor

from torch_bf16.numerics.counter_rng import block_keys, draw16, noise_bits
from torch_bf16.rules import lift

from .bucket import Bucket
from .scalars import HostScalars as scalars

__all__ = ["CAPTURABLE", "SLICE", "lift_rule", "run", "scalars", "unavailable"]

# Bounds the temporaries: about ten fp32 copies of a slice live at once, however large the tensor.
SLICE = 1 << 20

# Whether a CUDA graph can record a step.
CAPTURABLE = False


def unavailable(device: torch.device) -> str | None:
    """Why this backend cannot run on ``device``: it always can."""
    return None


def run(bucket: Bucket) -> None:
    """Take one optimizer step for every tensor of ``bucket``, in place."""
    update = lift_rule(bucket.variant.rule.update)
    for tensor, gradient in enumerate(bucket.gradients):
        numel = int(bucket.numels[tensor])
        for start in range(0, numel, SLICE):
            _run_slice(bucket, update, tensor, gradient, start, min(numel, start + SLICE))


def _run_slice(bucket, update, tensor, gradient, start, stop):
    formats = bucket.variant.formats
    planes = [
        tuple(
            memory.view(-1)[start // plane.block : stop // plane.block]
            for memory, plane in zip(tensors, each.planes, strict=True)
        )
        for tensors, each in zip(bucket.planes[tensor], formats, strict=True)
    ]
    numbers = [each.decode(views) for each, views in zip(formats, planes, strict=True)]
    scalars = tuple(float(x) for x in bucket.scalars[bucket.rows[tensor]])
    slice_of_gradient = gradient.view(-1)[start:stop].float()
    weight, states = update(numbers[0], slice_of_gradient, tuple(numbers[1:]), scalars)

    for number, (each, views) in enumerate(zip(formats, planes, strict=True)):
        r = None
        if each.stochastic:
            word = _noise(bucket, tensor, number, start, stop, gradient.device)
            r = draw16(word, bucket.variant.draws[number])
        each.encode((weight, *states)[number], r, views)


def _noise(bucket: Bucket, tensor: int, number: int, start: int, stop: int, device) -> Tensor:
    """The noise words of elements ``start .. stop - 1`` of a tensor for one of its formats."""
    offset = int(bucket.offsets[tensor])
    width, pitch = int(bucket.widths[tensor]), int(bucket.pitches[tensor])
    # int64, because an index above 2**31 has the bit pattern of a negative int32.
    elements = torch.arange(start, stop, device=device)
    indices = elements + offset
    if bucket.variant.strided:
        indices += elements.div(width, rounding_mode="floor") * (pitch - width)
    first, last = (e + offset + e // width * (pitch - width) >> 32 for e in (start, stop - 1))
    t0, t1 = (int(word) for word in bucket.bases[tensor, number])
    words = torch.empty(0)
    # Noise keys hold for one block of 2**32 global indices.
    for block in range(first, last + 1):
        keys = block_keys((t0, t1), int(bucket.steps[tensor]), block)
        drawn = noise_bits(*keys, indices.to(torch.int32))
        words = drawn if block == first else torch.where(indices >> 32 == block, drawn, words)
    return words


def _sqrt(x: Tensor) -> Tensor:
    # torch's fp32 square root on CPUs is an ulp off for 6 numbers in 1000. Taken in fp64 and
    # rounded once more it is exact: 53 bits are more than twice 24 and 2.
    return x.double().sqrt().float()


def _maximum(a, b):
    return torch.where(a > b, a, torch.where(b >= a, b, a + b))


def _minimum(a, b):
    return torch.where(a < b, a, torch.where(b <= a, b, a + b))


def _sign(x: Tensor) -> Tensor:
    return torch.where(x > 0, 1.0, torch.where(x < 0, -1.0, x - x))


_ARITHMETIC = {
    "sqrt": _sqrt,
    "div": operator.truediv,
    "maximum": _maximum,
    "minimum": _minimum,
    "sign": _sign,
}


@functools.cache
def lift_rule(update):
    """A rule's ``update`` over fp32 tensors."""
    return lift(update, _ARITHMETIC, lambda function: function)
