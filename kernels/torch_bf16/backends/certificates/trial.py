"""A made-up bucket for each variant, with the same bits on every machine, and the steps it takes.

Its tensors have tails, several of Triton's chunks, odd offsets, indices across 2**32, and options
of their own; its numbers include subnormals, zeros of both signs, infinities, NaN and the largest
floats.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_bf16 import rules
from torch_bf16.backends.backend import Backend
from torch_bf16.backends.bucket import Bucket, Run, Variant
from torch_bf16.backends.inputs import KernelInputs, ScalarRows
from torch_bf16.formats import Format
from torch_bf16.rules import Rule

__all__ = ["GROUP", "SEED", "Trial", "digests_of", "names_of", "settled"]

SEED = 7
# The step numbers of a trial, in order; every other tensor is a step ahead.
_STEPS = (1, 1000)

# Number of elements, index of the first, and, for strided tensors, elements of a run and the
# distance from its start to that of the next; other tensors are a single run.
_SMALL = (
    (1, 0, 1, 1),
    (3, 5, 2, 9),
    (130, 5 * 2**32 + 3, 37, 101),
    (4097, 2**32 - 1000, 37, 2**20),
    (9219, 8, 512, 4096),
)
# For transposed tensors: number of elements, place of the first, columns and rows.
_SMALL_TRANSPOSED = (
    (1, 0, 3, 2),
    (3, 5, 2, 9),
    # The last elements of matrices that end at most 2**32 elements from the first one.
    (130, 2**32 // (37 * 101) * (37 * 101) - 130, 37, 101),
    (4097, 2**31 - 1000, 37, 2**19 - 1),
    (9219, 8, 512, 9),
)
# Enough elements for some of the 2**16 equally likely draws to hit the threshold of rounding, and
# four times as many if at most two numbers can show it. Many tensors, as each has options of its
# own: a rule that adds one of two amounts to a bf16 weight has few different results in each.
_LARGE = tuple((2**14 + 4, 2**31 + (number << 20), 1000, 3000) for number in range(16))

# Lowest biased exponent and number of exponents: no rule turns all such numbers into NaN.
_EXPONENTS = {
    rules.WEIGHTS: (121, 7),
    rules.GRADIENT: (115, 12),
    rules.FIRST_MOMENT: (113, 10),
    rules.SECOND_MOMENT: (105, 20),
    rules.EXACT: (119, 8),
    rules.ITERATE: (121, 7),
}
_UNSIGNED = (rules.SECOND_MOMENT, rules.EXACT)
_SPECIAL = np.array(
    [
        *(0x00000000, 0x80000000, 0x00000001, 0x807FFFFF, 0x00012345, 0x00800000),
        *(0x7F800000, 0xFF800000, 0x7FC00000, 0x7F7FFFFF, 0xFF7F8000, 0x3F808000),
    ],
    np.uint32,
)
_MAGNITUDE, _UPPER = np.uint32(0x7FFFFFFF), np.uint32(0xFFFF0000)

_BITS: dict[torch.dtype, Any] = {
    torch.bfloat16: np.uint16,
    torch.float32: np.uint32,
    torch.int16: np.int16,
    torch.int8: np.int8,
    torch.uint8: np.uint8,
}
_NAN: dict[Any, int] = {np.uint16: 0x7FC0, np.uint32: 0x7FC00000}
_INFINITY: dict[Any, int] = {np.uint16: 0x7F80, np.uint32: 0x7F800000}


class _Group(dict[str, Any]):
    """A parameter group for any rule: an option that it does not have is 0.5."""

    def __missing__(self, key: str) -> float:
        return 0.5


GROUP = _Group(
    lr=0.01,
    betas=(0.9, 0.99),
    eps=1e-8,
    weight_decay=0.1,
    decoupled_weight_decay=False,
    momentum=0.9,
    dampening=0.1,
    nesterov=True,
    alpha=0.95,
    momentum_decay=4e-3,
    lr_decay=0.1,
    clip=True,
    rate=0.05,
    k=9,
    warmup_steps=20,
    r=1.0,
    weight_lr_power=2.0,
    weight_sum=2e-4,
    lr_max=0.0,
    scale=0.75,
)
"""A parameter group for a trial; ``scale`` is what its gradients are multiplied by."""

_OWN = ("lr", "weight_decay", "rate", "scale")


@dataclass(frozen=True)
class Trial:
    """The numbers of a trial, on the host; bf16 and fp32 as unsigned integers.

    Attributes:
        variant: the variant that is tried.
        planes: for each tensor, for each format, its planes.
        gradients: of each tensor.
        runs: number of elements, offset, width and pitch of each tensor.
        groups: the parameter group of each tensor.
        scalars: of each step.
    """

    variant: Variant
    planes: list[list[tuple[np.ndarray, ...]]]
    gradients: list[np.ndarray]
    runs: list[Run]
    groups: Sequence[Mapping[str, Any]]
    scalars: list[ScalarRows]

    @classmethod
    def of(cls, variant: Variant) -> Trial:
        """The trial of a variant, the same on every device.

        If the rule's options cannot be made up, the rule's exception is passed on.
        """
        # Rows, offsets and lengths of tensors are multiples of a block.
        unit = 64 if any(each.block > 1 for each in variant.formats) else 1
        more = 4 if len(variant.formats) < 3 else 1
        small = _SMALL_TRANSPOSED if variant.indices == "transposed" else _SMALL
        shapes = [*small, *((more * size, *run) for size, *run in _LARGE)]
        sizes = [-(-size // unit) * unit for size, *_ in shapes]
        groups = [_group(number) for number in range(len(shapes))]
        scalars = [_scalars(variant.rule, groups, step) for step in _STEPS]
        source = np.random.PCG64(SEED)
        roles = [variant.rule.role, *(state.role for state in variant.rule.states)]
        planes, gradients = [], []
        in_bf16 = variant.gradient_dtype == torch.bfloat16
        for size in sizes:
            gradient = _numbers(source, rules.GRADIENT, 0, size)
            gradients.append(_upper(gradient) if in_bf16 else gradient)
            numbers = [_numbers(source, role, k, size) for k, role in enumerate(roles, 1)]
            pairs = zip(variant.formats, numbers, strict=True)
            planes.append([_planes(source, each, x) for each, x in pairs])
        runs = []
        for size, (_, offset, width, pitch) in zip(sizes, shapes, strict=True):
            run = (size, size) if variant.indices == "consecutive" else (width * unit, pitch * unit)
            runs.append((size, offset // unit * unit, *run))
        return cls(variant, planes, gradients, runs, groups, scalars)

    def load(
        self, backend: Backend, device: torch.device, unaligned: bool = False
    ) -> Callable[[], list[list[np.ndarray]]]:
        """Compile a backend's kernel, and return a function that takes the steps.

        Args:
            backend: the backend that takes the steps.
            device: the device it takes them on.
            unaligned: let tensors start one element after an aligned address.

        Returns:
            A function that returns the planes after the steps, as :func:`settled` does.
        """

        def place(array: np.ndarray, dtype: torch.dtype) -> Tensor:
            host = torch.from_numpy(array.view(f"i{array.itemsize}")).view(dtype)
            room = torch.empty(len(host) + 1, dtype=dtype, device=device)
            return (room[1:] if unaligned else room[:-1]).copy_(host)

        formats = self.variant.formats
        planes = [
            [
                tuple(map(place, arrays, (plane.dtype for plane in each.planes)))
                for arrays, each in zip(numbers, formats, strict=True)
            ]
            for numbers in self.planes
        ]
        gradients = [place(each, self.variant.gradient_dtype) for each in self.gradients]
        variant = replace(self.variant, device=device)
        names = [f"p{number}" for number in range(len(planes))]
        bucket = Bucket.of(variant, planes, self.runs, names, SEED)
        kernel = backend.load(bucket)
        kernel.compile(len(self.scalars[0].table[0]))

        def run() -> list[list[np.ndarray]]:
            for each in self.scalars:
                inputs = KernelInputs(gradients, each)
                if bucket.totals is not None:
                    bucket.totals.sums.zero_()
                    kernel.measure(inputs)
                kernel(inputs)
            return settled(formats, [[list(map(_on_host, each)) for each in row] for row in planes])

        return run

    def run(self, backend: Backend, device: torch.device) -> list[list[np.ndarray]]:
        """The planes after the steps of a backend on aligned tensors; see :meth:`load`."""
        return self.load(backend, device)()


def _group(number: int) -> _Group:
    """The parameter group of tensor ``number``."""
    return _Group(GROUP, **{name: GROUP[name] * (1 + number / 32) for name in _OWN})


def _scalars(rule: Rule, groups: Sequence[Mapping[str, Any]], step: int) -> ScalarRows:
    numbers = np.arange(len(groups), dtype=np.int64)
    # Every other tensor is a step ahead, as if the others had once had no gradient.
    steps = step + numbers % 2
    table = []
    for group, own in zip(groups, steps.tolist(), strict=True):
        options = tuple(float(option) for option in rule.options(group))
        table.append(rule.scalars(options, own, group["scale"]))
    return ScalarRows(steps, numbers, np.array(table, np.float64).astype(np.float32))


def names_of(variant: Variant) -> list[str]:
    """The name of each plane in ``optimizer.state``, in the order of :meth:`Trial.run`."""
    names = ["", *(state.name for state in variant.rule.states)]
    pairs = zip(variant.formats, names, strict=True)
    return [plane or "weight" for each, name in pairs for plane in each.plane_names(name)]


def settled(
    formats: Sequence[Format], planes: Sequence[Sequence[Sequence[np.ndarray]]]
) -> list[list[np.ndarray]]:
    """Join each plane of all tensors, with one bit pattern for NaN and zeros for unspecified bits.

    Args:
        formats: the formats of the weights and states.
        planes: for each tensor, for each format, its planes; floats as unsigned integers.
    """
    joined: list[list[np.ndarray]] = [[] for each in formats for _ in each.planes]
    for numbers in planes:
        columns = iter(joined)
        for each, number in zip(formats, numbers, strict=True):
            for plane, bits in zip(each.planes, number, strict=True):
                if plane.suffix in each.remainders:
                    # The remainder of a NaN depends on which NaN it is.
                    bits = np.where(_is_nan(number[0]), bits.dtype.type(0), bits)
                elif plane.dtype.is_floating_point:
                    bits = np.where(_is_nan(bits), bits.dtype.type(_NAN[bits.dtype.type]), bits)
                next(columns).append(bits)
    return joined


def digests_of(planes: Sequence[Sequence[np.ndarray]]) -> list[str]:
    """The digest of each plane over all tensors: eight bytes in hexadecimal digits."""
    return [
        hashlib.blake2b(b"".join(each.tobytes() for each in plane), digest_size=8).hexdigest()
        for plane in planes
    ]


def _on_host(plane: Tensor) -> np.ndarray:
    host = plane.cpu()
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32}[host.itemsize]
    return host.view(integers).numpy().view(_BITS[plane.dtype])


def _raw(source: np.random.PCG64, n: int) -> np.ndarray:
    # The words of a bit generator are the same in every version of NumPy; its numbers need not be.
    return source.random_raw(n).astype(np.uint32)


def _numbers(source: np.random.PCG64, role: str, place: int, size: int) -> np.ndarray:
    """The bits of fp32 numbers of a size that suits their role, with some special numbers."""
    lowest, span = _EXPONENTS[role]
    raw = _raw(source, size)
    exponent = np.uint32(lowest) + (raw >> np.uint32(23)) % np.uint32(span)
    x = raw & np.uint32(0x807FFFFF) | exponent << np.uint32(23)
    if size > 64:
        # Spaced differently for each number, so that special numbers meet some others but not all.
        x[np.arange(len(_SPECIAL)) * (place + 2)] = np.roll(_SPECIAL, place)
    return x & _MAGNITUDE if role in _UNSIGNED else x


def _planes(source: np.random.PCG64, format_: Format, x: np.ndarray) -> tuple[np.ndarray, ...]:
    """Planes for a number: the first, if it is a float, is ``x``; the others have random bits."""
    planes = []
    for number, plane in enumerate(format_.planes):
        bits = _raw(source, len(x) // plane.block)
        if plane.dtype == torch.bfloat16:
            bits = _upper(x)
        elif plane.block > 1 and plane.dtype == torch.float32:
            bits = np.uint32(118 << 23) + bits % np.uint32(8 << 23)
            bits[1:3] = np.array([_NAN[np.uint32], 0], np.uint32)[: len(bits) - 1]
        elif plane.dtype == torch.float32 and number:
            # A master lies close to its bf16 weight, unless something else wrote the weight.
            written = np.arange(len(x)) % 7 == 3
            bits = np.where(written, bits, x & _UPPER | bits & np.uint32(0x7FFF))
        elif plane.dtype == torch.float32:
            bits = x
        planes.append(bits.astype(_BITS[plane.dtype]))
    return tuple(planes)


def _upper(x: np.ndarray) -> np.ndarray:
    return (x >> np.uint32(16)).astype(np.uint16)


def _is_nan(bits: np.ndarray) -> np.ndarray:
    magnitude = 0x7FFF if bits.dtype == np.uint16 else 0x7FFFFFFF
    return bits & magnitude > _INFINITY[bits.dtype.type]
