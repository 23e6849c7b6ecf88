"""The rounding primitives, public: how numbers are rounded, and where the noise comes from.

Rounding (:mod:`~torch_bf16.numerics.rounding`): `bf16_nearest`, `bf16_stochastic`, and the lossless
or 24-bit splits `split16`/`join16` and `split8`/`join8`. Noise
(:mod:`~torch_bf16.numerics.counter_rng`): `noise` of any run of elements, `tensor_key` of a
parameter's name, `draw16` for the sixteen bits that a `Draw` takes, and the building blocks of
kernels: `stream_base`, `block_keys`, `sum_base`, `noise_bits`.

Example:
    >>> x = torch.full((4, 4), 1.001)
    >>> bits = noise(seed=0, step=1, key=tensor_key("weight"), stream=WEIGHT.stream, start=0, n=16)
    >>> bf16_stochastic(x, draw16(bits, WEIGHT).view(4, 4)).unique()
    tensor([1.0000, 1.0078], dtype=torch.bfloat16)
"""

from .counter_rng import (
    FIRST_MOMENT,
    GRADIENT,
    SECOND_MOMENT,
    WEIGHT,
    Draw,
    block_keys,
    draw16,
    noise,
    noise_bits,
    stream_base,
    sum_base,
    tensor_key,
)
from .rounding import bf16_nearest, bf16_stochastic, join8, join16, split8, split16

__all__ = [
    "FIRST_MOMENT",
    "GRADIENT",
    "SECOND_MOMENT",
    "WEIGHT",
    "Draw",
    "bf16_nearest",
    "bf16_stochastic",
    "block_keys",
    "draw16",
    "join8",
    "join16",
    "noise",
    "noise_bits",
    "split8",
    "split16",
    "stream_base",
    "sum_base",
    "tensor_key",
]
