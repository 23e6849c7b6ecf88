"""What fp16, TF32 and bf16 would overflow or lose of gradients, activations and products."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .models import ROUNDED, Passing
from .verdict import Verdict

__all__ = ["ranges"]

_FP16_MOST = 65504.0
"""The largest number of fp16; bf16 and TF32 have the range of fp32."""


def ranges(verdict: Verdict, passing: Mapping[str, Passing]) -> dict[str, Any]:
    """What each format would make of the numbers that were observed.

    Args:
        verdict: its layers hold the observed gradients.
        passing: what was observed of modules.

    Returns:
        For each format the share of nonzero gradients that would become zero, the same with the
        best scale of the loss, the modules whose outputs or gradients would be infinite, and the
        relative error of products' outputs, for the median layer and the worst one.
    """
    everything = verdict.everything
    # As large as the largest gradient allows, which a GradScaler approaches.
    scale = _FP16_MOST / everything.largest if everything.largest else 1.0
    infinite = [name for name, each in passing.items() if each.largest > _FP16_MOST]
    infinite += [each.name for each in verdict.layers if each.largest > _FP16_MOST]
    largest = max((each.largest for each in passing.values()), default=math.nan)
    formats = {}
    for name in ROUNDED:
        narrow = name == "fp16"
        errors = sorted((e.errors[name], n) for n, e in passing.items() if name in e.errors)
        formats[name] = {
            "gradients_to_zero": everything.underflow() if narrow else 0.0,
            "scaled_to_zero": everything.underflow(scale) if narrow else 0.0,
            "overflows": list(dict.fromkeys(infinite)) if narrow else [],
            "product_error": errors[len(errors) // 2][0] if errors else None,
            "worst_product": [errors[-1][1], errors[-1][0]] if errors else None,
        }
    return {
        "formats": formats,
        "largest_gradient": everything.largest,
        "largest_activation": largest if math.isfinite(largest) else None,
    }
