"""Bytes of a run by what they hold, computed from the formats, the rule and the sharding."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from math import prod

import torch

from torch_bf16.backends import BUFFER_BYTES, BUFFERS
from torch_bf16.formats import Format
from torch_bf16.gradients.gathering import most_at_once
from torch_bf16.recipe import Recipe
from torch_bf16.sharding.dtensor import box_at
from torch_bf16.states.home import SMALLEST

from .matrix_steps import ROWS, MatrixStep, matrix_step
from .optimizers import OptimizerSpec
from .precisions import Precision
from .shapes import ModelShapes, Weight

__all__ = ["Held", "Memory", "dtype_of", "held_of", "matrix_step_of", "memory", "part_of"]


@dataclass(frozen=True)
class Memory:
    """Bytes on one device: those that live from step to step, and those of a part of each step.

    Attributes:
        weights: of parameters.
        buffers: of the model's buffers.
        gradients: of all gradients; if a step or a sum takes each within the backward pass, of the
            largest parameter or FSDP unit and of those that wait.
        moments: of the optimizer's moments.
        master: of what weights have beyond the parameter.
        sums: of sums of gradients over micro-batches, if they have a format of their own.
        staging: of the buffers that states in host memory pass through.
        passing: of what lives beside all these at the worst moment, without activations: torch's
            scratch in ``optimizer.step()``; in the first step, the bits that the cast set aside; or
            what Muon and Adafactor gather and compute with.
        unsaved: the part of weights, buffers and master that checkpoints do not hold.
        host: of moments and masters in host memory, which no other attribute counts.
        buckets: of DDP's buckets, a copy of all gradients, which no other attribute counts.
    """

    weights: int = 0
    buffers: int = 0
    gradients: int = 0
    moments: int = 0
    master: int = 0
    sums: int = 0
    staging: int = 0
    passing: int = 0
    unsaved: int = 0
    host: int = 0
    buckets: int = 0

    @property
    def states(self) -> int:
        """Bytes that live from one step to the next."""
        return self.weights + self.buffers + self.moments + self.master

    @property
    def held(self) -> int:
        """Bytes that live at the end of a backward pass: states, gradients, sums and staging."""
        return self.states + self.gradients + self.sums + self.staging

    @property
    def saved(self) -> int:
        """Bytes that a checkpoint of model and optimizer holds."""
        return self.states + self.host - self.unsaved

    def peak(self, beside: int = 0) -> int:
        """The most bytes at one time.

        Args:
            beside: bytes of activations and of what is gathered; none of them live during the
                optimizer's step.
        """
        return self.held + max(self.passing, beside)


def part_of(shape: tuple[int, ...], ranks: int, rank: int = 0) -> tuple[int, ...]:
    """The shape of a rank's part of a parameter under ``fully_shard``."""
    if ranks == 1 or not shape:
        return shape
    box = box_at(shape, (ranks,), (rank,), (ROWS,))
    return tuple(each.stop - each.start for each in box)


def dtype_of(weight: Weight, precision: Precision) -> torch.dtype:
    """The dtype of a parameter in a precision."""
    if weight.frozen_as is not None:
        return weight.frozen_as
    # Lightning's bf16-true and model.bfloat16() cast every floating-point tensor.
    stays = weight.stays_fp32 and precision.recipe is not None
    return torch.float32 if stays else precision.dtype


