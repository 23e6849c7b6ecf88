"""The plugin for the Trainer of ``lightning.pytorch``."""

from lightning.pytorch.plugins.precision import FSDPPrecision, HalfPrecision

from .trainer import TrainerBody

__all__ = ["BF16Precision"]


class BF16Precision(TrainerBody, FSDPPrecision, HalfPrecision):
    """Train a LightningModule in bf16 and end where fp32 would have ended.

    ``Trainer(precision="bf16-stochastic")`` makes one; make it yourself for the options.

    Args:
        mode: ``"bf16-stochastic"``, ``"bf16-fp32-master"`` or a :class:`torch_bf16.Recipe`.
        compute: ``"autocast"``, or ``"bf16"`` for inputs cast to bf16 and no autocast.
        keep_fp32: modules that stay in fp32, by pattern of their name or by class.
        seed: seed of the rounding noise, the same on every rank; None for the recipe's.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> plugin = BF16Precision("bf16-fp32-master", keep_fp32=["head"])
        >>> trainer = Trainer(plugins=[plugin], max_epochs=1)
    """
