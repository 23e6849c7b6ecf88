"""The plugin for the Fabric of ``lightning.fabric``."""

from lightning.fabric.plugins.precision import (
    DeepSpeedPrecision,
    FSDPPrecision,
    HalfPrecision,
    Precision,
)

from .deepspeed import DeepSpeedMixin
from .precision import PrecisionMixin

__all__ = ["BF16DeepSpeedPrecision", "BF16Precision"]


class BF16Precision(PrecisionMixin, FSDPPrecision, HalfPrecision):
    __doc__ = PrecisionMixin.__doc__

    # FSDPPrecision overrides it for its gradient scaler; Fabric would then refuse loss.backward().
    backward = Precision.backward


class BF16DeepSpeedPrecision(DeepSpeedMixin, PrecisionMixin, DeepSpeedPrecision):
    """The form of :class:`BF16Precision` under ``DeepSpeedStrategy``."""
