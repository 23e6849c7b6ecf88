"""Sums of the bits of a weight, to notice writes that do not change its version."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from torch_bf16.sharding import Shard

__all__ = ["Fingerprint"]

# Elements per sum. A shard may hold only parts of its first and last block: those are not compared.
_ELEMENTS_PER_SUM = 64


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Sums over blocks of a bf16 tensor, by which any part of it can be recognized.

    Attributes:
        sums: int32, one per block: of the bits, weighted by their places in it.
        shape: shape of the tensor.
    """

    sums: Tensor
    shape: torch.Size

    @classmethod
    def of(cls, memory: Tensor) -> Fingerprint:
        """The fingerprint of a bf16 tensor, sharded or not."""
        bits = memory.reshape(-1).view(torch.int16)
        size = _block_size(bits.numel())
        blocks = pad(bits, (0, -bits.numel() % size)).view(-1, size)
        weights = _weights(torch.arange(size, device=bits.device))
        # At most 2^15 * (1 + 2 + ... + 64) in magnitude, and exact; in parts, as products take
        # memory.
        parts = [(each * weights).sum(1, dtype=torch.int32) for each in blocks.split(2**18)]
        return cls(torch.cat(parts) if len(parts) > 1 else parts[0], memory.shape)

    @classmethod
    def empty(cls, shape: torch.Size, device: torch.device) -> Fingerprint:
        """Memory for the fingerprint of a tensor of this shape, as another rank sends it."""
        count = -(-shape.numel() // _block_size(shape.numel()))
        return cls(torch.empty(count, dtype=torch.int32, device=device), shape)

    def to(self, device: torch.device) -> Fingerprint:
        """The same sums on a device."""
        return Fingerprint(self.sums.to(device), self.shape)

    def is_of(self, shard: Shard) -> bool | None:
        """Whether a shard still holds the bits of this tensor; None if it has no whole block."""
        memory = shard.memory
        if memory.dtype != torch.bfloat16:
            return False
        sums = self.sums.to(memory.device)
        if memory.shape == self.shape:
            return torch.equal(Fingerprint.of(memory).sums, sums)
        if shard.shape != tuple(self.shape):
            return False
        size = _block_size(self.shape.numel())
        indices = shard.span.indices(memory.device)
        blocks = indices // size
        numbers, at, counts = blocks.unique_consecutive(return_inverse=True, return_counts=True)
        found = torch.zeros(len(numbers), dtype=torch.int32, device=memory.device)
        bits = memory.reshape(-1).view(torch.int16).to(torch.int32)
        found.index_add_(0, at, bits * _weights(indices % size))
        complete = counts == size
        if not complete.any():
            return None
        return torch.equal(found[complete], sums[numbers[complete]])


def _weights(places: Tensor) -> Tensor:
    """The factors of the bits at these places of a block, so that their order counts."""
    return (places + 1).int()


def _block_size(numel: int) -> int:
    return _ELEMENTS_PER_SUM if numel > 4096 else 1
