"""The reference backend: plain torch operations, on any device, a slice of a tensor at a time.

Slow, because every operation passes through memory, but bit for bit like every other backend.
"""

from __future__ import annotations

import functools
import operator
import platform
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_bf16.errors import partial_if_begun
from torch_bf16.numerics.counter_rng import block_keys, draw16, noise_bits
from torch_bf16.numerics.roots import has_fp64, sqrt
from torch_bf16.rules import LARGEST_STATISTIC, STATISTIC_UNIT, lift

from .backend import Kernel
from .bucket import Bucket
from .host_scalars import HostScalars
from .inputs import KernelInputs
from .subnormals import subnormals_kept
from .totals import with_factors

__all__ = ["SLICE", "SLICE_ON_GPU", "EagerBackend", "lift_rule"]

SLICE, SLICE_ON_GPU = 1 << 20, 1 << 24
"""Elements that are updated at a time, on CPUs and elsewhere.

This bounds the temporaries: about ten fp32 copies of a slice live at once, however large the
tensor. On a GPU, a small slice would be done before the next of a hundred operations is launched.
"""


class EagerBackend:
    """Plain torch operations, on any device."""

    name = "eager"
    capturable = False
    by_address = False
    scalars = HostScalars

    def unavailable(self, device: torch.device) -> str | None:
        """Why this backend cannot run on ``device``: it always can."""
        return None

    def fingerprint(self, device: torch.device) -> list[str]:
        """The kind of device, or a GPU's model, and the host's architecture."""
        model = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        return [model, platform.machine()]

    def load(self, bucket: Bucket) -> Kernel:
        """Make the kernel for a bucket."""
        return _EagerKernel(bucket)

    @subnormals_kept()
    def squares(self, tensors: Sequence[Tensor]) -> Tensor:
        """The sum of the squares of all elements; torch sums each tensor in at least fp32."""
        dtype = torch.promote_types(tensors[0].dtype, torch.float32)
        norms = torch._foreach_norm(list(tensors), 2, dtype)  # pyright: ignore[reportPrivateImportUsage]
        stacked = torch.stack(norms)
        # In fp64, where squares of fp32 numbers cannot overflow; some GPUs have no fp64.
        stacked = stacked if has_fp64(stacked.device) else stacked.cpu()
        return stacked.double().square().sum()


class _EagerKernel:
    """torch's operations over a bucket."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    @subnormals_kept()
    def __call__(self, inputs: KernelInputs) -> None:
        """Update every tensor of the bucket, in place."""
        bucket = self._bucket
        inputs = with_factors(bucket.variant.rule, bucket.totals, inputs)
        with partial_if_begun() as writes:
            for tensor, start, stop, part in self._slices(inputs):
                planes, numbers = _update(bucket, inputs, tensor, part, start, stop)
                writes.begun = True
                _encode(bucket, inputs, tensor, planes, numbers, start, stop)

    @subnormals_kept()
    def measure(self, inputs: KernelInputs) -> None:
        """Add the statistic of each tensor to the bucket's sums."""
        totals: Any = self._bucket.totals
        statistic = lift_rule(self._bucket.variant.rule.statistic)
        for tensor, start, stop, part in self._slices(inputs):
            _, numbers = _decode(self._bucket, tensor, start, stop)
            values = statistic(*_arguments(numbers, part, inputs, tensor))
            # A NaN is not below LARGEST_STATISTIC, so it becomes that.
            bounded = torch.where(values < LARGEST_STATISTIC, values, LARGEST_STATISTIC)
            totals.sums[totals.places[tensor]] += (bounded * STATISTIC_UNIT).to(torch.int64).sum()

    def compile(self, n_scalars: int) -> None:
        """Do nothing: there is nothing to compile."""

    def _slices(self, inputs: KernelInputs) -> Iterator[tuple[int, int, int, Tensor]]:
        """Slices of tensors with a gradient: tensor number, start, stop, part of the gradient."""
        size = SLICE if self._bucket.variant.device.type == "cpu" else SLICE_ON_GPU
        for tensor, gradient in enumerate(inputs.gradients):
            if gradient is not None:
                numel = int(self._bucket.numels[tensor])
                for start in range(0, numel, size):
                    stop = min(numel, start + size)
                    yield tensor, start, stop, gradient.view(-1)[start:stop]


