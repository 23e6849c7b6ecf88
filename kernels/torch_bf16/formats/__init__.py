"""Storage formats: how one number of an optimizer is kept between two steps."""

from .blocks import BLOCK, INT8, UINT8
from .floats import BF16_NEAREST, BF16_PLUS_8, BF16_PLUS_16, BF16_PLUS_FP32, BF16_STOCHASTIC, FP32
from .format import Format, Plane

__all__ = [
    "BF16_NEAREST",
    "BF16_PLUS_8",
    "BF16_PLUS_16",
    "BF16_PLUS_FP32",
    "BF16_STOCHASTIC",
    "BLOCK",
    "FORMATS",
    "FP32",
    "INT8",
    "ROLES",
    "UINT8",
    "Format",
    "Plane",
]

_WEIGHTS = (BF16_NEAREST, BF16_STOCHASTIC, BF16_PLUS_16, BF16_PLUS_8, BF16_PLUS_FP32)
_MOMENTS = {each.name: each for each in (FP32, BF16_NEAREST, BF16_STOCHASTIC, INT8)}

FORMATS = {each.name: each for each in (FP32, *_WEIGHTS, INT8, UINT8)}
ROLES: dict[str, dict[str, Format]] = {
    "weights": {each.name: each for each in _WEIGHTS},
    "exp_avg": _MOMENTS,
    # Both kinds of moments have one name for users: what a recipe wants is eight bits.
    "exp_avg_sq": {**_MOMENTS, "int8": UINT8},
}
"""The formats that a recipe can name for each role, by that name."""
