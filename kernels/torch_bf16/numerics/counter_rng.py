"""Noise as a pure function of (seed, step, tensor, stream, element).

There is no generator state: a resumed run, another sharding or another launch shape draws the same
bits for the same element. All arithmetic is modulo 2**32 and every shift is logical.

- Per tensor and stream, once: `stream_base` hashes (seed, tensor key, stream) to two words.
- Per step, and per block of 2**32 elements: `block_keys` mixes step and block into two words.
- A sum of gradients is rounded once per micro-batch: `sum_base` mixes the step into the words of
  its stream, and the number of the micro-batch takes the step's place. Both mixings are one-to-one,
  so no two micro-batches of a parameter share keys, whatever their steps.
  A mean over ranks does the same in a stream of its own, with the number of the reduction.
- Per element: `noise_bits`, three multiplications. With two, draws at some distances in a tensor
  depend on each other, and two steps whose first keys differ in few bits draw permutations of each
  other's noise, off by a constant.

The mixers are the hashes "lowbias32" for keys and "triple32" for elements (C. Wellons, "Prospecting
for hash functions", public domain). The second has ``k1`` added midway, and a last shift of 16
instead of 14, which leaves the upper half of the last product as it is.

Rounding to bf16 takes 16 bits, so one word serves two numbers: `WEIGHT` is its upper half and
`SECOND_MOMENT` its lower one.
"""

import struct
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = [
    "FIRST_MOMENT",
    "GRADIENT",
    "REDUCTION",
    "SECOND_MOMENT",
    "WEIGHT",
    "Draw",
    "block_keys",
    "draw16",
    "noise",
    "noise_bits",
    "stream_base",
    "sum_base",
    "tensor_key",
]


class Draw(NamedTuple):
    """Sixteen random bits of an element: those above ``shift`` in the word of a stream."""

    stream: int
    shift: int


WEIGHT = Draw(stream=0, shift=16)
SECOND_MOMENT = Draw(stream=0, shift=0)
FIRST_MOMENT = Draw(stream=1, shift=16)
GRADIENT = Draw(stream=2, shift=16)
REDUCTION = Draw(stream=3, shift=16)

_MASK32 = 0xFFFFFFFF
# The most elements drawn at once: their numbers must fit in a non-negative int32.
_MAX_PIECE = 2**30

# An int, or an array of integers: no static type says both.
_Word = Any


def tensor_key(name: str) -> int:
    """The 64-bit key of a tensor, from the fully qualified name of its parameter.

    Example:
        >>> tensor_key("layers.0.weight")
        4473830710502933260
    """
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")


def stream_base(seed: int, key: int, stream: int) -> tuple[int, int]:
    """The two 32-bit words that a tensor's stream starts from, the same at every step.

    Args:
        seed: any integer, negative ones included; taken modulo 2**64.
        key: from `tensor_key`.
        stream: the stream of a `Draw`.

    Example:
        >>> stream_base(0, tensor_key("layers.0.weight"), WEIGHT.stream)
        (859313380, 3720075511)
    """
    packed = struct.pack("<QQB", seed % 2**64, key, stream)
    return struct.unpack("<II", blake2b(packed, digest_size=8).digest())


def block_keys(base: tuple[_Word, _Word], step: _Word, index_hi: _Word) -> tuple[_Word, _Word]:
    """The keys of a step for the elements whose global index is in one block of 2**32.

    Each argument is an int, or an array with one entry per tensor; the two kinds mix, and the same
    source serves both. Arrays are NumPy uint32 or int64, or torch int64, and not 0-d in NumPy
    (whose scalars warn when they wrap around).

    Args:
        base: from `stream_base`.
        step: the optimizer's step; taken modulo 2**32.
        index_hi: global element index >> 32.

    Returns:
        ``(k0, k1)``, each in [0, 2**32), of the kind of the arguments.

    Example:
        >>> block_keys(stream_base(0, tensor_key("w"), WEIGHT.stream), step=1, index_hi=0)
        (109841590, 519628898)
    """
    t0, t1 = base
    block = (index_hi & _MASK32) * 0x85EBCA6B & _MASK32
    k0 = _mix32((t0 ^ block) + ((step & _MASK32) * 0x9E3779B9 & _MASK32) & _MASK32)
    return k0, _mix32(t1 ^ k0)