def _decode(bucket: Bucket, tensor: int, start: int, stop: int) -> tuple[list[Any], list[Tensor]]:
    """The planes of a slice of a tensor, for each number, and the numbers decoded to fp32."""
    formats = bucket.variant.formats
    planes = [
        tuple(
            memory.view(-1)[start // plane.block : stop // plane.block]
            for memory, plane in zip(tensors, each.planes, strict=True)
        )
        for tensors, each in zip(bucket.planes[tensor], formats, strict=True)
    ]
    return planes, [each.decode(views) for each, views in zip(formats, planes, strict=True)]


def _arguments(
    numbers: list[Tensor], gradient: Tensor, inputs: KernelInputs, tensor: int
) -> tuple[Any, ...]:
    """The arguments of a rule's ``update`` and ``statistic``."""
    weight, *states = numbers
    scalars = tuple(float(x) for x in inputs.scalars.table[inputs.scalars.rows[tensor]])
    return weight, gradient.float(), tuple(states), scalars


def _update(
    bucket: Bucket, inputs: KernelInputs, tensor: int, gradient: Tensor, start: int, stop: int
) -> tuple[list[Any], list[Tensor]]:
    """The planes of a slice of a tensor, for each number, and the numbers that go there."""
    planes, numbers = _decode(bucket, tensor, start, stop)
    update = lift_rule(bucket.variant.rule.update)
    weight, states = update(*_arguments(numbers, gradient, inputs, tensor))
    return planes, [weight, *states]


def _encode(
    bucket: Bucket,
    inputs: KernelInputs,
    tensor: int,
    planes: list[Any],
    numbers: list[Tensor],
    start: int,
    stop: int,
) -> None:
    """Write the numbers of a slice of a tensor to its planes."""
    variant, words = bucket.variant, {}
    for each, x, views, draw in zip(variant.formats, numbers, planes, variant.draws, strict=True):
        r = None
        if each.stochastic:
            # Numbers that share a stream share its words.
            if draw.stream not in words:
                words[draw.stream] = _noise(bucket, inputs, tensor, draw.stream, start, stop)
            r = draw16(words[draw.stream], draw)
        each.encode(x, r, views)


def _noise(bucket, inputs, tensor: int, stream: int, start: int, stop: int) -> Tensor:
    """The noise words of elements ``start .. stop - 1`` of a tensor in one of its streams."""
    bases = bucket.bases if inputs.bases is None else inputs.bases
    indices, blocks = _indices(bucket, tensor, start, stop)
    t0, t1 = (int(word) for word in bases[tensor, bucket.variant.streams.index(stream)])
    words = torch.empty(0, device=indices.device)
    for block in blocks:
        keys = block_keys((t0, t1), int(inputs.scalars.steps[tensor]), block)
        drawn = noise_bits(*keys, indices.to(torch.int32))
        words = drawn if block == blocks[0] else torch.where(indices >> 32 == block, drawn, words)
    return words


def _indices(bucket: Bucket, tensor: int, start: int, stop: int) -> tuple[Tensor, range]:
    """Global indices of elements ``start .. stop - 1`` in int64, and their blocks of 2**32.

    Noise keys hold for one block.
    """
    offset = int(bucket.offsets[tensor])
    width, pitch = int(bucket.widths[tensor]), int(bucket.pitches[tensor])
    # In int64, because an index above 2**31 would be negative in int32.
    indices = torch.arange(start, stop, device=bucket.variant.device)
    if bucket.variant.indices == "transposed":
        indices += offset
        rows, size = _floor(indices, width), width * pitch
        columns = indices - rows * width
        indices = _floor(indices, size).mul_(size).add_(columns.mul_(pitch))
        return indices.add_(rows.remainder_(pitch)), range(1)
    if bucket.variant.indices == "strided":
        indices += _floor(indices, width) * (pitch - width)
    first, last = (e + offset + e // width * (pitch - width) >> 32 for e in (start, stop - 1))
    return indices.add_(offset), range(first, last + 1)


def _floor(x: Tensor, divisor: int) -> Tensor:
    return x.div(divisor, rounding_mode="floor")


def _maximum(a, b):
    return torch.where(a > b, a, torch.where(b >= a, b, a + b))


def _minimum(a, b):
    return torch.where(a < b, a, torch.where(b <= a, b, a + b))


def _sign(x: Tensor) -> Tensor:
    return torch.where(x > 0, 1.0, torch.where(x < 0, -1.0, x - x))


_ARITHMETIC = {
    "sqrt": sqrt,
    "div": operator.truediv,
    "maximum": _maximum,
    "minimum": _minimum,
    "sign": _sign,
}


@functools.cache
def lift_rule(function):
    """Lift a rule's ``update`` or ``statistic`` to fp32 tensors."""
    return lift(function, _ARITHMETIC, lambda lifted: lifted)
