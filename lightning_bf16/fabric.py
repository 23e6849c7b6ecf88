"""The plugin for Fabric of ``lightning.fabric``."""

from lightning.fabric.plugins.precision import FSDPPrecision, HalfPrecision, Precision

from .precision import PrecisionBody

__all__ = ["BF16Precision"]


class BF16Precision(PrecisionBody, FSDPPrecision, HalfPrecision):
    __doc__ = PrecisionBody.__doc__

    # FSDPPrecision has one for its gradient scaler; with it Fabric would refuse loss.backward().
    backward = Precision.backward
