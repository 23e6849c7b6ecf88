"""The plugin and the callback for the Trainer of ``pytorch_lightning``."""

from pytorch_lightning.callbacks import Callback
from pytorch_lightning.plugins.precision import FSDPPrecision, HalfPrecision

from .monitor import MonitorBody
from .trainer import TrainerBody

__all__ = ["BF16Monitor", "BF16Precision"]


class BF16Precision(TrainerBody, FSDPPrecision, HalfPrecision):
    """Train a LightningModule in bf16 and end where fp32 would have ended.

    ``Trainer(precision="bf16-stochastic")`` makes one; make it yourself for the options.

    Args:
        recipe: ``"bf16-stochastic"``, ``"bf16-fp32-master"`` or a :class:`torch_bf16.Recipe`.
        compute: ``"autocast"``, or ``"bf16"`` for inputs cast to bf16 and no autocast.
        weights, exp_avg, exp_avg_sq, accumulate, keep_fp32, seed: replace fields of the recipe,
            which :class:`torch_bf16.Recipe` explains.
        release_gradients: take the step inside the backward pass, and free each gradient at once.
        release_max_norm, release_norm: clip what is released; see
            :func:`torch_bf16.release_gradients`.

    Example:
        >>> from pytorch_lightning import Trainer
        >>> plugin = BF16Precision("bf16-fp32-master", keep_fp32=["head"])
        >>> trainer = Trainer(plugins=[plugin], max_epochs=1)
    """


class BF16Monitor(MonitorBody, Callback):
    """Log for each layer what rounding does to the updates: :class:`torch_bf16.UpdateMonitor`.

    Through ``self.log``, so that every logger shows it: ``bf16/survived/<layer>`` (the share of the
    update that was stored), ``bf16/unmoved/<layer>``, ``bf16/snr/<layer>``,
    ``bf16/gradient_norm`` and ``bf16/skipped_steps``. A layer that stalls is named in a warning.

    Args:
        every: optimizer steps from one look to the next; None looks at the steps whose metrics the
            loggers get, ``Trainer(log_every_n_steps=...)``.
        sample: at most so many elements of each parameter are looked at.
        warn: whether to say, once per layer, that it stalls and what helps.

    Example:
        >>> from pytorch_lightning import Trainer
        >>> trainer = Trainer(precision="bf16-stochastic", callbacks=[BF16Monitor()])
    """
