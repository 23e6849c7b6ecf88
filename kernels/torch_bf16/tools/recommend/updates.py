"""How far weights move, in spacings of the formats that could store them.

A weight ``w`` lies between two bf16 numbers that are ``u`` apart, and its optimizer moves it by
``d``. Stochastic rounding adds noise to the step, with a variance of at most ``u |d|``, and close
to that if ``|d|`` is much smaller than ``u``. Over the steps of a run the variances add up, and so
do the updates, here those of a layer::

    S = (sum of the steps' d)^2 / (sum of the steps' u |d|)

For one element whose updates are all the same, ``S`` is the distance that it moves, in spacings,
and ``1 / sqrt(S)`` is noise over drift (docs/numerics.md). Both sums are proportional to the
learning rate, so that a few steps tell of a whole schedule; a format with ``b`` more bits has
``2^b`` times the ``S``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from math import prod as numel

import torch
from torch import Tensor

__all__ = ["BITS", "Layer", "ParameterSums", "sums_of_step"]

BITS = {"bf16_stochastic": 0, "bf16+8": 8}
"""For each format of weights that is rounded stochastically, its bits beyond those of bf16."""

_NAMES = ("squares", "nearest", "path", "unit", "noise")
# Exponents of fp32, subnormal numbers too, as torch.frexp gives them.
_LOWEST, _EXPONENTS = -149, 278
# fp16 rounds what is below half of its smallest number to zero.
_FP16_LOST = 2.0**-25


class ParameterSums:
    """What was observed of one parameter.

    Args:
        name: the parameter's name.
        shape: the shape of the whole parameter.
        rate: which learning rate its updates follow: the numbers of its optimizer and group.
        stays_fp32: whether it is fp32 by every recipe.

    Attributes:
        observed_steps: how many steps were observed.
        sums: over all observed steps, in fp64, each divided by the learning rate as often as it is
            proportional to it: squared updates, what rounding to nearest bf16 leaves of updates
            (``<stored, d>``), sizes of updates, spacings, and the variance of noise.
        exponents: how many of the nonzero gradients have each exponent.
        elements: how many elements were observed in each step.
        largest: the largest absolute value of a gradient.
        length: sum of the learning rates of the whole run, or the number of its steps.
    """

    def __init__(
        self, name: str, shape: tuple[int, ...], rate: tuple[int, int], stays_fp32: bool = False
    ) -> None:
        self.name, self.shape, self.rate = name, shape, rate
        self._stays_fp32 = stays_fp32
        self.observed_steps = self.elements = 0
        self.sums: Tensor = torch.zeros(len(_NAMES), dtype=torch.float64)
        self.exponents: Tensor = torch.zeros(_EXPONENTS, dtype=torch.int64)
        self.largest = 0.0
        self.length = 1.0

    @property
    def is_exact(self) -> bool:
        """Whether every recipe keeps it exactly: norm gains, biases and what stays in fp32."""
        return self._stays_fp32 or len(self.shape) < 2

    def add(self, weight: Tensor, update: Tensor, gradient: Tensor, lr: float) -> None:
        """Add one observed step.

        Args:
            weight: some elements before the step, fp32 or fp64.
            update: what the step would add to them without rounding.
            gradient: the gradient of these elements, finite.
            lr: the learning rate of the step, positive.
        """
        self.observed_steps += 1
        self.elements = weight.numel()
        self.sums += sums_of_step(weight.double(), update.double(), lr).cpu()
        size = gradient.detach().float().abs()
        self.largest = max(self.largest, float(size.max()) if size.numel() else 0.0)
        exponents = torch.frexp(size[size > 0])[1].long() - _LOWEST
        self.exponents += torch.bincount(
            exponents.clamp_(0, _EXPONENTS - 1), minlength=_EXPONENTS
        ).cpu()


def sums_of_step(weight: Tensor, update: Tensor, lr: float) -> Tensor:
    """The sums of one observed step, in the order in which :class:`ParameterSums` keeps them.

    Args:
        weight: fp64.
        update: fp64, of the same shape.
        lr: the learning rate that updates are divided by.

    Returns:
        fp64, one number per sum.
    """
    # A zero that stays zero, as in a row of padding, has no spacing.
    moving = (weight != 0) | (update != 0)
    weight, update = weight[moving], update[moving]
    reach = torch.maximum(weight.abs(), (weight + update).abs())
    # frexp's mantissa is in [0.5, 1), and bf16 has eight bits with the first one.
    unit = torch.ldexp(torch.ones_like(reach), torch.frexp(reach)[1] - 8)
    share = update.abs() / unit
    nearest = (share.round() * share * unit.square()).sum() / lr**2
    squares, noise = update.square().sum() / lr**2, (unit * update.abs()).sum() / lr
    return torch.stack([squares, nearest, update.abs().sum() / lr, unit.sum(), noise])


@dataclass(frozen=True)
class Layer:
    """The parameters of a layer, or of several.

    Attributes:
        name: the parameters' names without the last part.
        parameters: what was observed of them.
    """

    name: str
    parameters: tuple[ParameterSums, ...]

    @property
    def elements(self) -> int:
        """Elements of all parameters, each counted whole."""
        return sum(numel(each.shape) for each in self.parameters)

    @property
    def moves(self) -> bool:
        """Whether anything was updated."""
        return self._sum("squares") > 0

    def update(self) -> float:
        """Root mean square of an update, per learning rate."""
        return (self._sum("squares") / self.elements) ** 0.5

    def spacings(self) -> float:
        """How far an element moves in the whole run, there and back, in spacings of bf16."""
        return self._sum("path", 1) / self._sum("unit")

    def nearest(self) -> float:
        """Share of the updates that rounding to nearest bf16 lets through."""
        squares = self._sum("squares")
        return min(self._sum("nearest") / squares, 1.0) if squares else 1.0

    def distance(self, format_: str) -> float:
        """``S`` of the whole run; infinite in formats that are not rounded stochastically."""
        noise = self._sum("noise", 1)
        if format_ not in BITS or not noise:
            return math.inf
        return 2 ** BITS[format_] * self._sum("squares", 2) / noise

    def underflow(self, scale: float = 1.0) -> float:
        """Share of the gradients that fp16 would round to zero.

        Args:
            scale: the factor by which the loss is multiplied first.
        """
        counts = torch.stack([each.exponents for each in self.parameters]).sum(0)
        total = int(counts.sum())
        # Numbers of exponent e are below 2^e.
        bounds = 2.0 ** (torch.arange(_EXPONENTS, dtype=torch.float64) + _LOWEST)
        return int(counts[bounds * scale <= _FP16_LOST].sum()) / total if total else 0.0

    @property
    def largest(self) -> float:
        """The largest absolute value of a gradient."""
        return max(each.largest for each in self.parameters)

    def _sum(self, name: str, power: int = 0) -> float:
        """A sum over all elements in one step, times the run's length to the given power."""
        place = _NAMES.index(name)
        # The observed elements stand for the whole parameter.
        return sum(
            float(each.sums[place])
            * numel(each.shape)
            / each.elements
            / each.observed_steps
            * each.length**power
            for each in self.parameters
        )
