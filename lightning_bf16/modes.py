"""The names of the modes, and whether one is used, for stock runs, which import no core."""

from __future__ import annotations

import os
import sys
from typing import Any

__all__ = ["MODES", "in_use", "is_plugin", "overriding_mode"]

MODES: tuple[str, ...] = ("bf16-stochastic", "bf16-fp32-master")
"""Values of ``precision``; each is the name of a recipe of ``torch_bf16``."""


def in_use() -> bool:
    """Whether this process has imported our plugins, which happens only once a mode is used."""
    return "lightning_bf16.precision" in sys.modules


def is_plugin(precision: Any) -> bool:
    """Whether a precision plugin is one of ours."""
    if not in_use():
        return False
    from .precision import PrecisionMixin

    return isinstance(precision, PrecisionMixin)


def overriding_mode() -> str | None:
    """The mode that ``BF16_MODE`` names, or None if it is empty or not set.

    Raises:
        ValueError: it names something else.
    """
    if not os.environ.get("BF16_MODE", "").strip():
        return None
    from torch_bf16 import plugin_api

    return plugin_api.mode_from_environment()
