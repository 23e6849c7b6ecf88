"""The plugin for Fabric of ``lightning_fabric``."""

from lightning_fabric import Fabric
from lightning_fabric.plugins.precision import FSDPPrecision, HalfPrecision, Precision

from ._host import wrap_fabric
from .precision import PrecisionBody

__all__ = ["BF16Precision"]


class BF16Precision(PrecisionBody, FSDPPrecision, HalfPrecision):
    """Train a module with Fabric in bf16 and end where fp32 would have ended.

    ``Fabric(precision="bf16-stochastic")`` makes one; make it yourself for the options.

    Args:
        recipe: ``"bf16-stochastic"``, ``"bf16-fp32-master"`` or a :class:`torch_bf16.Recipe`.
        compute: ``"autocast"``, or ``"bf16"`` for inputs cast to bf16 and no autocast.
        weights, exp_avg, exp_avg_sq, accumulate, keep_fp32, seed: replace fields of the recipe,
            which :class:`torch_bf16.Recipe` explains.
        release_gradients: take the step inside the backward pass, and free each gradient at once.
        release_max_norm, release_norm: clip what is released; see
            :func:`torch_bf16.release_gradients`.

    Example:
        >>> from lightning_fabric import Fabric
        >>> fabric = Fabric(plugins=[BF16Precision("bf16-fp32-master", seed=1)])
    """

    # FSDPPrecision has one for its gradient scaler; with it Fabric would refuse loss.backward().
    backward = Precision.backward


wrap_fabric(Fabric)
