"""Storage formats: how one number of an optimizer is kept between two steps."""

from .format import Format, Plane
from .masters import MASTER32, REMAINDER8, REMAINDER16
from .single import BF16_NEAREST, BF16_STOCHASTIC, FP32

__all__ = [
    "BF16_NEAREST",
    "BF16_STOCHASTIC",
    "FORMATS",
    "FP32",
    "MASTER32",
    "REMAINDER8",
    "REMAINDER16",
    "Format",
    "Plane",
    "get_format",
]

FORMATS = {
    each.name: each
    for each in (FP32, BF16_NEAREST, BF16_STOCHASTIC, REMAINDER16, REMAINDER8, MASTER32)
}


def get_format(name: str) -> Format:
    """The format called ``name``.

    Raises:
        ValueError: there is none; the message lists the known ones.
    """
    try:
        return FORMATS[name]
    except (KeyError, TypeError):
        raise ValueError(f"unknown format {name!r}; known formats: {', '.join(FORMATS)}") from None
