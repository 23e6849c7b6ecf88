"""Backends that are off by one in one place, as a kernel might be, and training that meets them."""

import dataclasses
import os
import signal

import numpy as np
import torch

from torch_bf16 import AdamW
from torch_bf16.backends.eager import EagerBackend
from torch_bf16.backends.host_scalars import HostScalars


def _shifted(x):
    """The last of several elements is read or written as its neighbour."""
    x = x.clone()
    if x.numel() > 1:
        x.view(-1)[-1] = x.view(-1)[-2]
    return x


def _with_formats(bucket, change):
    """A bucket whose formats are another dialect's."""
    formats = tuple(change(each) for each in bucket.variant.formats)
    return dataclasses.replace(bucket, variant=dataclasses.replace(bucket.variant, formats=formats))


def _load(bucket):
    def change(format_):
        return dataclasses.replace(format_, decode=lambda planes: _shifted(format_.decode(planes)))

    return _with_formats(bucket, change)


def _store(bucket):
    def change(format_):
        def split(x, r):
            first, *others = format_.split(x, r)
            return (_shifted(first), *others)

        return dataclasses.replace(format_, split=split)

    return _with_formats(bucket, change)


def _rounding(bucket):
    """Draws are compared with ``>`` for ``>=``; without draws, ties go away from zero."""

    def change(format_):
        def split(x, r):
            if r is not None:
                return format_.split(x, (r - 1).clamp_min(0))
            bits = x.view(torch.int32)
            return format_.split(torch.where(x.isfinite(), bits | 1, bits).view(torch.float32), r)

        return dataclasses.replace(format_, split=split)

    return _with_formats(bucket, change)


def _rule(bucket):
    """The rule returns one unit in the last place more than it must, for what it updates."""

    def change(format_):
        def split(x, r):
            more = (x.view(torch.int32) + 1).view(torch.float32)
            return format_.split(torch.where(x.isfinite(), more, x), r)

        return dataclasses.replace(format_, split=split)

    first, *others = bucket.variant.formats
    variant = dataclasses.replace(bucket.variant, formats=(change(first), *others))
    return dataclasses.replace(bucket, variant=variant)


def _noise(bucket):
    return dataclasses.replace(bucket, offsets=bucket.offsets + 1)


class Planted(EagerBackend):
    """The eager backend with a fault in ``place``."""

    name = "planted"

    def __init__(self, place):
        self.place = place

    def fingerprint(self, device):
        return [self.place]

    def load(self, bucket):
        change = {
            "load": _load, "store": _store, "rounding": _rounding, "rule": _rule, "noise": _noise
        }.get(self.place)  # fmt: skip
        kernel = super().load(bucket if change is None else change(bucket))

        def run(inputs):
            rows, gradients = inputs.scalars, inputs.gradients
            if self.place == "scalar":
                table = rows.table
                table = np.roll(table, 1, 1) if table.shape[1] > 1 else np.nextafter(table, 2)
                rows = dataclasses.replace(rows, table=table)
            if self.place == "row":
                rows = dataclasses.replace(rows, rows=np.roll(rows.rows, 1))
            if self.place == "constant":
                # One of the rule's, by less than the last two bits of bf16.
                column = np.argmax(np.abs(rows.table).max(0))
                table = rows.table.copy()
                table[:, column] *= np.float32(1 + 2**-6)
                rows = dataclasses.replace(rows, table=table)
            if self.place == "load":
                gradients = [_shifted(each) for each in gradients]
            kernel(inputs._replace(scalars=rows, gradients=gradients))

        run.compile, run.measure = kernel.compile, kernel.measure
        return run


PLACES = ("load", "rule", "rounding", "noise", "store", "scalar", "row", "constant")


class Deadly(Planted):
    """A backend that ends the process when it compiles a kernel or, as by an illegal access, runs
    it."""

    def fingerprint(self, device):
        return []

    def load(self, bucket):
        kernel = super().load(bucket)

        def die(*given):
            os.kill(os.getpid(), signal.SIGKILL)

        if self.place == "compile":
            kernel.compile = die
        if self.place != "run":
            return kernel
        die.compile, die.measure = kernel.compile, die
        return die


class Failing:
    """A backend that cannot compile."""

    name, capturable, scalars = "cpu", False, HostScalars

    def unavailable(self, device):
        return None

    def fingerprint(self, device):
        return []

    def load(self, bucket):
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC")


class Breaking(Planted):
    """A backend whose kernels the device does not survive."""

    def load(self, bucket):
        def run(inputs):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        run.compile = super().load(bucket).compile
        return run


def trained(backend=None, steps=3):
    """Weights after some steps of AdamW on made-up gradients."""
    generator = torch.Generator().manual_seed(1)
    parameter = torch.nn.Parameter(torch.ones(33, 7, dtype=torch.bfloat16))
    optimizer = AdamW([parameter], lr=1e-3, backend=backend)
    for _ in range(steps):
        parameter.grad = torch.randn(33, 7, generator=generator).bfloat16()
        optimizer.step()
    return parameter.detach()


def shows(place, variant):
    """Whether a fault in that place changes any bit of a variant's planes."""
    exact = variant.formats[0].name == "bf16+8" and variant.gradient_dtype == torch.bfloat16
    if variant.rule.name == "store" and exact and place in ("rounding", "noise"):
        # A bf16 number has no bits that this format would round away.
        return False
    if place == "noise":
        return any(each.stochastic for each in variant.formats)
    return True
