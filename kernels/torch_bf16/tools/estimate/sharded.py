"""What ``fully_shard`` gathers on a rank, and what it sends over the wire."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from math import prod

import torch

from .memory import dtype_of, matrix_step_of, part_of
from .optimizers import OptimizerSpec
from .precisions import Precision
from .shapes import ModelShapes

__all__ = ["Traffic", "traffic"]


@dataclass(frozen=True)
class Traffic:
    """What a rank of FSDP2 gathers and reduces in a step, each numbered layer a unit of its own.

    The root's own parameters, embeddings and head, stay whole from forward to backward; layers are
    gathered twice, the next one while one computes.

    Attributes:
        gathered: bytes of whole weights at one time: the root's and those of two layers.
        reduced: bytes of whole gradients at one time, of the largest unit: in the dtype that they
            are reduced in, and also in the weights' dtype or, on a bf16 wire, as they are sent
            and as they are received.
        sent: bytes that a rank sends per step; it receives as many.
    """

    gathered: int
    reduced: int
    sent: int


def traffic(
    shapes: ModelShapes, precision: Precision, optimizer: OptimizerSpec, ranks: int
) -> Traffic:
    """What a step gathers, reduces and sends.

    Args:
        shapes: the shapes of the model.
        precision: weights are sent in bf16 in all but ``32-true``; gradients as its recipe's
            ``reduce`` says.
        optimizer: its step may send matrices, too.
        ranks: the number of ranks over which the model is sharded.
    """
    whole: dict[str, int] = defaultdict(int)
    gradients: dict[str, int] = defaultdict(int)
    reduced: dict[str, int] = defaultdict(int)
    exchanged: dict[str, int] = defaultdict(int)
    wired = precision.recipe is not None and precision.recipe.reduce == "bf16_wire"
    sent = 0
    for each in shapes.weights:
        dtype = torch.bfloat16 if precision.autocast else dtype_of(each, precision)
        # In a collective all parts have the size of rank 0's.
        part = prod(part_of(each.shape, ranks))
        whole[each.unit] += part * ranks * dtype.itemsize
        gathers = 1 if each.unit == "" else 2
        sent += (ranks - 1) * part * dtype.itemsize * gathers
        if each.trained:
            gradients[each.unit] += each.numel * dtype.itemsize
            # fully_shard reduces in fp32.
            reduced[each.unit] += part * ranks * torch.float32.itemsize
            wire = torch.float32
            if wired and dtype == torch.bfloat16:
                exchanged[each.unit] += 2 * part * ranks * dtype.itemsize
                wire = dtype
            sent += (ranks - 1) * part * wire.itemsize
    sent += matrix_step_of(shapes, precision, optimizer, ranks).sent
    if not shapes.known:
        return Traffic(0, 0, sent)
    layers = sorted((size for unit, size in whole.items() if unit), reverse=True)
    units = [reduced[unit] + max(gradients[unit], exchanged[unit]) for unit in whole]
    return Traffic(whole[""] + sum(layers[:2]), max(units, default=0), sent)
