"""What other libraries' optimizers keep of a weight beyond bf16, by the names of their states."""

from __future__ import annotations

import re

__all__ = ["MASTER", "SUM", "UNREADABLE", "extra_bits"]

SUM, MASTER, UNREADABLE = "sum", "master", "unreadable"
"""A state to be added to the weight; the whole weight in fp32; or lost bits in an unknown form."""

_KNOWN = {
    "kahan_comp": SUM,  # optimi, pytorch_optimizer
    "compensation": SUM,  # AnyPrecisionAdamW of torchdistx and torchtune
    "fp32_param": MASTER,
    "kahan_compensation": UNREADABLE,
    "weight_residual": UNREADABLE,
}
_ALIKE = re.compile("master|remainder|kahan|error|correction", re.IGNORECASE)


def extra_bits(name: object) -> str | None:
    """How a state extends the weight: :data:`SUM`, :data:`MASTER`, :data:`UNREADABLE`, or None.

    Args:
        name: the key in the optimizer's state.

    Example:
        >>> extra_bits("compensation"), extra_bits("master_weight"), extra_bits("exp_avg")
        ('sum', 'unreadable', None)
    """
    known = _KNOWN.get(str(name))
    return known or (UNREADABLE if _ALIKE.search(str(name)) else None)
