"""The names of the modes, as Accelerate shows and stores them. Imports nothing."""

from __future__ import annotations

__all__ = ["ALIASES", "MODES", "canonical", "canonical_or_refuse"]

MODES: tuple[str, ...] = ("bf16-stochastic", "bf16-fp32-master")
"""Values of ``mixed_precision``; each is the name of a recipe of ``torch_bf16``."""

ALIASES: dict[str, str] = {"true-bf16-stochastic": "bf16-stochastic"}
"""Other spellings, which Accelerate sees as the mode they stand for."""


def canonical(value: object) -> str | None:
    """The mode that a value of ``mixed_precision`` names, or None where it is not one of ours.

    Example:
        >>> canonical("true-bf16-stochastic")
        'bf16-stochastic'
        >>> canonical("bf16") is None
        True
    """
    name = str(value).lower()
    name = ALIASES.get(name, name)
    return name if name in MODES else None


def canonical_or_refuse(value: str, asked: str = "ACCELERATE_MIXED_PRECISION") -> str | None:
    """Like :func:`canonical`, where Accelerate itself does not validate what was ``asked``.

    Raises:
        ValueError: the value is nearly one of ours; Accelerate would train in fp32 without a word.

    Example:
        >>> canonical_or_refuse("bf16_stochastic")
        Traceback (most recent call last):
        ...
        ValueError: ACCELERATE_MIXED_PRECISION='bf16_stochastic' is no mode of Accelerate, ...
    """
    mode = canonical(value)
    if mode is None and value.lower().replace("_", "-").startswith(("bf16-", "true-bf16")):
        raise ValueError(
            f"{asked}={value!r} is no mode of Accelerate, which would train in fp32 without saying "
            f"so. The modes of torch-bf16 are {', '.join((*MODES, *ALIASES))}"
        )
    return mode
