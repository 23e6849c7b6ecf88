"""The plugin and the callbacks for the Trainer of ``pytorch_lightning``."""

from pytorch_lightning.callbacks import Callback, GradientAccumulationScheduler
from pytorch_lightning.plugins.precision import DeepSpeedPrecision, FSDPPrecision, HalfPrecision
from pytorch_lightning.strategies import DDPStrategy

from .deepspeed import DeepSpeedMixin
from .monitor import MonitorMixin
from .train_modes import TrainModesMixin
from .trainer import TrainerMixin

__all__ = ["BF16DeepSpeedPrecision", "BF16Monitor", "BF16Precision"]


class _TrainModes(TrainModesMixin, Callback):
    __doc__ = TrainModesMixin.__doc__


class BF16Precision(TrainerMixin, FSDPPrecision, HalfPrecision):
    __doc__ = TrainerMixin.__doc__
    _train_modes = _TrainModes
    _accumulation_scheduler = GradientAccumulationScheduler
    _replicas = DDPStrategy


class BF16DeepSpeedPrecision(DeepSpeedMixin, TrainerMixin, DeepSpeedPrecision):
    """The form of :class:`BF16Precision` under ``DeepSpeedStrategy``."""

    _train_modes = _TrainModes
    _accumulation_scheduler = GradientAccumulationScheduler


class BF16Monitor(MonitorMixin, Callback):
    __doc__ = MonitorMixin.__doc__
