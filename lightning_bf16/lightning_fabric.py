"""The plugin for Fabric of ``lightning_fabric``."""

from lightning_fabric.plugins.precision import (
    DeepSpeedPrecision,
    FSDPPrecision,
    HalfPrecision,
    Precision,
)

from .deepspeed import DeepSpeedBody
from .precision import PrecisionBody

__all__ = ["BF16DeepSpeedPrecision", "BF16Precision"]


class BF16Precision(PrecisionBody, FSDPPrecision, HalfPrecision):
    __doc__ = PrecisionBody.__doc__

    # FSDPPrecision has one for its gradient scaler; with it Fabric would refuse loss.backward().
    backward = Precision.backward


class BF16DeepSpeedPrecision(DeepSpeedBody, PrecisionBody, DeepSpeedPrecision):
    """What :class:`BF16Precision` becomes under ``DeepSpeedStrategy``."""