def sum_base(base: tuple[_Word, _Word], step: _Word) -> tuple[_Word, _Word]:
    """The two words that the noise of a sum of gradients starts from, in place of a stream's base.

    Args:
        base: from `stream_base`.
        step: the 1-based number of the optimizer step that the sum is for; taken modulo 2**32.

    Returns:
        A base for `block_keys`, whose ``step`` then is the number of the micro-batch.

    Example:
        >>> base = stream_base(0, tensor_key("w"), GRADIENT.stream)
        >>> second_micro_batch = block_keys(sum_base(base, step=1), step=2, index_hi=0)
    """
    return block_keys(base, step, 0)


def noise_bits(k0: int, k1: int, index_lo: Tensor) -> Tensor:
    """32 random bits for each element of one block.

    Args:
        k0: from `block_keys`.
        k1: from `block_keys`.
        index_lo: int32, the bit patterns of the lower 32 bits of the global element indices.

    Returns:
        int32 bit patterns, the shape of ``index_lo``.

    Raises:
        ValueError: ``index_lo`` is not int32.

    Example:
        >>> keys = block_keys(stream_base(0, tensor_key("w"), WEIGHT.stream), 1, 0)
        >>> noise_bits(*keys, torch.arange(2, dtype=torch.int32))
        tensor([ -599814064, -1543071980], dtype=torch.int32)
    """
    if index_lo.dtype != torch.int32:
        raise ValueError(f"noise_bits needs int32 indices, got {index_lo.dtype}")
    x = index_lo ^ _as_int32(k0)
    # torch shifts int32 arithmetically; the masks make the shifts logical.
    x ^= (x >> 17) & 0x7FFF
    x *= _as_int32(0xED5AD4BB)
    x ^= (x >> 11) & 0x1FFFFF
    x += _as_int32(k1)
    x *= _as_int32(0xAC4C1B51)
    x ^= (x >> 15) & 0x1FFFF
    x *= 0x31848BAB
    x ^= (x >> 16) & 0xFFFF
    return x


def draw16(bits: Tensor, draw: Draw) -> Tensor:
    """The 16 bits of each word that are ``draw``.

    Args:
        bits: int32 bit patterns, any shape: from `noise` or `noise_bits`.
        draw: which half of them.

    Returns:
        int32 in [0, 65535], the shape of ``bits``: what `bf16_stochastic` takes.

    Example:
        >>> draw16(torch.tensor([0x00020001], dtype=torch.int32), WEIGHT)
        tensor([2], dtype=torch.int32)
    """
    return (bits >> draw.shift) & 0xFFFF


def noise(
    seed: int,
    step: int,
    key: int,
    stream: int,
    start: int,
    n: int,
    device: torch.device | str | None = None,
) -> Tensor:
    """32 random bits for each of the elements ``start .. start + n - 1`` of a tensor.

    Args:
        seed: any integer; taken modulo 2**64.
        step: the optimizer's step; taken modulo 2**32.
        key: from `tensor_key`.
        stream: the stream of a `Draw`.
        start: global index of the first element, in row-major order; may exceed 2**32.
        n: number of elements.
        device: the device of the result.

    Returns:
        int32 bit patterns, shape ``[n]``.

    Raises:
        ValueError: if ``start`` or ``n`` is negative.

    Example:
        >>> key = tensor_key("layers.0.weight")
        >>> whole = noise(0, 1, key, WEIGHT.stream, start=0, n=8)
        >>> torch.equal(noise(0, 1, key, WEIGHT.stream, start=5, n=3), whole[5:])
        True
    """
    if start < 0 or n < 0:
        raise ValueError(
            f"noise: start={start} and n={n}, but elements are counted from 0; "
            "pass non-negative integers"
        )
    base = stream_base(seed, key, stream)
    result = torch.empty(n, dtype=torch.int32, device=device)
    done = 0
    while done < n:
        index_hi, index_lo = divmod(start + done, 2**32)
        count = min(n - done, 2**32 - index_lo, _MAX_PIECE)
        k0, k1 = block_keys(base, step, index_hi)
        indices = torch.arange(count, dtype=torch.int32, device=device).add_(_as_int32(index_lo))
        result[done : done + count] = noise_bits(k0, k1, indices)
        done += count
    return result


def _mix32(x: _Word) -> _Word:
    x = x ^ x >> 16
    x = x * 0x7FEB352D & _MASK32
    x = x ^ x >> 15
    x = x * 0x846CA68B & _MASK32
    return x ^ x >> 16


def _as_int32(word: int) -> int:
    """The signed number with the bit pattern of an unsigned 32-bit one."""
    word = int(word)
    return word - 2**32 if word >= 2**31 else word