def memory(
    shapes: ModelShapes,
    precision: Precision,
    optimizer: OptimizerSpec,
    ranks: int = 1,
    rank: int = 0,
) -> Memory:
    """The memory of one rank.

    Args:
        shapes: the shapes of the model.
        precision: how its numbers are kept.
        optimizer: the states that it keeps, and the scratch of its step.
        ranks: the number of ranks over which FSDP2 shards the model.
        rank: the rank's number; none holds more than rank 0.
    """
    volatile = shapes.buffer_bytes - shapes.persistent_bytes
    buffers = shapes.buffer_bytes
    if precision.loses:
        buffers -= shapes.narrowed_bytes
        volatile -= shapes.narrowed_bytes - shapes.narrowed_persistent_bytes
    sizes: dict[str, int] = defaultdict(int, buffers=buffers, unsaved=volatile)
    gradients: dict[str, int] = defaultdict(int)
    sums, scratch, remainders, single_scratches = 0, 0.0, [0], [0.0]
    kinds: dict[tuple[object, ...], Held] = {}
    offloads = precision.recipe is not None and precision.recipe.offload == "states"
    for each in shapes.weights:
        # Layers repeat: thousands of weights are of a few kinds.
        if (held := kinds.get(each.kind)) is None:
            part, dtype = part_of(each.shape, ranks, rank), dtype_of(each, precision)
            held = kinds[each.kind] = held_of(each, part, dtype, precision, optimizer)
        sizes["weights"] += held.weights
        if not each.trained:
            # A frozen weight's remainder is kept: the weight may be trained later.
            sizes["host" if offloads else "master"] += held.remainder
            sizes["unsaved"] += held.remainder
            continue
        offloaded = offloads and each.numel >= SMALLEST
        if offloaded:
            sizes["host"] += held.master + held.moments
            sizes["staging"] = BUFFERS * BUFFER_BYTES
        else:
            sizes["master"] += held.master
            sizes["moments"] += held.moments
        # A remainder as large as the master becomes it; one of an offloaded weight is on the host.
        remainders.append(0 if held.remainder == held.master or offloads else held.remainder)
        if optimizer.steps_singly(rule := optimizer.rule_of(each)):
            single_scratches.append((optimizer.scratch or 0.0) * held.weights)
        else:
            scratch += (optimizer.scratch_of(rule) or 0.0) * held.weights
        gradients[each.unit if ranks > 1 else each.name] += held.weights
        sums += held.count * 4 if precision.sums == "fp32" else held.weights
    total, largest = sum(gradients.values()), max(gradients.values(), default=0)
    waiting = precision.waiting
    passing = max(remainders) if precision.released else sum(remainders)
    if not shapes.known:
        # One matrix stands for all weights, and not for the largest of them.
        largest, passing = 0, 0 if precision.released else passing
    if not precision.released:
        passing = max(passing, matrix_step_of(shapes, precision, optimizer, ranks, rank).peak)
    scratch = max(scratch, *single_scratches)
    return Memory(
        **sizes,
        gradients=total if waiting is None else int(most_at_once(total, largest, waiting)),
        buckets=total,
        sums=0 if precision.sums is None else sums,
        passing=passing if precision.recipe is not None else round(scratch),
    )


def matrix_step_of(
    shapes: ModelShapes, precision: Precision, optimizer: OptimizerSpec, ranks: int, rank: int = 0
) -> MatrixStep:
    """Memory and traffic of a rule that works on whole matrices; arguments as in :func:`memory`."""
    if precision.recipe is None or not optimizer.rule.stage_states or not shapes.known:
        return MatrixStep()
    trained = [
        (each, optimizer.rule_of(each), dtype_of(each, precision))
        for each in shapes.weights
        if each.trained
    ]
    return matrix_step(trained, precision.recipe, ranks, rank)


@dataclass(frozen=True)
class Held:
    """A rank's part of one weight: its elements, and bytes by what they hold.

    ``remainder`` is what the cast keeps of an fp32 weight until its first step.
    """

    count: int
    weights: int
    remainder: int
    master: int
    moments: int


def held_of(
    weight: Weight,
    part: tuple[int, ...],
    dtype: torch.dtype,
    precision: Precision,
    optimizer: OptimizerSpec,
) -> Held:
    """Bytes that a rank holds of a weight; ``part`` is the shape of the rank's part."""
    count, recipe, rule = prod(part), precision.recipe, optimizer.rule_of(weight)
    weights = count * dtype.itemsize
    states = [each for each in (*rule.states, *rule.stage_states) if each.shape is None]
    # Factors are whole on every rank.
    factors = sum(prod(each.shape(weight.shape)) for each in rule.stage_states if each.shape)
    if recipe is None:
        return Held(count, weights, 0, 0, len(states) * weights + factors * dtype.itemsize)
    stored = recipe.format_of("weights", weight.shape, dtype)
    moments = [recipe.format_of(each.role, weight.shape, dtype) for each in states]
    return Held(
        count,
        weights,
        remainder=count * _remainder_itemsize(weight, dtype, recipe),
        master=_bytes(stored, part, 1),
        moments=sum(_bytes(each, part) for each in moments) + factors * 4,
    )


def _bytes(format_: Format, part: tuple[int, ...], first: int = 0) -> int:
    """Bytes of a format's planes, from number ``first`` on."""
    if not prod(part):
        return 0
    return sum(prod(each.shape(part)) * each.dtype.itemsize for each in format_.planes[first:])


def _remainder_itemsize(weight: Weight, dtype: torch.dtype, recipe: Recipe) -> int:
    """Bytes per element of what the cast keeps of an fp32 weight until its first step."""
    if dtype != torch.bfloat16 or weight.frozen_as is not None:
        return 0
    planes = recipe.format_of("weights", weight.shape).planes[1:]
    # 16 bits, even if the format keeps only eight of them.
    return max(planes[0].dtype.itemsize, 2) if planes else 0
